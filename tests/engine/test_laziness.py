"""Is a run lazy: linearity and the drift of kernels, against deep copies, differences and inner products by hand."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from spectral_monitor import SpectralProbe
from spectral_monitor.engine.features import linearization
from tests.one_step import training_step

torch.set_num_threads(1)
H = 1e-4
KEYS = ["linearity", "kernel_drift", "kernel_alignment"]


class Net(nn.Module):
    """A convolution, normalization, dropout, attention, tied weights, and a layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.embed, self.conv = nn.Embedding(11, 12), nn.Conv1d(12, 12, 3, padding=1)
        self.norm, self.qkv = nn.LayerNorm(12), nn.Linear(12, 36)
        self.twice, self.dropout = nn.Linear(12, 12), nn.Dropout(0.2)
        self.head = nn.Linear(12, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.conv(self.embed(tokens).mT).mT
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
        x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = self.twice(torch.tanh(self.twice(self.dropout(x))))
        return functional.cross_entropy(self.head(torch.tanh(x)).flatten(0, 1), tokens.flatten())


LAYERS = ("embed", "conv", "qkv", "twice", "head")


def tokens(step):
    return torch.randint(11, (6, 5), generator=torch.Generator().manual_seed(step))


def train(model, steps=6, keys=KEYS, batch=tokens, lr=0.05, **settings):
    """Train by AdamW; the probe, and the model before."""
    start = copy.deepcopy(model)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=lr)
    probe = SpectralProbe(model, optimizer, quantities=keys, **{"every_n_steps": steps, "drift_every": 1, **settings})
    walk(probe, model, optimizer, batch, steps)
    return probe, start


def walk(probe, model, optimizer, batch, steps):
    for step in range(steps):
        with training_step(probe, optimizer):
            torch.manual_seed(step)
            model(batch(step)).backward()


def seen(model, parameters, x, names):
    """Outputs of layers, calls one after the other, as a function of the parameters, under the masks of seed 0."""
    outs, handles = {name: [] for name in names}, []
    for name in names:
        hook = lambda module, args, out, name=name: outs[name].append(out)  # noqa: E731
        handles.append(model.get_submodule(name).register_forward_hook(hook))
    torch.manual_seed(0)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        functional_call(model, parameters, (x,))
    for handle in handles:
        handle.remove()
    rows = {name: [out.mT if name == "conv" else out for out in some] for name, some in outs.items()}
    return {name: torch.cat([out.flatten(0, -2) for out in some]) for name, some in rows.items()}


def oracle(start, now, x, names=LAYERS):
    """Layer -> linearity, drift and alignment of kernels, all rows, in float64; derivatives by central differences."""
    start, now = copy.deepcopy(start).double(), copy.deepcopy(now).double()
    w0 = {name: p.detach() for name, p in start.named_parameters()}
    wt = {name: p.detach() for name, p in now.named_parameters()}
    ahead, behind = ({name: w + sign * (wt[name] - w) for name, w in w0.items()} for sign in (H, -H))
    h0, ht, more, less = (seen(start, p, x, names) for p in (w0, wt, ahead, behind))
    tangent = {name: (more[name] - less[name]) / (2 * H) for name in names}
    found = {}
    for name in names:
        change = (ht[name] - h0[name]).detach()
        first, last = (h[name].detach() @ h[name].detach().T for h in (h0, ht))
        center = torch.eye(len(first)).double() - 1 / len(first)
        a, b = center @ first @ center, center @ last @ center
        found[name] = {
            "linearity": float((change - tangent[name]).norm() / change.norm()),
            "kernel_drift": float((last - first).norm() / first.norm()),
            "kernel_alignment": float((a * b).sum() / (a.norm() * b.norm())),
        }
    return found


def made(dtype=torch.float64):
    torch.manual_seed(3)
    return Net().to(dtype)


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-6), (torch.float32, 1e-3)])
def test_against_float64(dtype, rel):
    model = made(dtype)
    probe, start = train(model)
    want = oracle(start, model, tokens(0))
    for name in LAYERS:
        for key in KEYS:
            assert probe.latest.value(key, name) == pytest.approx(want[name][key], rel=rel, abs=1e-6), (key, name)
    assert want["head"]["linearity"] > 0.1
    assert probe.latest.summary["linearity"] == probe.latest.value("linearity", "head")


@pytest.mark.parametrize("settings", [{"low_memory": True}, {"replay_samples": None}, {"every_n_steps": 1}], ids=str)
def test_settings_do_not_matter(settings):
    model = made()
    probe, start = train(model, **settings)
    want = oracle(start, model, tokens(0))
    for name in LAYERS:
        assert probe.latest.value("linearity", name) == pytest.approx(want[name]["linearity"], rel=1e-6, abs=1e-9)


def test_a_network_that_is_linear_in_its_weights_is_lazy():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    net[0].requires_grad_(False)
    wrapped = Returns(net)
    x = torch.randn(9, 6).double()
    probe, _ = train(wrapped, batch=lambda step: x)
    assert probe.latest.value("linearity", "net.2") < 1e-12
    assert math.isnan(probe.latest.value("linearity", "net.0"))  # it has not moved
    assert probe.latest.value("kernel_drift", "net.0") == 0
    assert probe.latest.value("kernel_alignment", "net.0") == pytest.approx(1, abs=1e-12)


