"""The first steps of a correction under SGD are small trials: until a layer's rate is found nothing is told of them."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from spectral_monitor import LRCorrection, SpectralProbe
from spectral_monitor.condition.findings import ON_TRIAL
from spectral_monitor.correction.multiplier import Multiplier, trials
from spectral_monitor.correction.smoothing import Tracker
from tests.one_step import training_step


class Faint(nn.Module):
    """Two branches; the gradients of the first one are so small that its trial step is lost in rounding."""

    def __init__(self, size):
        super().__init__()
        torch.manual_seed(0)
        self.faint, self.loud = nn.Linear(32, 32), nn.Linear(32, 32)
        self.middle, self.head = nn.Linear(32, 32), nn.Linear(32, 4)
        self.size = size

    def forward(self, x):
        return self.head(self.middle((self.size * self.faint(x) + self.loud(x)).relu()).relu())


def corrected(model, optimizer, steps=6, **settings):
    probe = SpectralProbe(
        model, optimizer, every_n_steps=10, mode="correct", quantities="light", correction=LRCorrection(**settings)
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(64, 32, generator=generator)
        with training_step(probe, optimizer):
            functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
    return probe


@pytest.mark.parametrize("size", [1e-3, 1e-4])
@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, partial(torch.optim.SGD, momentum=0.9), torch.optim.Adam, torch.optim.Adagrad]
)
def test_no_verdict_is_on_steps_that_the_correction_keeps_small_itself(size, optimizer):
    model = Faint(size)
    probe = corrected(model, optimizer(model.parameters(), lr=1.0), steps=4)
    told = {(m.step, verdict.layer, verdict.cause) for m in probe.measurements for verdict in m.verdicts}
    assert not {cause for _, _, cause in told} & {"vanishing", "unmoved", "dead", "nothing_trains", "rounding"}


def test_the_reason_says_so_and_the_measurement_keeps_its_values():
    model = Faint(1e-4)
    probe = corrected(model, torch.optim.SGD(model.parameters(), lr=1.0), steps=2)
    first, second = probe.measurements
    assert {state.reason for state in first.states.values()} == {ON_TRIAL}
    assert second.states["faint"].reason == ON_TRIAL
    assert second.states["loud"].state == "healthy"
    assert second.value("update_natural", "faint") > 0


def test_a_layer_that_gets_no_gradient_is_told_all_the_same():
    model = Faint(0.0)
    probe = corrected(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert {(verdict.layer, verdict.cause) for verdict in probe.latest.roots} == {("faint", "dead")}


def multiplier(rate, found=False, limited=False):
    return Multiplier(rate, size=Tracker(0.0 if found else math.nan), limited=limited)


@pytest.mark.parametrize(
    ("own", "began", "on_trial"),
    [
        (multiplier(1e-4), True, True),
        (multiplier(1e-4), False, False),
        (multiplier(1e-4, found=True), True, False),
        (multiplier(1e-4, limited=True), True, False),
        (multiplier(2.0), True, False),  # as high as the others'
    ],
)
def test_a_trial_ends_when_the_multiplier_is_found_or_as_high_as_the_others(own, began, on_trial):
    assert trials([own, *[multiplier(1.0, found=True)] * 3], [began, *[True] * 3])[0] is on_trial
    assert trials([own], [began])[0] is (on_trial or own.rate == 2.0), "there are no others"
