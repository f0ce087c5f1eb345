"""Memory of a measured step: the measured weights once, in their own dtype, and 5 % or 128 MB; or two layers."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralMonitor, SpectralProbe
from spectral_monitor.engine import Settings
from spectral_monitor.engine.weights import matrix_batches as stacks
from spectral_monitor.engine.weights.gradients import local_contribution
from spectral_monitor.functional.feature_speed import inner
from spectral_monitor.quantities import TIERS
from spectral_monitor.state import buffers as copies
from spectral_monitor.state.snapshot import preserved
from tests.engine.storages import Storages

DRIFT = ("drift_ratio", "drift_fro_ratio", "feature_drift")
KEYS = tuple(key for key in TIERS["standard"] if key not in DRIFT)
"""What needs no memory between steps."""


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.proj(nn.functional.scaled_dot_product_attention(q, k, v))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, width=384, depth=8):
        super().__init__()
        self.tok = nn.Embedding(512, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, 512, bias=False)

    def forward(self, x):
        return self.head(self.blocks(self.tok(x)))


def mlp(width=1024, depth=12):
    return nn.Sequential(*[part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())])


NETWORKS = {
    "mlp": (mlp, lambda: torch.randn(2, 1024)),
    "transformer": (Transformer, lambda: torch.randint(512, (1, 2))),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Run:
    """A model in training; its optimizer takes no memory, so that none can hide in its peak."""

    def __init__(self, network, dtype, **settings):
        torch.manual_seed(0)
        make, batch = NETWORKS[network]
        self.model, self.x = make().to(dtype), batch()
        self.x = self.x.to(dtype) if self.x.is_floating_point() else self.x
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        settings = {"quantities": KEYS, "every_n_steps": 2, "mode": "observe", "history": 1, **settings}
        self.probe = SpectralProbe(self.model, self.optimizer, **settings)
        self.sizes = sorted(parameter.nbytes for parameter in self.model.parameters())

    def step(self):
        with self.probe.step():
            self.model(self.x).float().square().mean().backward()
            self.optimizer.step()
        self.optimizer.zero_grad()

    def peaks(self):
        """Bytes at the peak and, at the end, still there: of a plain step and of a measured one."""
        found = []
        for _ in range(2):
            gc.collect()
            with Storages() as storages:
                self.step()
            found.append((storages.peak["cpu"], storages.live["cpu"]))
        return found


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("network", ["mlp", pytest.param("transformer", marks=pytest.mark.slow)])
def test_a_measured_step_takes_one_copy_of_the_weights(network, dtype, monkeypatch):
    """Of a model as small as these that takes weights that are measured a layer at a time; else it may take 128 MB."""
    monkeypatch.setattr(stacks, "SPARE_BYTES", 0)
    run = Run(network, DTYPES[dtype])
    run.peaks()  # makes fixed start vectors, which stay
    (plain, _), (measured, left) = run.peaks()
    assert run.probe.latest is not None
    # Weights in half precision are converted a layer at a time, which takes twice its memory, and its vectors.
    spare = 0.05 * sum(run.sizes) + 2.7 * run.sizes[-1] * (dtype == "bfloat16")
    assert sum(run.sizes) <= measured - plain <= sum(run.sizes) + spare
    assert left == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("network", ["mlp", pytest.param("transformer", marks=pytest.mark.slow)])
def test_with_low_memory_it_takes_two_layers(network, dtype, monkeypatch):
    """Of the device, that is; what is made in host memory is told by who makes it."""
    run = Run(network, DTYPES[dtype], low_memory=True)
    run.peaks()
    on_host = []
    original = copies.empty_buffer

    def empty_buffer(shape, dtype, device, host):
        if not host:
            return original(shape, dtype, device, host)
        with storages.aside():
            made = original(shape, dtype, device, host)
        on_host.append(made.nbytes)
        return made

    monkeypatch.setattr(copies, "empty_buffer", empty_buffer)
    monkeypatch.setattr(stacks, "empty_buffer", empty_buffer)
    peaks = []
    for _ in range(2):
        gc.collect()
        with Storages() as storages:
            run.step()
        peaks.append(storages.peak["cpu"])
    assert run.probe.latest is not None
    assert sum(on_host) == 2 * sum(run.sizes), "once before the update, once before the extra forward"
    most = run.sizes[-1] + run.sizes[-2] if dtype == "float32" else 3.3 * run.sizes[-1]  # where it is converted
    assert peaks[1] - peaks[0] <= most


def test_what_is_guarded_is_compared_a_few_entries_at_a_time():
    weight = nn.Parameter(torch.randn(2048, 1024))
    with Storages() as storages, preserved(weight):
        weight.data[7, 7] = 5.0
        kept = storages.live["cpu"]
    assert weight[7, 7] != 5.0
    assert kept == weight.nbytes
    assert storages.peak["cpu"] < kept + weight.numel() / 4


def test_what_lies_in_another_order_is_not_copied_as_a_whole():
    """An inner product of a table and its transposed gradient, which takes a few entries of them at a time."""
    a, b = torch.randn(3, 500, 700), torch.randn(3, 700, 500).mT
    with Storages() as storages:
        found = inner(a, b)
    expected = (a.double() * b.double()).sum()
    assert abs(found.item() - expected.item()) < 1e-6 * (a.double() * b.double()).abs().sum().item()
    assert storages.peak["cpu"] < a.nbytes / 8


def test_the_update_of_what_is_not_measured_is_made_a_few_rows_at_a_time():
    weight = nn.Parameter(torch.randn(2048, 1024, dtype=torch.bfloat16))
    weight.grad = torch.randn_like(weight)
    old = torch.randn_like(weight).detach()
    with Storages() as storages:
        found = local_contribution(weight, old)
    terms = weight.grad.double() * (weight.detach().double() - old.double())
    assert abs(found.item() + terms.sum().item()) < 1e-5 * terms.abs().sum().item()
    assert storages.peak["cpu"] < weight.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("low_memory", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_between_steps_the_start_is_held_and_nothing_else(low_memory):
    fixed = Run("mlp", torch.float32, quantities="light")  # makes fixed start vectors, which stay
    fixed.peaks()
    run = Run("mlp", torch.float32, quantities=KEYS, low_memory=low_memory)
    with Storages() as storages:
        run.peaks()
        gc.collect()
    assert storages.live["cpu"] == 0
    with Storages() as storages:
        probe = SpectralProbe(run.model, run.optimizer, every_n_steps=1, quantities="light", low_memory=low_memory)
        gc.collect()
        start = storages.live["cpu"]
        run.probe = probe
        run.step()
        gc.collect()
    assert probe.latest is not None
    assert start == sum(run.sizes) == storages.live["cpu"]


@pytest.mark.slow
def test_low_memory_measures_the_same_and_trains_the_same():
    runs = [Run("transformer", DTYPES["bfloat16"], low_memory=low) for low in (False, True)]
    for run in runs:
        torch.manual_seed(1)
        for _ in range(2):
            run.step()
    usual, low = (run.probe.latest for run in runs)
    for key, values in usual.values.items():
        torch.testing.assert_close(low.values[key], values, rtol=1e-5, atol=1e-7, equal_nan=True)
    for a, b in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("given", [1, "yes", None])
def test_what_is_not_a_truth_value_is_refused(given):
    for make in (Settings, SpectralMonitor):
        with pytest.raises(ValueError, match="low_memory must be True or False"):
            make(low_memory=given)
