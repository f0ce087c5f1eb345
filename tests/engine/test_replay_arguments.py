"""The first samples alone, by what the model is given: words and numbers, what cannot be cut, what cannot be copied."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from spectral_monitor import SpectralProbe
from spectral_monitor.engine.features import replay_subset as slices
from tests.engine.test_replay_samples import BATCH, FEW, USELESS, WIDTH, Net, same, values
from tests.one_step import training_step

QUANTITIES = ["feature_change", "feature_change_local"]


class Told(Net):
    """Does what it is told."""

    def forward(self, x, way):
        self.sizes.append(len(x))
        h = torch.tanh(self.first(x))
        return self.head(h - h.mean(0) if way == "centred" else h)


def told(calls, make=Told, **settings):
    """A probe after a step for the arguments of each call, what it warned of, and the samples of forwards by step."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe", quantities=QUANTITIES, **settings)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        forwards = []
        for args in calls:
            with training_step(probe, optimizer):
                model(*args).square().mean().backward()
            forwards.append(model.sizes.take())
    return probe, [str(one.message) for one in said], forwards


def test_a_word_that_changes_the_forward_is_looked_at():
    calls = [(torch.randn(BATCH, WIDTH), way) for way in ("plain", "plain", "centred", "plain")]
    whole, _, _ = told(calls)
    few, _, forwards = told(calls, replay_samples=FEW)
    assert forwards == [[BATCH, FEW, FEW, BATCH], [BATCH, FEW], [BATCH, FEW, FEW, BATCH], [BATCH, BATCH]]
    for step, (one, other) in enumerate(zip(whole.measurements, few.measurements, strict=True)):
        assert same(values(one), values(other)) == (step != 1)


def test_a_number_that_only_counts_is_not_looked_at_for_ever():
    """After four values that changed nothing; a word beside it is, whenever it becomes another one."""

    class Counted(Told):
        def forward(self, x, step, way):
            return super().forward(x, way)

    ways = ["plain"] * 7 + ["slanted", "plain", "slanted", "centred", "plain"]
    calls = [(torch.randn(BATCH, WIDTH), step, way) for step, way in enumerate(ways)]
    _, said, forwards = told(calls, Counted, replay_samples=FEW)
    assert [len(sizes) for sizes in forwards] == [4] * 5 + [2, 2, 4, 2, 2, 4, 2]
    assert [sizes[-1] for sizes in forwards[-2:]] == [BATCH, BATCH]
    assert len(said) == 1
    assert "depend on the others" in said[0]


@pytest.mark.slow
def test_what_is_known_stays_small():
    class Named(Told):
        def forward(self, x, words):
            return super().forward(x, "plain")

    calls = [(torch.randn(BATCH, WIDTH), {f"word {i}": True}) for i in range(2 * slices.MAX_CALLS)]
    probe, said, forwards = told(calls, Named, replay_samples=FEW)
    known = probe._engine.features.replays.subset
    assert not said
    assert {len(sizes) for sizes in forwards} == {4}
    assert len(known._tested) == len(known._values) == slices.MAX_CALLS


class Batch:
    """Of a class that is not known."""

    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (Batch, lambda batch: batch.x),
        (torch.Tensor.numpy, torch.as_tensor),
        (torch.Tensor.to_sparse, lambda x: x.to_dense()),
    ],
)
def test_a_batch_that_cannot_be_cut_is_said_once(wrap, unwrap):
    class Takes(Net):
        def forward(self, given):
            return super().forward(unwrap(given))

    calls = [(wrap(torch.randn(BATCH, WIDTH)),) for _ in range(3)]
    probe, said, forwards = told(calls, Takes, replay_samples=FEW)
    assert forwards == [[BATCH, BATCH]] * 3
    assert said == [f"{USELESS}: {slices.NO_BATCH}; the whole batch is run again"]
    assert all(m.value("feature_change", "first") > 0 for m in probe.measurements)
    assert not told(calls, Takes)[1]


def test_positions_may_come_before_the_batch():
    class Placed(Net):
        def forward(self, place, x):
            return super().forward(x + place)

    calls = [(torch.randn(1, WIDTH), torch.randn(BATCH, WIDTH)) for _ in range(2)]
    _, said, forwards = told(calls, Placed, replay_samples=FEW)
    assert not said
    assert forwards == [[BATCH, FEW, FEW, BATCH], [BATCH, FEW]]


class Unwilling(list):
    def __copy__(self):
        raise RuntimeError("mine alone")


def test_arguments_that_cannot_be_copied_cost_the_replay_alone():
    class Listens(Net):
        def forward(self, given):
            return super().forward(given[0])

    calls = [(Unwilling([torch.randn(BATCH, WIDTH)]),) for _ in range(3)]
    for few in (None, FEW):
        probe, said, forwards = told(calls, Listens, replay_samples=few)
        assert forwards == [[BATCH]] * 3
        reason = "the forward of Listens cannot be run again: its arguments cannot be copied: RuntimeError: mine alone"
        assert said == [f"{reason}; quantities that need the features after the step are not measured"]
        assert len(probe.measurements) == 3
        assert not math.isnan(probe.latest.value("feature_change_local", "first"))
        assert math.isnan(probe.latest.value("feature_change", "first"))
        assert probe.latest.why("feature_change", "first") == reason
