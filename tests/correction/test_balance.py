"""Policy "balance": it brings back what learning rates have made, by roots alone, and leaves healthy layers alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from spectral_monitor import LRCorrection, Measurement, SpectralProbe
from spectral_monitor.condition import CAUSES, NETWORK, Remedy, Verdict
from spectral_monitor.correction.corrector import Corrector
from spectral_monitor.correction.wanted import MENDED
from spectral_monitor.layers import dissect
from tests.correction.test_corrector import LR, batch, last, perceptron
from tests.one_step import training_step


def learn(factor, steps=20):
    """A classification, with a hidden layer's learning rate times a factor, under balance."""
    network = perceptron()
    rates = {name: LR * (factor if name == "2.weight" else 1) for name, _ in network.named_parameters()}
    optimizer = torch.optim.SGD([{"params": [p], "lr": rates[name]} for name, p in network.named_parameters()], lr=LR)
    rule = LRCorrection("balance")
    probe = SpectralProbe(
        network, optimizer, every_n_steps=1, quantities=rule.quantities, correction=rule, mode="correct"
    )
    for step in range(steps):
        x = batch(step, network)
        with training_step(probe, optimizer):
            nn.functional.cross_entropy(network(x), x[:, :5].argmax(1)).backward()
    return probe


def test_balance_leaves_layers_alone_that_are_in_order():
    assert set(learn(1.0).multipliers.values()) == {1.0}


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_balance_brings_back_the_one_that_is_not(factor):
    probe = learn(factor)
    changed = [m.step for m in probe.measurements if float(m.values["lr_multiplier"][2]) != 1.0]
    assert changed[0] == 2, "a learning rate that stands out so far is a verdict at once"
    first = probe.measurements[0]
    assert [(root.layer, root.cause) for root in first.roots] == [("2", f"lr_too_{'large' if factor > 1 else 'small'}")]
    assert {probe.multipliers[name] for name in "04"} == {1.0}, "the others are not brought to it"
    assert 0.1 < probe.multipliers["2"] * factor < 10
    sizes = last(probe)
    assert sizes["2"] == pytest.approx(sorted(sizes[name] for name in "024")[1], rel=0.5)


def untouched():
    """A corrector, and measurements: of the updates of three operators, under the multipliers there are."""
    network = perceptron()
    layers = dissect(network).layers
    corrector = Corrector(LRCorrection("balance"), layers, [torch.optim.SGD(network.parameters(), lr=LR)])

    def measure(*verdicts, sizes=(0.1, 8.0, 0.001)):
        values = {key: torch.ones(len(layers)) for key in corrector.correction.quantities} | {
            "lr_multiplier": torch.tensor([corrector.multipliers[layer.info.name] for layer in layers]),
        }
        values["lr"] = LR * values["lr_multiplier"]
        values["update_natural"][[0, 2, 4]] = torch.tensor(sizes)
        return Measurement(1, tuple(layer.info for layer in layers), values, {}, verdicts)

    return corrector, measure


def acted_on(*verdicts):
    """Layers whose multipliers a measurement with these verdicts changes."""
    corrector, measure = untouched()
    return {change.layer: change.after for change in corrector.update(measure(*verdicts))}


CHECK = Remedy("check")


def verdict(layer, cause, *others, root="", remedy=CHECK):
    layers = () if layer == NETWORK else (layer, *others)
    return Verdict(layer, "update_natural", 1.0, (0.1, 1.0), 9.0, 1, 3, cause, "", layers, root, remedy=remedy)


def test_without_a_verdict_nothing_is_touched():
    assert acted_on() == {}


def test_a_rate_that_may_be_meant_is_left_alone():
    assert acted_on(verdict("2", "lr_too_large", remedy=None)) == {}


@pytest.mark.parametrize("cause", CAUSES)
def test_it_acts_on_causes_that_the_learning_rate_of_a_layer_mends(cause):
    """8 comes to the geometric median of 0.1, 8 and 0.001, at once and as far as the limits let it."""
    assert acted_on(verdict("2", cause)) == pytest.approx({"2": 1 / 64} if cause in MENDED else {})


@pytest.mark.parametrize(("sizes", "after"), [((0.001, 0.8, 0.0001), 1 / 64), ((0.1, 0.8, 0.001), 1 / 8)])
def test_limits_are_around_the_usual_rate_however_small_updates_are(sizes, after):
    corrector, measure = untouched()
    (change,) = corrector.update(measure(verdict("2", "lr_too_large"), sizes=sizes))
    assert change.after == pytest.approx(after)


def test_a_layer_whose_update_says_nothing_has_no_usual_rate():
    """The limits of the second are around the rates of two others, not of the first, a thousand times as high."""
    corrector, measure = untouched()
    measurement = measure(verdict("2", "lr_too_large"), sizes=(math.nan, 8.0, 0.001))
    names = [layer.name for layer in measurement.layers]
    measurement.values["update_natural"][:] = math.nan
    measurement.values["update_natural"][[names.index("2"), names.index("4")]] = torch.tensor([8.0, 0.001])
    measurement.values["lr"][[k for k, name in enumerate(names) if name not in ("2", "4")]] *= 1000
    (change,) = corrector.update(measurement)
    assert change.after == pytest.approx(1 / 64)


def test_layers_at_their_limit_are_known_until_they_leave_it():
    corrector, measure = untouched()
    (change,) = corrector.update(measure(verdict("2", "lr_too_large")))
    assert change.limited
    assert corrector.state_dict()["limited"] == ["2"]
    (change,) = corrector.update(measure(verdict("2", "lr_too_large"), sizes=(0.1, 0.01, 0.1)))
    assert not change.limited
    assert corrector.state_dict()["limited"] == []


@pytest.mark.parametrize("lr", [0.0, math.nan])
def test_without_a_learning_rate_there_is_nothing_to_correct(lr):
    corrector, measure = untouched()
    measurement = measure(verdict("2", "lr_too_large"))
    measurement.values["lr"].fill_(lr)
    assert corrector.update(measurement) == []
    assert set(corrector.multipliers.values()) == {1.0}


def test_it_leaves_alone_what_follows_from_a_root():
    assert acted_on(verdict("2", "lr_too_large"), verdict("4", "unknown", root="2")) == pytest.approx({"2": 1 / 64})
    assert acted_on(verdict("2", "weights_too_large"), verdict("4", "unknown", root="2")) == {}


def test_it_acts_on_every_layer_of_a_root():
    assert acted_on(verdict("2", "lr_too_large", "4")) == pytest.approx({"2": 1 / 64, "4": 64})


def test_a_wrong_rule_is_mended_in_every_matrix():
    """The one in the middle has what it should have."""
    assert acted_on(verdict(NETWORK, "sgd_rule_under_adam")) == pytest.approx({"2": 1 / 64, "4": 64})
    assert acted_on(verdict(NETWORK, "rates_too_large")) == {}


def test_what_was_corrected_once_is_kept_there():
    """Although its verdict is over; nobody else is."""
    corrector, measure = untouched()
    assert [change.layer for change in corrector.update(measure(verdict("2", "lr_too_large")))] == ["2"]
    assert [change.layer for change in corrector.update(measure(sizes=(0.1, 0.05, 0.1)))] == ["2"]
