"""Weights that begin at zero under optimizers whose updates go with gradients: others' gradients grow as they do."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from spectral_monitor import LayerInfo, LRCorrection, Measurement, SpectralProbe
from spectral_monitor.correction.smoothing import MAX_ABOVE, MAX_BELOW, Tracker
from spectral_monitor.correction.update_size import LEAVING, leaves_zero
from tests.one_step import training_step

STEPS = 60


class Branch(nn.Module):
    """A residual branch without norms whose last matrix begins at zero, with the scalars of Fixup."""

    def __init__(self, width):
        super().__init__()
        self.first, self.last = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.last.weight)
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.scale * self.last(torch.relu(self.first(x + self.shift)))


def fixup(width=32):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, width), *(Branch(width) for _ in range(6)), nn.Linear(width, 4))
    nn.init.zeros_(net[-1].weight)
    return net


def batch(step):
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
    return x, (x[:, 0] > 0).long() + 2 * (x[:, 1] * x[:, 2] > 0).long()


def trained(optimizer_of, steps=STEPS):
    """Losses under a correction, and the multipliers of each step."""
    net = fixup()
    optimizer = optimizer_of(net.parameters())
    probe = SpectralProbe(net, optimizer, every_n_steps=1, mode="correct", correction=LRCorrection())
    losses, multipliers = [], []
    for step in range(steps):
        x, y = batch(step)
        with training_step(probe, optimizer):
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
        losses.append(float(loss.detach()))
        multipliers.append(dict(probe._supervisor._corrector.multipliers))
    return losses, multipliers


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::spectral_monitor.SpectralConditionWarning")
def test_a_network_whose_branches_begin_at_zero_learns_under_sgd():
    """Rates that were right for one step were a thousand times too large for the next, and all became NaN."""
    losses, _ = trained(lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9))
    assert all(map(math.isfinite, losses))
    assert max(losses) < 2 * losses[0]
    assert sum(losses[-10:]) / 10 < 0.8 * losses[0]


@pytest.mark.filterwarnings("ignore::spectral_monitor.SpectralConditionWarning")
def test_meanwhile_multipliers_double_at_most():
    _, multipliers = trained(lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9), steps=8)
    rises = [after[name] / before[name] for before, after in pairwise(multipliers) for name in after]
    assert max(rises) == pytest.approx(2.0)


@pytest.mark.filterwarnings("ignore::spectral_monitor.SpectralConditionWarning")
def test_under_adam_updates_do_not_go_with_gradients_and_rise_at_once():
    _, multipliers = trained(lambda parameters: torch.optim.Adam(parameters, 1e-3), steps=3)
    assert multipliers[-1]["7"] / multipliers[0]["7"] > 0.5, "nothing begins at a thousandth"


def measured(weight, update, name="a"):
    infos = (LayerInfo(name, "vector" if "bias" in name else "operator", 4, 4, (4, 4)),)
    values = {"weight_natural": torch.tensor([weight]), "update_natural": torch.tensor([update])}
    return Measurement(1, infos, values, {})


@pytest.mark.parametrize(
    ("weight", "update", "aim", "name", "leaves"),
    [
        (0.0, 1e-5, 0.1, "a", True),
        (0.0, 0.0, 0.1, "a", False),  # nothing moves it
        (0.1, 0.1, 0.99 * (LEAVING - 2) * 0.1, "a", False),
        (0.1, 0.1, 1.01 * (LEAVING - 2) * 0.1, "a", True),  # the next step counts too
        (1.0, 0.1, 0.1, "a", False),
        (0.0, 1e-5, 0.1, "a.bias", False),
        (0.1, math.nan, 9.0, "a", False),
    ],
)
def test_a_weight_leaves_zero_while_its_next_step_makes_it_several_times_as_large(weight, update, aim, name, leaves):
    assert leaves_zero(measured(weight, update, name), [0], [aim]) is leaves


@pytest.mark.parametrize("swings", [True, False])
def test_of_what_swings_small_values_count_little_and_large_ones_at_once(swings):
    tracker = Tracker()
    for _ in range(10):
        tracker.see(0.0, swings)
    low = tracker.see(-9.0, swings)
    assert (low >= -MAX_BELOW) == swings
    high = tracker.see(3.0, swings)
    assert (high >= 3.0 - MAX_ABOVE) == swings
    tracker = Tracker()
    levels = [tracker.see(-0.3 * step, swings) for step in range(20)]
    assert levels[-1] == pytest.approx(-0.3 * 19, abs=0.1), "a drift is followed"


def test_updates_that_go_with_gradients_swing(monkeypatch):
    found = {}
    for name, kind in {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}.items():
        net = fixup()
        optimizer = kind(net.parameters(), 0.1)
        probe = SpectralProbe(net, optimizer, every_n_steps=1, mode="correct", correction=LRCorrection())
        seen, see = set(), Tracker.see
        with monkeypatch.context() as patch:
            patch.setattr(
                Tracker,
                "see",
                lambda self, value, swings, see=see, seen=seen: (seen.add(swings), see(self, value, swings))[1],
            )
            for step in range(3):
                with training_step(probe, optimizer):
                    nn.functional.cross_entropy(net(batch(step)[0]), batch(step)[1]).backward()
        found[name] = seen
    assert found == {"SGD": {True}, "Adam": {False}}
