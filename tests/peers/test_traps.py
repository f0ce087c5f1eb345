"""What went wrong in neighbouring tools, one test for each trap that concerns a single process.

More of them in test_traps_around.py. Traps that have their tests elsewhere:

=============================================== ====================================================================
update re-derived from optimizer state          also capture/test_optimizer.py: every optimizer of torch
hooks left behind after an exception            callbacks/test_exceptions.py, endurance/test_after_exceptions.py
attributes written on the user's modules        also noninterference/test_bit_identical.py: attributes after a batch
one log call per value                          callbacks/test_monitor.py::test_one_call_per_logger_and_measured_step
prefixes of wrappers                            also anatomy/test_find.py::test_names_carry_no_wrapper_prefixes
tests that assert key names only                oracle/test_every_quantity.py: every quantity against float64
a parametrisation that a test never reaches     noninterference/test_bit_identical.py::test_without_a_guard_it_is_not
=============================================== ====================================================================
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

from spectral_monitor import SpectralMonitor, SpectralProbe
from tests.noninterference import zoo
from tests.one_step import training_step
from tests.peers.watching import Weights, fit, matrices, numbers

# ----------------------------------------------------------------------------------- update re-derived from the state


def grouped(parameters):
    """Every layer with a rate and a decay of its own, the last one decayed so much that its sign counts."""
    layers = [list(pair) for pair in zip(*[iter(parameters)] * 2, strict=True)]
    settings = zip((1e-2, 1e-3, 3e-2), (0.0, 0.1, 20.0), strict=True)
    return optim.AdamW(
        [{"params": p, "lr": lr, "weight_decay": decay} for p, (lr, decay) in zip(layers, settings, strict=True)]
    )


def test_update_rederived_from_optimizer_state():
    monitor, weights, module = SpectralMonitor(1), Weights(), zoo.Classifier(optimizer=grouped)
    fit(monitor, module, weights)
    for m in monitor.measurements:
        for layer, rate in zip(matrices(monitor), (1e-2, 1e-3, 3e-2), strict=True):
            real = weights.update(m.step, layer)
            assert m.value("update_fro", layer) == pytest.approx(real.norm().item(), rel=1e-4)
            assert m.value("update_norm", layer) == pytest.approx(torch.linalg.matrix_norm(real, 2).item(), rel=0.02)
            assert m.value("lr", layer) == pytest.approx(rate, rel=1e-6)
    first = weights.before[0]["net.5.weight"]
    decayed = 3e-2 * 20.0 * first  # subtracted; Adam's own first step is the rate times a sign
    wrong_sign = (weights.update(1, "net.5") + 2 * decayed).norm()
    seen = monitor.measurements[0].value("update_fro", "net.5")
    assert abs(wrong_sign.item() - seen) > 0.01 * seen, "the test tells the signs apart"


# ------------------------------------------------------------------------------------- gradients seen per micro-batch


class GradientNorm(Callback):
    """The norm of the gradient of each step, before it is clipped."""

    def __init__(self):
        self.norms = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in pl_module.parameters())))


@pytest.mark.parametrize("clip", [None, 0.05])
def test_gradients_seen_per_micro_batch_or_before_clipping(clip):
    """For plain SGD -<g, dW> = |dW|^2 / lr with the gradient of the whole step, and more by what clipping took off."""
    monitor, gradient = SpectralMonitor(1, quantities="light"), GradientNorm()
    module = zoo.Classifier(optimizer=partial(optim.SGD, lr=0.1))
    fit(monitor, module, gradient, accumulate_grad_batches=3, gradient_clip_val=clip)
    assert len(monitor.measurements) == len(gradient.norms) == 2
    for m, norm in zip(monitor.measurements, gradient.norms, strict=True):
        assert norm > 0.05, "clipping takes something off"
        for layer in matrices(monitor):
            expected = m.value("update_fro", layer) ** 2 / 0.1 * (norm / clip if clip else 1.0)
            assert m.value("contribution", layer) == pytest.approx(expected, rel=1e-3)


# ------------------------------------------------------------------------------------------------------ sigma, dtypes


def with_spectrum(rows, columns, top):
    """A matrix with singular values top, top/2, top/4, ..."""
    size = min(rows, columns)
    left = torch.linalg.qr(torch.randn(rows, size, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(columns, size, dtype=torch.float64)).Q
    return (left * (top * 0.5 ** torch.arange(size))) @ right.T


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(20, 30), (100, 80)], ids=["exact", "estimated"])
@pytest.mark.parametrize("top", [3.0, 1e6, 1e-9], ids=["plain", "above half precision", "below it"])
def test_sigma_squared_and_casts_to_half_precision(top, shape, dtype):
    weight, step = with_spectrum(*shape, top), with_spectrum(*shape, top / 8)
    model = nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)
    with torch.no_grad():
        model.weight.copy_(weight)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities="light")
    with probe.step():
        model.weight.grad = step.to(dtype)
        optimizer.step()
    m = probe.latest
    assert m.value("weight_norm", "weight") == pytest.approx(top, rel=0.01)
    assert m.value("update_norm", "weight") == pytest.approx(top / 8, rel=0.01)
    assert m.value("weight_stable_rank", "weight") == pytest.approx(4 / 3, rel=0.02)
    assert m.value("weight_fro", "weight") == pytest.approx(top * math.sqrt(4 / 3), rel=1e-4)
    assert m.value("weight_natural", "weight") == pytest.approx(top * math.sqrt(shape[1] / shape[0]), rel=0.01)


# ------------------------------------------------------------------------------------------- activation checkpointing


class CheckpointHooks(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first, self.block = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        h = self.first(x)
        again = self.reentrant is not None
        return self.last(checkpoint(self.block, h, use_reentrant=self.reentrant) if again else self.block(h))


def checkpointed(reentrant):
    """Two measurements, the weights' gradients, and how many calls and rows of each layer were recorded."""
    torch.manual_seed(0)
    model, calls = CheckpointHooks(reentrant), []
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1)

    def look(*_):
        seen = probe._engine.features.capture.calls
        calls.append({i: [(call.count, call.b_count) for call in of_layer] for i, of_layer in seen.items()})

    optimizer.register_step_pre_hook(look)
    for _ in range(2):
        with training_step(probe, optimizer):
            model(torch.randn(12, 8)).square().mean().backward()
    return [numbers(m) for m in probe.measurements], calls


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_activation_checkpointing_counted_twice(reentrant):
    plain, _ = checkpointed(None)
    seen, calls = checkpointed(reentrant)
    for recorded in calls:
        assert len(recorded) == 4, "every matrix"
        assert [recorded[i] for i in sorted(recorded)] == [[(12, 1)]] * 4
    for a, b in zip(plain, seen, strict=True):
        assert set(a) == set(b)
        assert len(b) > 60
        for key, value in b.items():
            assert value == pytest.approx(a[key], rel=1e-4, abs=1e-7), key


