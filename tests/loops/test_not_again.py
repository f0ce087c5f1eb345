"""A forward that cannot be run again costs what needs it, with one warning that names it; training is the same."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.messages import SpectralMonitorWarning

STEPS = 3


def batches():
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(8, 6, generator=generator)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 80), nn.ReLU(), nn.Linear(80, 2))


class Draws(Net):
    """Takes its batch from an iterator it is given."""

    def forward(self, source):
        return self.layers(next(source)).square().mean()


class Holds(Net):
    """Takes its batch from an iterator it holds."""

    def __init__(self):
        super().__init__()
        self.source = batches()

    def forward(self, _):
        return self.layers(next(self.source)).square().mean()


class Holder(nn.Module):
    """The part that holds one has a name."""

    def __init__(self):
        super().__init__()
        self.part = Holds()


@dataclass
class Batch:
    """What a collate function may return."""

    source: Iterator


class DrawsFromABatch(Net):
    """Takes its batch from an iterator that is in what it is given."""

    def forward(self, batch):
        return self.layers(next(batch.source)).square().mean()


class Overwrites(Net):
    """Changes its input in place."""

    def forward(self, source):
        x = next(source) if hasattr(source, "__next__") else source
        x.mul_(0.5).add_(1.0)
        return self.layers(x).square().mean()


def train(model, argument, call=None, watched=False):
    """Weights, what was drawn from the iterator, and the probe."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1) if watched else None
    forward = call or model
    for _ in range(STEPS):
        with probe.step() if probe else warnings.catch_warnings():
            optimizer.zero_grad()
            forward(argument()).backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()], probe


def compared(make, argument, part=None):
    """The probe of a run that must be the same as one without, and what was said."""
    model = make()
    plain, _ = train(model, argument(), getattr(model, part) if part else None)
    model = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen, probe = train(model, argument(), getattr(model, part) if part else None, watched=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    return probe, [str(w.message) for w in caught if w.category is SpectralMonitorWarning]


def one_source():
    source = batches()
    return lambda: source


def in_a_dataclass():
    source = batches()
    return lambda: Batch(source)


@pytest.mark.parametrize(
    ("make", "argument", "part", "name", "layer"),
    [
        (Draws, one_source, None, "Draws", "layers.0"),
        (DrawsFromABatch, in_a_dataclass, None, "DrawsFromABatch", "layers.0"),
        (Holds, lambda: lambda: None, None, "Holds", "layers.0"),
        (Holder, lambda: lambda: None, "part", "'part'", "part.layers.0"),
    ],
    ids=["argument", "in a dataclass", "held", "held by a part"],
)
def test_iterators_are_not_used_up(make, argument, part, name, layer):
    probe, said = compared(make, argument, part)
    sentence = f"the forward of {name} cannot be run again: that would use up an iterator (generator)"
    assert said == [f"{sentence}; quantities that need the features after the step are not measured"]
    for m in probe.measurements:
        for key in ("feature_change", "bfa", "sensitivity"):
            assert math.isnan(m.value(key, layer))
            assert m.why(key, layer) == sentence
        for key in ("feature_rms", "alignment", "update_norm", "contribution", "feature_change_local"):
            assert math.isfinite(m.value(key, layer))


def test_inputs_changed_in_place_are_replayed_as_they_were():
    drawn = batches()
    batch = [next(drawn) for _ in range(STEPS)]

    def argument():
        fresh = iter([x.clone() for x in batch])
        return lambda: next(fresh)

    probe, said = compared(Overwrites, argument)
    assert not said
    model = Overwrites()
    before = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch[0].clone()).backward()
    optimizer.step()
    x = batch[0] * 0.5 + 1.0
    h, after = before.layers(x), model.layers(x)
    expected = float(((after - h).norm(dim=1) / h.norm(dim=1)).mean())
    assert probe.measurements[0].value("feature_change", "layers.2") == pytest.approx(expected, rel=1e-4)
