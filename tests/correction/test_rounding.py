"""Updates of which rounding leaves too little to be read: a way out for their layers, and for no others."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from spectral_monitor import LRCorrection, Measurement, SpectralProbe
from spectral_monitor.correction.corrector import RISE, Corrector
from spectral_monitor.correction.policies import REFERENCE_INPUTS
from spectral_monitor.correction.update_size import observed, remnant
from spectral_monitor.layers import dissect
from spectral_monitor.measurement import LOST
from tests.one_step import training_step

LR = 0.1


class TiedPair(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.readout = nn.Embedding(40, 72), nn.Linear(72, 40)
        self.readout.weight = self.tokens.weight
        nn.init.zeros_(self.readout.bias)

    def forward(self, ids):
        return self.readout(self.tokens(ids))


class Skipping(torch.optim.SGD):
    """As optimizers skip a step that they are told has overflowed."""

    def step(self, closure=None):
        return None


def perceptron(dtype=torch.float32):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(70, 96), nn.LayerNorm(96), nn.ReLU(), nn.Linear(96, 80), nn.ReLU())
    return network.append(nn.Linear(80, 5)).to(dtype)


def correcting(network, kind=torch.optim.SGD, lr=LR, policy="target", **settings):
    optimizer = kind(network.parameters(), lr=lr)
    rule = LRCorrection(policy, size="lr", spectral_init=1.0, **settings)
    probe = SpectralProbe(
        network, optimizer, mode="correct", every_n_steps=1, quantities=rule.quantities, correction=rule
    )
    return optimizer, probe


def train(network, optimizer, probe, steps, scale=1.0):
    """Multipliers after each step."""
    seen, dtype = [dict(probe.multipliers)], next(network.parameters()).dtype
    for step in range(steps):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(64, 70, generator=g).to(dtype)
        with training_step(probe, optimizer):
            (network(x).logsumexp(-1).mean() * scale).backward()
        seen.append(dict(probe.multipliers))
    return seen


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore::spectral_monitor.SpectralConditionWarning")
@pytest.mark.parametrize(
    ("dtype", "kind", "lr", "scale"),
    [
        (torch.bfloat16, torch.optim.Adam, 0.1, 1.0),
        (torch.bfloat16, torch.optim.Adam, 0.03, 1.0),
        (torch.bfloat16, torch.optim.SGD, 0.1, 1.0),
        (torch.float32, torch.optim.SGD, 0.1, 1e-4),
    ],
)
def test_target_is_reached_where_first_updates_are_lost(dtype, kind, lr, scale):
    network = perceptron(dtype)
    optimizer, probe = correcting(network, kind, lr)
    train(network, optimizer, probe, 60, scale)
    for name, share in {"0": (70 / REFERENCE_INPUTS) ** 0.25, "3": 1.0, "5": 1.0}.items():
        assert probe.latest.value("update_natural", name) == pytest.approx(lr * share, rel=0.4), name


@pytest.mark.filterwarnings("ignore::spectral_monitor.SpectralConditionWarning")
def test_a_multiplier_grows_by_the_bound_until_the_update_can_be_read():
    network = perceptron()
    optimizer, probe = correcting(network)
    multipliers = train(network, optimizer, probe, 10, 1e-6)
    first = [now["3"] / before["3"] for before, now in pairwise(multipliers)]
    assert first[:4] == pytest.approx([RISE] * 4)
    assert probe.multipliers["1.weight"] > 100 * 0.01, "gains of 1 too, of whose updates nothing was left at all"


@pytest.mark.filterwarnings("ignore::spectral_monitor.SpectralConditionWarning")
@pytest.mark.parametrize("gradient", [0.0, math.nan, math.inf])
def test_without_a_gradient_there_is_no_way_out(gradient):
    network = perceptron(torch.bfloat16)
    network[3].weight.register_hook(lambda grad: torch.full_like(grad, gradient))
    optimizer, probe = correcting(network)
    multipliers = train(network, optimizer, probe, 1 if gradient else 5)
    assert {m["3"] for m in multipliers} == {0.01}
    assert gradient or probe.multipliers["0"] > 0.01, "the others are brought up"


def test_what_is_wanted_must_be_more_than_rounding():
    """As at the beginning and the end of schedules."""
    network = perceptron(torch.bfloat16)
    optimizer, probe = correcting(network, lr=1e-3)
    train(network, optimizer, probe, 5)
    assert {probe.multipliers[name] for name in "035"} == {0.01}


def test_a_step_that_was_skipped_says_nothing():
    network = perceptron()
    optimizer, probe = correcting(network, Skipping)
    assert len({tuple(m.values()) for m in train(network, optimizer, probe, 3)}) == 1
    assert probe.latest.value("update_natural", "3") == 0


@pytest.mark.parametrize(("wanted", "left"), [(0.02, 0.01), (0.005, math.nan)])
def test_a_remnant_is_less_than_what_is_wanted(wanted, left):
    layers = dissect(nn.Sequential(nn.Linear(4, 4, bias=False)).to(torch.bfloat16)).layers
    values = {"update_natural": 0.01, "update_fro": 1e-4, "weight_fro": 1.0, "contribution": 1.0, "lr": LR}
    measurement = Measurement(1, (layers[0].info,), {key: torch.tensor([x]) for key, x in values.items()}, {})
    assert remnant(measurement, "update_natural", layers[0], 0, wanted) == pytest.approx(left, nan_ok=True)


@pytest.mark.parametrize("lr", [math.nan, 0.0])
def test_without_a_learning_rate_an_update_says_nothing(lr):
    layers = dissect(nn.Sequential(nn.Linear(4, 4, bias=False))).layers
    values = {"update_natural": 0.01, "update_fro": 1.0, "weight_fro": 1.0, "contribution": 1.0}
    columns = {key: torch.tensor([x]) for key, x in values.items()}
    for rate, seen in ((lr, math.nan), (LR, 0.01)):
        measurement = Measurement(1, (layers[0].info,), columns | {"lr": torch.tensor([rate])}, {})
        assert observed(measurement, "update_natural", layers[0], 0) == pytest.approx(seen, nan_ok=True)


@pytest.mark.parametrize(("reason", "left"), [(LOST, 0.01), ("zero: it divides by nothing", math.nan)])
def test_a_gradient_arrives_where_it_was_lost_and_nowhere_else_without_a_contribution(reason, left):
    layers = dissect(nn.Sequential(nn.Linear(4, 4, bias=False)).to(torch.bfloat16)).layers
    values = {"update_natural": 0.01, "update_fro": 1e-4, "weight_fro": 1.0, "contribution": math.nan, "lr": LR}
    columns = {key: torch.tensor([x]) for key, x in values.items()}
    measurement = Measurement(1, (layers[0].info,), columns, {}, reasons={"contribution/0": reason})
    assert remnant(measurement, "update_natural", layers[0], 0, 0.02) == pytest.approx(left, nan_ok=True)


@pytest.mark.filterwarnings("ignore::spectral_monitor.SpectralConditionWarning")
def test_tied_weights_get_out_too():
    torch.manual_seed(0)
    network = TiedPair().to(torch.bfloat16)
    optimizer, probe = correcting(network)
    ids = torch.arange(40)
    for _ in range(30):
        with training_step(probe, optimizer):
            (nn.functional.cross_entropy(network(ids), ids.flip(0)) * 1e-3).backward()
    assert probe.latest.value("update_natural", "readout") == pytest.approx(LR, rel=0.5)


@pytest.mark.filterwarnings("ignore::spectral_monitor.SpectralConditionWarning")
def test_fsc_gets_out_too():
    network = perceptron(torch.bfloat16)
    optimizer, probe = correcting(network, policy="fsc")
    train(network, optimizer, probe, 30)
    for name in "035":
        assert probe.multipliers[name] > 0.02, name


@pytest.mark.parametrize(("left", "factor"), [(0.0, 2.0), (0.001, 2.0), (0.0159, 0.02 / 0.0159)])
def test_a_multiplier_rises_by_what_is_missing_and_by_two_at_most(left, factor):
    """While rounding takes a part of the update that cannot be read."""
    network = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3))).to(torch.bfloat16)
    layers = dissect(network).layers
    corrector = Corrector(LRCorrection("target", size="lr"), layers, [torch.optim.SGD(network.parameters(), lr=0.02)])
    before = corrector.multipliers["1"]
    values = {key: torch.ones(3) for key in corrector.correction.quantities} | {
        "lr": torch.tensor([0.02 * before] * 3),
        "lr_multiplier": torch.tensor([before] * 3),
        "weight_fro": torch.full((3,), 4.0),  # of Gaussian matrices of norm 1
        "update_fro": torch.tensor([1.0, 1e-4, 1.0]),
        "update_natural": torch.tensor([0.02, left, 0.02]),
    }
    corrector.update(Measurement(1, tuple(layer.info for layer in layers), values, {}))
    assert corrector.multipliers["1"] / before == pytest.approx(factor, rel=1e-4)