class Returns(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x).square().mean()


def test_it_is_measured_at_the_clock_of_drift():
    probe, _ = train(made(), steps=4, every_n_steps=1, drift_every=3)
    known = [math.isfinite(m.value("linearity", "head")) for m in probe.measurements]
    assert known == [True, False, False, True]
    assert "every 3th measured step" in probe.measurements[1].why("linearity", "head")


def test_an_interval_of_its_own_has_a_count_of_its_own():
    intervals = {"linearity": 4, "feature_drift": 1}
    probe, _ = train(made(), keys=list(intervals), every_n_steps=intervals, drift_every=5, steps=24)
    some = [m for m in probe.measurements if "linearity" in m.values]
    assert [m.step for m in some if math.isfinite(m.value("linearity", "head"))] == [
        4,
        16,
        24,
    ]  # 4 and 24 by its own count, 16 by that of drift


def test_a_resumed_run_goes_on_from_the_start():
    model = made()
    probe, start = train(model, every_n_steps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    resumed = SpectralProbe(model, optimizer, quantities=KEYS, every_n_steps=10, drift_every=1)
    resumed.load_state_dict(probe.state_dict())
    walk(resumed, model, optimizer, tokens, 4)
    want = oracle(start, model, tokens(0))
    for name in LAYERS:
        assert resumed.latest.value("linearity", name) == pytest.approx(want[name]["linearity"], rel=1e-6, abs=1e-9)


def test_a_resumed_run_without_the_start_says_so():
    model = made()
    probe, _ = train(model, every_n_steps=100)
    state = probe.state_dict()
    tensors = next(part for part in state.values() if isinstance(part, dict) and "parameters" in part)
    del tensors["parameters"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    resumed = SpectralProbe(model, optimizer, quantities=KEYS, every_n_steps=1, drift_every=1)
    resumed.load_state_dict(state)
    walk(resumed, model, optimizer, tokens, 1)
    assert resumed.latest.why("linearity", "head") == linearization.NO_START
    assert math.isfinite(resumed.latest.value("kernel_drift", "head"))


class NoForwardMode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


class Doubled(nn.Module):
    def forward(self, x):
        return NoForwardMode.apply(x)


class Last(nn.Module):
    """Reads a weight past the module that holds it, before a layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.aside = [self.first.weight]

    def forward(self, x):
        return self.second(torch.tanh(functional.linear(x, self.aside[0]))).square().mean()


def test_what_has_no_derivative_in_forward_mode_says_so():
    torch.manual_seed(0)
    model = Returns(nn.Sequential(nn.Linear(6, 8), Doubled(), nn.Linear(8, 4)))
    x = torch.randn(9, 6)
    probe, _ = train(model, batch=lambda step: x)
    assert "no derivative in forward mode" in probe.latest.why("linearity", "net.2")
    assert math.isfinite(probe.latest.value("kernel_drift", "net.2"))


def test_weights_that_are_kept_elsewhere_are_seen():
    torch.manual_seed(0)
    model, x = Last(), torch.randn(9, 6)
    probe, _ = train(model, batch=lambda step: x)
    assert probe.latest.why("linearity", "second") == linearization.ELSEWHERE


def test_weights_that_are_moved_before_the_first_step_are_seen():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(9, 6)
    model = Returns(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, quantities=KEYS, every_n_steps=3, drift_every=1)
    with torch.no_grad():
        net[0].weight.mul_(2)
    walk(probe, model, optimizer, lambda step: x, 3)
    assert probe.latest.why("linearity", "net.2") == linearization.ELSEWHERE


def test_parameters_that_are_trained_later_are_seen():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(9, 6)
    net[0].requires_grad_(False)
    model = Returns(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, quantities=KEYS, every_n_steps=3, drift_every=1)
    net[0].requires_grad_(True)
    walk(probe, model, optimizer, lambda step: x, 3)
    assert probe.latest.why("linearity", "net.2") == linearization.NEW_PARAMETERS


def test_what_rounding_hides_is_no_number():
    model = made(torch.bfloat16)
    probe, _ = train(model, lr=1e-3)
    assert all(math.isnan(probe.latest.value("linearity", name)) for name in LAYERS)
    assert probe.latest.why("linearity", "head") == "its change is too close to the rounding of its outputs"


def test_nothing_is_left_behind():
    model = made(torch.float32)
    parameters = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    probe, _ = train(model)
    assert math.isfinite(probe.latest.value("linearity", "head"))
    assert parameters == {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.head.weight is model.embed.weight


def test_training_is_the_same_without():
    ends = []
    for keys in (["lr"], KEYS):
        model = made(torch.float32)
        train(model, keys=keys, every_n_steps=1)
        ends.append((torch.get_rng_state(), list(model.parameters())))
    (state, first), (other, second) = ends
    assert torch.equal(state, other)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))
