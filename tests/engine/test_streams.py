"""Matrices in half precision that are read a few rows at a time, against the same matrices as a whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.anatomy import dissect
from spectral_monitor.engine import stacks
from spectral_monitor.engine.stacks import Member
from spectral_monitor.engine.streams import Source, Streamed
from spectral_monitor.linalg import Pieces, alone, frobenius, shared_estimate
from spectral_monitor.placement import plan


class Here:
    """A process that measures with others, who have nothing."""

    rank, size, device = 0, 2, torch.device("cpu")

    def sum(self, flat):
        """Nothing is added."""


SHAPES = [(3, 90, 70), (2, 70, 130), (4, 20, 150), (2, 150, 20), (1, 1, 40), (3, 40, 1)]
FEW = 500
"""Entries at a time: less than a matrix, and no multiple of a row."""


def matrices(shape, scale=1.0):
    """Old ones, new ones of two layers, and the differences, all of which float32 holds exactly."""
    old, new = ((torch.randn(shape) * scale).bfloat16() for _ in range(2))
    first = slice(0, -(-shape[0] // 2))
    rest = slice(first.stop, shape[0])
    layers = [(place, new[place]) for place in (first, rest) if place.stop > place.start]
    return old, layers, new.float() - old.float()


def streamed(shape, scale=1.0):
    old, layers, difference = matrices(shape, scale)
    return Streamed.of(Source(old, layers, torch.empty(0), FEW)), Pieces.whole(difference)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("flipped", [False, True])
def test_products_are_those_of_the_whole(shape, flipped):
    some, whole = streamed(shape)
    some, whole = (some.mT, whole.mT) if flipped else (some, whole)
    assert some.shape == whole.shape
    x = torch.randn(shape[0], 4, some.shape[2])
    torch.testing.assert_close(some.times(x), whole.times(x), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(some.gram(), whole.gram(), rtol=1e-5, atol=1e-3)
    for measure, order in ((frobenius, 2.0), (lambda A: A.abs().amax((1, 2)), float("inf"))):
        torch.testing.assert_close(alone(some.combined(measure, order)), alone(whole.combined(measure, order)))


@pytest.mark.parametrize("scale", [1.0, 1e-15, 1e18])
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_are_those_of_a_singular_value_decomposition(shape, scale):
    """Of entries, too, that are too small or too large to be squared."""
    some, whole = streamed(shape, scale)
    exact = torch.linalg.svdvals(whole.parts[0].A.double())
    found = alone(shared_estimate(some, tol=0.001))
    torch.testing.assert_close(found.sigma.double(), exact[:, 0], rtol=0.001, atol=0)
    torch.testing.assert_close(found.fro.double(), exact.square().sum(1).sqrt(), rtol=1e-5, atol=0)


def test_only_a_few_entries_are_converted():
    """Rows of all three matrices, two at a time, in the same memory; or of one layer's."""
    old, layers, difference = matrices((3, 90, 70))
    source = Source(old, layers, torch.empty(0), FEW)
    for _ in range(2):
        found = [(rows, part.clone(), part.untyped_storage().nbytes()) for rows, part in source.blocks(1)]
        assert [(rows.start, rows.stop) for rows, _, _ in found] == [(k, k + 2) for k in range(0, 90, 2)]
        assert torch.equal(torch.cat([part for _, part, _ in found], dim=1), difference)
        assert {size for _, _, size in found} == {3 * 2 * 70 * 4}
    place, _ = layers[1]
    assert torch.equal(torch.cat([part.clone() for _, part in source.blocks(1, place)], dim=1), difference[place])


def test_what_is_small_is_converted_once():
    old, layers, difference = matrices((3, 90, 70))
    source = Source(old, layers, torch.empty(0), old.numel())
    ((rows, part),) = source.blocks(1)
    assert rows == slice(0, 90)
    assert torch.equal(part, difference)
    old.zero_()
    ((_, again),) = source.blocks(2, layers[0][0])
    assert torch.equal(again, difference[layers[0][0]])


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


def measured(monkeypatch, entries, spare=stacks.SPARE, **settings):
    """Two steps of a network in bfloat16; what is converted and measured at a time as given."""
    monkeypatch.setattr(stacks, "LEAST_CONVERTED", entries)
    monkeypatch.setattr(stacks, "CONVERTED", 10**9)
    monkeypatch.setattr(stacks, "SPARE", spare)
    monkeypatch.setattr(stacks, "LEAST", 0)
    torch.manual_seed(0)
    model = Network().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    probe = SpectralProbe(model, optimizer, drift_every=1, mode="observe", **settings)
    before = after = {}
    for _ in range(2):
        before = {name: weight.detach().double().clone() for name, weight in model.named_parameters()}
        with probe.step():
            optimizer.zero_grad()
            model(torch.arange(24).view(2, 12)).backward()
            optimizer.step()
        after = {name: weight.detach().double() for name, weight in model.named_parameters()}
    return probe.latest, before, after


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("entries", [300, 3000])
def test_every_quantity_is_that_of_weights_converted_at_once(monkeypatch, entries, low_memory):
    whole, _, _ = measured(monkeypatch, 10**9, spare=10.0)
    some, before, after = measured(monkeypatch, entries, low_memory=low_memory)
    assert len(whole.values) > 20
    for key, values in whole.values.items():
        torch.testing.assert_close(some.values[key], values, rtol=1e-4, atol=1e-6, equal_nan=True, msg=key)
    for layer, name in (("out", "out.weight"), ("tok", "tok.weight")):
        exact = torch.linalg.matrix_norm(after[name] - before[name], 2).item()
        assert some.value("update_norm", layer) == pytest.approx(exact, rel=0.01)
        assert some.value("weight_norm", layer) == pytest.approx(
            torch.linalg.matrix_norm(before[name], 2).item(), rel=0.01
        )


@pytest.mark.parametrize("single", [False, True])
def test_what_others_measure_too_is_converted_as_a_whole(single):
    """And lasts while what follows is made, but for what waits in host memory."""
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(6, 5, bias=False)).bfloat16()
    layers = dissect(model).layers
    members = {i: Member(*pair) for i, pair in enumerate(zip(layers, plan(layers, {}, None), strict=True))}
    before = torch.stack([part.weight.detach().float() for part in model])
    stack = stacks.Stack(members, Here(), total=60, single=single)
    stack.load(host=single)
    W = stack.here()
    away = W.away() if single else W
    with torch.no_grad():
        for part in model:
            part.weight.add_(1.0)
    dW = W.change()
    now = torch.stack([part.weight.detach().float() for part in model])
    slot = torch.empty(1000, dtype=torch.uint8)
    for found, expected in ((away.here(slot) if single else away, before), (dW, now - before)):
        (part,) = found.pieces.parts
        assert part.A.dtype == torch.float32
        assert torch.equal(part.A, expected)
    assert (dW.buffers[0].data_ptr() == W.buffers[0].data_ptr()) == single
    assert torch.equal(dW.now().pieces.parts[0].A, now)
