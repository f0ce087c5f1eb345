"""Matrices that are measured all in one solve, or a few at a time in the place of those before: the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.engine.weights import matrix_batches as stacks
from spectral_monitor.engine.weights import stage as matrices
from spectral_monitor.engine.weights.matrix_batches import BatchMember
from spectral_monitor.layers import dissect
from spectral_monitor.sharding import plan
from tests.one_step import training_step


class Here:
    """A process that measures with others, who have nothing."""

    rank, size, device = 0, 2, torch.device("cpu")

    def sum(self, flat):
        """Nothing is added."""


class Network(nn.Module):
    """Every kind of layer: a table, blocks, taps, a gain, one that is computed, tied and not."""

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(30, 72)
        self.qkv = nn.Linear(72, 3 * 72)
        self.conv = nn.Conv1d(72, 72, 3, padding=1)
        self.norm = nn.LayerNorm(72)
        self.scaled = nn.utils.parametrizations.weight_norm(nn.Linear(72, 80))
        self.out = nn.Linear(80, 72)
        self.head = nn.Linear(72, 30, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, x):
        h = self.tok(x)
        h = h + self.qkv(h).chunk(3, dim=-1)[0]
        h = h + self.conv(h.mT).mT
        h = self.out(torch.relu(self.scaled(self.norm(h))))
        return self.head(h).float().square().mean()


def measured(monkeypatch, spare, dtype, **settings):
    """Two steps of a network with so many bytes to spare; the measurement, weights, and how portions were measured."""
    portions = []

    def noted(found, copies):
        made = stacks.chunks(found, copies)
        portions.append([portion.in_place for portion in made])
        return made

    monkeypatch.setattr(stacks, "SPARE", 0.0)
    monkeypatch.setattr(stacks, "SPARE_BYTES", spare)
    monkeypatch.setattr(matrices, "chunks", noted)
    torch.manual_seed(0)
    model = Network().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, drift_every=1, mode="observe", **settings)
    before = after = {}
    for _ in range(2):
        before = {name: weight.detach().double().clone() for name, weight in model.named_parameters()}
        with training_step(probe, optimizer):
            model(torch.arange(24).view(2, 12)).backward()
        after = {name: weight.detach().double() for name, weight in model.named_parameters()}
    return probe.latest, before, after, portions


@pytest.mark.few(4)
@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("spare", [0, 300_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_quantity_is_that_of_one_solve(monkeypatch, spare, low_memory, dtype):
    whole, _, _, once = measured(monkeypatch, 1 << 30, dtype)
    some, before, after, several = measured(monkeypatch, spare, dtype, low_memory=low_memory)
    assert once == [[False]] * len(once)
    if not low_memory:
        assert all(all(portion) and len(portion) > 1 for portion in several if portion != [False])
        assert max(map(len, several)) >= (6 if spare == 0 else 2)
    assert len(whole.values) > 20
    for key, values in whole.values.items():
        torch.testing.assert_close(some.values[key], values, rtol=1e-4, atol=1e-6, equal_nan=True, msg=key)
    for layer, name in (("out", "out.weight"), ("tok", "tok.weight")):
        exact = torch.linalg.matrix_norm(after[name] - before[name], 2).item()
        assert some.value("update_norm", layer) == pytest.approx(exact, rel=0.01)
        exact = torch.linalg.matrix_norm(before[name], 2).item()
        assert some.value("weight_norm", layer) == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("in_place", [False, True])
def test_half_precision_is_converted_before_it_is_measured(in_place):
    """And what is measured lasts while what follows is made, but for what waits in host memory."""
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(6, 5, bias=False)).bfloat16()
    layers = dissect(model).layers
    members = {i: BatchMember(*pair) for i, pair in enumerate(zip(layers, plan(layers, {}, None), strict=True))}
    before = torch.stack([part.weight.detach().float() for part in model])
    stack = stacks.MatrixBatch(members, Here())
    stack.load(host=in_place)
    W = stack.to_device()
    away = W.to_host() if in_place else W
    with torch.no_grad():
        for part in model:
            part.weight.add_(1.0)
    dW = W.change(in_place=in_place)
    now = torch.stack([part.weight.detach().float() for part in model])
    slot = torch.empty(1000, dtype=torch.uint8)
    for found, expected in ((away.to_device(slot) if in_place else away, before), (dW, now - before)):
        (part,) = found.pieces.parts
        assert part.A.dtype == torch.float32
        assert torch.equal(part.A, expected)
    assert (dW.buffers[0].data_ptr() == W.buffers[0].data_ptr()) == in_place
    assert torch.equal(dW.current(in_place=in_place).pieces.parts[0].A, now)