# --------------------------------------------------------------------------------------------------- tokens, in place


def test_only_the_last_token_is_recorded():
    """Tokens of very different size: the mean over all of them has a closed form."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4))
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    probe = SpectralProbe(model, optimizer, every_n_steps=1)
    x = torch.tensor([8.0, 4.0, 2.0, 1.0])[None, :, None] * torch.eye(4)[:, None, :]  # 4 sequences of 4 tokens
    with probe.step():
        model(x).square().sum().backward()
        optimizer.step()
    m = probe.latest
    assert m.value("feature_rms", "0") == pytest.approx(math.sqrt((64 + 16 + 4 + 1) / 4 / 4))
    assert m.value("feature_rms", "0") != pytest.approx(math.sqrt(1 / 4)), "of the last tokens"


def test_full_backward_hooks_raise_on_in_place_relu():
    """The numbers are those of the same network with a ReLU that is not in place."""
    found = []
    for inplace in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 12), nn.ReLU(inplace), nn.Linear(12, 12), nn.ReLU(inplace), nn.Linear(12, 4))
        monitor = SpectralMonitor(1)
        fit(monitor, zoo.Classifier(lambda net=net: net))
        found.append([numbers(m) for m in monitor.measurements])
    plain, in_place = found
    assert len(plain) == 6
    assert any("spectral/bfa/net.0" in m for m in plain)
    for a, b in zip(plain, in_place, strict=True):
        assert set(a) == set(b)
        for key, value in a.items():
            assert b[key] == pytest.approx(value, rel=1e-4, abs=1e-7), key


# -------------------------------------------------------------------------------------------------------------- roles


class SquareLanguageModel(nn.Module):
    """Embedding, hidden matrix and head of one and the same shape."""

    def __init__(self):
        super().__init__()
        self.tokens, self.hidden = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.head(self.hidden(self.tokens(x)).relu())


def test_role_decided_by_ndim():
    model = SquareLanguageModel()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities="light")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with probe.step():
        model(torch.arange(8)).square().sum().backward()
        optimizer.step()
    m = probe.latest
    assert {info.name: info.role for info in m.layers} == {
        "tokens": "embedding",
        "hidden": "operator",
        "head": "readout",
    }
    table = before["tokens.weight"]
    for name in ("tokens", "hidden", "head"):
        sigma = torch.linalg.matrix_norm(before[f"{name}.weight"], 2).item()
        assert m.value("weight_norm", name) == pytest.approx(sigma, rel=1e-4)
    assert m.value("weight_natural", "tokens") == pytest.approx(table.square().mean(1).sqrt().max().item(), rel=1e-5)
    assert m.value("weight_natural", "hidden") == pytest.approx(m.value("weight_norm", "hidden"))
    assert m.value("weight_natural", "tokens") < 0.9 * m.value("weight_norm", "tokens")
