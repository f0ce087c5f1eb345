"""A matrix that began at zero has its grace however rarely, and in whatever order, its quantities are measured."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from synthetic import measured, nothing
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.condition import Judge, SpectralCondition

ZERO = "undefined: it divides by a norm that is zero"
FAST = {"update_natural": {"head": 10.0}}


def trained(every, *, mode="observe", quantities="light", steps=12, schedule=lambda step: 1.0):
    """A network whose readout begins at zero, under SGD."""
    torch.manual_seed(0)
    sizes = (32, 64, 64, 64, 10)
    layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    nn.init.zeros_(model[-1].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    probe = SpectralProbe(model, optimizer, every_n_steps=every, quantities=quantities, mode=mode)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(64, 32, generator=generator)
        with probe.step():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
            optimizer.step()
        scheduler.step()
    return probe


SCHEDULES = [
    1,
    {"light": 1, "weight_natural": 2},
    {"light": 2, "weight_natural": 1},
    {"light": 5, "update_natural": 1, "lr": 1},
    {"light": 5, "update_natural": 1, "weight_natural": 1, "lr": 1},
    {"light": 1, "update_ratio": 5, "drift_ratio": 5},
    {"light": 1, "update_ratio": "2, 4, every 5", "drift_ratio": "2, 4, every 5"},
]


@pytest.mark.parametrize("every", SCHEDULES, ids=str)
def test_no_schedule_names_a_readout_that_begins_at_zero(every):
    probe = trained(every)
    assert not any(measurement.verdicts for measurement in probe.measurements)


@pytest.mark.parametrize("every", [{"light": 5, "update_natural": 1, "lr": 1}, {"light": 1, "drift_ratio": 5}], ids=str)
def test_nor_does_a_correction_act_on_it(every):
    probe = trained(every, mode="correct", steps=20)
    assert set(probe.multipliers.values()) == {1.0}


def test_a_learning_rate_of_zero_at_first_does_not_hide_it():
    probe = trained({"light": 5, "update_natural": 1, "lr": 1}, schedule=lambda step: float(step > 1))
    assert not any(measurement.verdicts for measurement in probe.measurements)


@pytest.mark.parametrize(
    ("every", "more", "first"),
    [
        ({"light": 6, "update_natural": "4, every 10"}, {}, 4),
        ({"light": 6, "update_natural": 3}, {"mode": "correct"}, 1),
        ({"light": 6, "update_natural": 1}, {"quantities": ["lr", "update_natural"]}, 1),
    ],
)
def test_the_first_measured_step_and_no_other_one_has_what_tells_how_layers_began(every, more, first):
    probe = trained(every, steps=5, **more)
    found = {m.step: {"weight_natural", "drift_ratio"} & set(m.values) for m in probe.measurements}
    assert min(found) == first
    assert found.pop(first) == (set() if "quantities" in more else {"weight_natural", "drift_ratio"})
    assert not any("drift_ratio" in keys for keys in found.values())


def seen(*measurements):
    """Whether layers waited, after each; the judge is saved and loaded in between."""
    waits, state = [], None
    for measurement in measurements:
        judge = Judge(SpectralCondition())
        if state:
            judge.load_state_dict(json.loads(json.dumps(state)))
        judge.judge(measurement)
        waits.append(bool(judge.waits))
        state = judge.state_dict()
    return waits


def size(step, value, *keys):
    return measured(step, only=["update_natural", "weight_natural", *keys], weight_natural={"head": value}, **FAST)


def test_weights_of_zero_say_so_themselves():
    assert seen(size(1, 0.0), size(2, 0.1), size(3, 0.2), size(4, 0.2), size(5, 0.2)) == [True] * 3 + [False] * 2


def test_drift_may_say_so_later():
    late = measured(2, only=["drift_ratio"], drift_ratio=nothing("head"), reasons={"drift_ratio/head": ZERO})
    assert seen(size(1, 0.1), late, size(3, 0.2), size(4, 0.3), size(5, 0.3)) == [False, True, True, True, False]


def test_what_has_no_size_yet_goes_on_growing():
    reasons = {"drift_ratio/head": ZERO}
    first = measured(1, only=["update_natural", "drift_ratio"], drift_ratio=nothing("head"), reasons=reasons)
    others = [measured(step, only=["update_natural"]) for step in (2, 3)]
    assert seen(first, *others, size(4, 0.1), size(5, 0.2), size(6, 0.2)) == [True] * 5 + [False]


def test_without_sizes_nothing_waits_for_ever():
    reasons = {"drift_ratio/head": ZERO}
    only = {"only": ["update_natural", "drift_ratio"], "drift_ratio": nothing("head"), "reasons": reasons}
    waits = seen(*[measured(step, **only) for step in range(1, 20)])
    assert waits == [True] * 15 + [False] * 4


def test_weights_that_are_zero_again_later_excuse_nothing():
    measurements = [size(step, 0.5) for step in range(1, 21)] + [size(21, 0.0), size(22, 0.0)]
    assert not any(seen(*measurements))
