"""The backward passes of tier "full" are seen by no hook and leave nothing, whatever happens in them."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional

from spectral_monitor import SpectralProbe
from spectral_monitor.capture.replay import graph_replay as graph
from spectral_monitor.engine.features import kernels as full

STEPS = 3


class Watched(nn.Module):
    """Watched by all the hooks that a backward pass calls, from outside the model, where nothing is put back."""

    def __init__(self, heard):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))

        def hear(kind):
            return lambda *args: heard.append(kind)

        self.net[0].register_full_backward_hook(hear("module"))
        self.net[2].register_full_backward_pre_hook(hear("module, before"))
        self.net[4].weight.register_hook(hear("parameter"))
        self.net[4].bias.register_post_accumulate_grad_hook(hear("accumulated"))

    def forward(self, x, y):
        return functional.cross_entropy(self.net(x), y)


class RandomBackward(torch.autograd.Function):
    """Draws in the backward pass, as checkpoints and quantized gradients do."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g + 0 * torch.rand_like(g)


class Accumulates(torch.autograd.Function):
    """Adds to a parameter's gradient by itself, as fused kernels do."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.p = p
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if ctx.p.grad is None:
            ctx.p.grad = torch.zeros_like(ctx.p)
        ctx.p.grad += 0.5
        return g, None


class Awkward(Watched):
    def forward(self, x, y):
        h = RandomBackward.apply(self.net[:4](x))
        return functional.cross_entropy(self.net[4](Accumulates.apply(h, self.net[4].bias)), y)


def run(kind, quantities=None):
    """Some steps; all that is to be compared, and the last measurement."""
    torch.manual_seed(0)
    heard = []
    model = kind(heard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    probe = None if quantities is None else SpectralProbe(model, optimizer, every_n_steps=1, quantities=quantities)
    seen = []
    for _ in range(STEPS):
        x, y = torch.randn(10, 6), torch.randint(3, (10,))
        optimizer.zero_grad()
        gradients = []
        if probe is None:
            model(x, y).backward()
            optimizer.step()
        else:
            with probe.step():
                model(x, y).backward()
                gradients = [p.grad for p in model.parameters()]
                optimizer.step()
            assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
        seen += [p.grad.clone() for p in model.parameters()] + [t.clone() for t in model.state_dict().values()]
        seen.append(torch.get_rng_state())
    hooks = [len(m._backward_hooks) + len(m._backward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    hooks += [len(p._backward_hooks or ()) for p in model.parameters()]
    return (heard, hooks, seen), None if probe is None else probe.latest


def same(a, b):
    tensors = len(a[2]) == len(b[2]) and all(torch.equal(x, y) for x, y in zip(a[2], b[2], strict=True))
    return {"heard": a[0] == b[0], "hooks": a[1] == b[1], "tensors": tensors}


SAME = {"heard": True, "hooks": True, "tensors": True}


@pytest.mark.parametrize("kind", [Watched, Awkward])
def test_nobody_hears_of_it(kind):
    plain, _ = run(kind)
    watched, measurement = run(kind, "full")
    assert set(plain[0]) == {"module", "module, before", "parameter", "accumulated"}
    assert same(plain, watched) == SAME
    for key in ("backward_speed", "bfk_ratio"):
        assert measurement.values[key][0].isfinite(), measurement.why(key, "net.0")


@contextmanager
def only_grad_mode(model, parameters):
    with torch.enable_grad():
        yield


@pytest.mark.parametrize(("kind", "differs"), [(Watched, "heard"), (Awkward, "tensors")])
def test_without_the_guard_somebody_would(kind, differs, monkeypatch):
    monkeypatch.setattr(full, "unseen", only_grad_mode)
    watched, _ = run(kind, "full")
    assert not same(run(kind)[0], watched)[differs]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["bfk_moments", "rows_of"])
@pytest.mark.filterwarnings("ignore:.*not measured: ")
def test_hooks_and_gradients_come_back_after_an_error(error, where, monkeypatch):
    def fails(*args, **kwargs):
        torch.rand(3)
        raise error("boom")

    torch.manual_seed(0)
    heard = []
    model = Watched(heard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities="full")
    x, y = torch.randn(10, 6), torch.randint(3, (10,))
    monkeypatch.setattr(full, where, fails)

    def step():
        with probe.step():
            model(x, y).backward()
            state.update(
                gradients=[p.grad for p in model.parameters()],
                values=[p.grad.clone() for p in model.parameters()],
                buffers=copy.deepcopy(list(model.buffers())),
                random=torch.get_rng_state(),
            )
            optimizer.step()

    state = {}
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            step()
    else:
        step()
        key = {"bfk_moments": "bfk_ratio", "rows_of": "backward_speed"}[where]
        assert "RuntimeError: boom" in probe.latest.why(key, "net.0")
        assert probe.latest.value("feature_change", "net.0") > 0
    assert all(p.grad is g for p, g in zip(model.parameters(), state["gradients"], strict=True))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), state["values"], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), state["buffers"], strict=True))
    assert torch.equal(torch.get_rng_state(), state["random"])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    heard.clear()
    model(x, y).backward()
    assert set(heard) == {"module", "module, before", "parameter", "accumulated"}, "hooks still work"


def test_graphs_are_let_go():
    """After a step nothing holds on to what autograd made."""
    torch.manual_seed(0)
    model = Watched([])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities="full")
    with probe.step():
        model(torch.randn(10, 6), torch.randint(3, (10,))).backward()
        assert probe._engine.features.capture.checks._by_node
        optimizer.step()
        assert not probe._engine.features.capture.checks._by_node
    assert not probe._engine.features.capture.calls


def test_a_hook_on_all_modules_is_told_of():
    assert graph.sees_all_modules() == ""
    handle = nn.modules.module.register_module_full_backward_pre_hook(lambda *args: None)
    try:
        assert "all modules" in graph.sees_all_modules()
    finally:
        handle.remove()
    assert graph.sees_all_modules() == ""
