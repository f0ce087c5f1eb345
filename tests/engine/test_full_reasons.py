"""What tier "full" cannot tell has a reason, and costs nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from spectral_monitor import SpectralProbe
from spectral_monitor.engine.features import kernels as full
from spectral_monitor.quantities import assumptions

torch.set_num_threads(1)
FULL = sorted(quantity.key for quantity in assumptions.ENTRIES if not quantity.by_name)


def batch(rows=9):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (rows,), generator=generator)


class NowInPlace(nn.Module):
    """Its activation begins to work in place in the third step."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(6, 8), nn.Linear(8, 4), 0

    def forward(self, x, y):
        self.calls += 1
        x = functional.relu(self.first(x), inplace=self.calls > 2)
        return functional.cross_entropy(self.second(x), y)


def test_outputs_that_are_overwritten_cost_their_own_layer_only():
    torch.manual_seed(0)
    model = NowInPlace()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities="full")
    x, y = batch()
    for _ in range(3):
        with probe.step():
            model(x.float(), y).backward()
            optimizer.step()
    for key in ("backward_speed", "kernel_change", "bfk_ratio"):
        assert math.isnan(probe.latest.value(key, "first"))
        assert "overwritten" in probe.latest.why(key, "first"), probe.latest.why(key, "first")
        assert math.isfinite(probe.latest.value(key, "second")), probe.latest.why(key, "second")


class TwiceWrong(torch.autograd.Function):
    """Cannot be differentiated twice."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return 2 * g


class Variant(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x, y):
        h = self.first(x)
        if self.kind == "once":
            h = TwiceWrong.apply(h)
        h = self.second(h.relu()) if self.kind != "reentrant" else checkpoint(self.second, h, use_reentrant=True)
        return h if self.kind == "outputs" else functional.cross_entropy(h, y)


REASONS = [
    ("outputs", "backward_speed", "first", full.NO_LOSS),
    ("accumulated", "bfk_ratio", "first", full.ACCUMULATED),
    (
        "once",
        "bfk_ratio",
        "second",
        "no second derivatives (RuntimeError: an operation on the way cannot be differentiated twice",
    ),
    ("reentrant", "bfk_ratio", "second", full.NO_GRAPH),
    (
        "reentrant",
        "backward_speed",
        "second",
        "the forward could not be run again with a graph (RuntimeError: When use_reen",
    ),
    ("parts", "bfk_ratio", "first", "the forward cannot be run again: the model is called in 2 separate parts"),
    ("hooks everywhere", "bfk_ratio", "first", "a backward hook on all modules would see"),
    ("hooks everywhere", "backward_speed", "first", "a backward hook on all modules would see"),
    ("zero rate", "bfk_ratio", "first", "undefined: it divides by a norm that is zero"),
]


def varied(kind):
    """A step of the kind."""
    torch.manual_seed(0)
    model, (x, y) = Variant(kind).double(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if kind == "zero rate" else 0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities="full")
    with probe.step(accumulated=2 if kind == "accumulated" else 1):
        if kind == "parts":
            functional.cross_entropy(model.second(model.first(x).relu()), y).backward()
        else:
            out = model(x, y)
            (functional.cross_entropy(out, y) if kind == "outputs" else out).backward()
        optimizer.step()
    return probe.latest


@pytest.mark.parametrize(("kind", "key", "layer", "reason"), REASONS)
@pytest.mark.filterwarnings("ignore:.*not measured: ")
def test_what_cannot_be_had_has_a_reason(kind, key, layer, reason):
    handle = nn.modules.module.register_module_full_backward_hook(lambda *args: None) if "everywhere" in kind else None
    measurement = varied(kind)
    if handle is not None:
        handle.remove()
    assert math.isnan(measurement.value(key, layer))
    assert measurement.why(key, layer).startswith(reason), measurement.why(key, layer)
    assert math.isfinite(measurement.value("update_norm", layer))


def test_without_the_kinds_there_are_values():
    measurement = varied("plain")
    assert all(math.isfinite(measurement.value(key, "second")) for key in FULL)


def test_attention_that_has_no_second_derivative_of_its_own():
    """Fused attention on the CPU has none; the plain one takes its place."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return self.proj(functional.scaled_dot_product_attention(q[None], k[None], v[None])).square().mean()

    torch.manual_seed(0)
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=["bfk_ratio"])
    flags = [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()]
    with probe.step():
        model(torch.randn(3, 10, 8)).backward()
        optimizer.step()
    assert math.isfinite(probe.latest.value("bfk_ratio", "proj")), probe.latest.why("bfk_ratio", "proj")
    assert [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()] == flags
