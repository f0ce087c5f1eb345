"""Output layers that begin too large, data that hardly differ between samples, and the first steps of RMSprop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.condition import NETWORK, Judge, SpectralCondition
from spectral_monitor.condition.findings import READOUT_BAND, READOUT_GAIN
from spectral_monitor.condition.network import MIN_SPREAD
from spectral_monitor.condition.trends.outputs import ROUNDING
from tests.condition.synthetic import LAYERS, heavy, judged, measured, set_by, verdicts_on
from tests.condition.test_documented_limits import PAGE, is_off, numbers
from tests.one_step import training_step

DENSE = {name: info for name, info in LAYERS.items() if info.role != "embedding"}


def heads(gain, others=1.0):
    """A head and other layers that multiply features by these numbers."""
    gains = {"a": others, "b": others, "c": others, "head": gain}
    return {"weight_fro": {name: x * math.sqrt(LAYERS[name].fan_out) for name, x in gains.items()}}


@pytest.mark.parametrize(
    ("gain", "others", "off"),
    [
        (5.05, 1.0, True),
        (4.95, 1.0, False),
        (2.55, 0.5, True),
        (2.45, 0.4, False),  # it multiplies features by less, however small the others are
        (0.9, 0.1, False),
    ],
)
def test_a_head_that_begins_too_large_is_off_sooner_than_other_layers(gain, others, off):
    assert is_off("weights", heads(gain, others)) == off


def test_the_limits_of_heads_are_those_of_the_page():
    line = next(
        line for line in PAGE.splitlines() if "of an output layer that multiplies features by more than" in line
    )
    assert numbers(line) == [READOUT_GAIN, READOUT_BAND]


def test_only_heads_of_new_networks_have_the_stricter_limit():
    assert not is_off("weights", heads(1.0) | {"weight_fro": {"c": 9 * 8.0, "head": math.sqrt(10)}})
    trained = {name: 0.2 * value for name, value in heads(9.0)["weight_fro"].items()}
    verdicts = verdicts_on(weight_natural=dict.fromkeys(LAYERS, 1.0), weight_fro=trained)
    assert not verdicts


def test_the_advice_is_to_divide_the_weights_of_the_head():
    (verdict,) = verdicts_on(**heavy(head=3.2))  # its natural norm is 1, and the others' median gain is 1
    assert (verdict.layer, verdict.cause) == ("head", "readout_init")
    assert verdict.remedy.action == "scale_weights"


def spreads(**excess):
    """Stable ranks of inputs in a network that reads data, so far above 1; those of other layers are 5."""
    ranks = {name: 1 + excess.get(name, 4.0) for name in DENSE}
    return {"input_stable_rank": ranks, "feature_rms": dict.fromkeys(DENSE, 1.0), "layers": DENSE}


@pytest.mark.parametrize(
    ("spread", "off"),
    [
        (1.01 * MIN_SPREAD, False),
        (0.99 * MIN_SPREAD, True),
        (3e-6, True),  # a year among standardized columns
        (0.0, False),  # one vector for all, such as a learned query
        (math.nan, False),
    ],
)
def test_data_that_hardly_differ_are_off_from_the_first_step(spread, off):
    assert is_off("uncentered", spreads(a=spread)) == off


def test_only_the_first_matrix_reads_data_and_only_if_nothing_is_embedded():
    assert not is_off("uncentered", spreads(b=1e-4))
    assert not is_off("uncentered", {"input_stable_rank": {"a": 1.0001}, "feature_rms": {"a": 1.0}})
    assert ROUNDING < 2e-6 < MIN_SPREAD


def test_data_seen_late_tell_nothing():
    """By then the layer before may have learned to give such inputs."""
    assert not is_off("uncentered", spreads(a=1e-4), start=100)
    assert is_off("uncentered", spreads(a=1e-4), spreads(a=4.0))  # but what was seen at the start stays


def test_features_that_are_alike_because_the_data_are_have_one_verdict():
    steps = [measured(step, **spreads(a=1e-3, b=1e-5, c=1e-5)) for step in (1, 2, 16, 32)]
    settings = set_by(layers=DENSE)
    causes = {verdict.cause for verdict in judged(steps, settings=settings)[1]}
    assert causes == {"input_scale"}
    centered = [measured(step, **spreads(a=4.0, b=1e-5, c=1e-5)) for step in (1, 2, 16, 32)]
    assert {verdict.cause for verdict in judged(centered, settings=settings)[1]} == {"features_collapsed"}


@pytest.mark.parametrize(("mean", "off"), [(0.0, False), (3.0, False), (40.0, True)])
def test_columns_with_a_large_mean_are_named(mean, off):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps=1)
    for _ in range(3):
        x = torch.randn(64, 12)
        with training_step(probe, optimizer):
            nn.functional.mse_loss(model(x + mean), x[:, :1]).backward()
    roots = [root for root in probe.latest.roots if root.cause == "input_scale"]
    assert [root.layer for root in roots] == [NETWORK] * off
    if off:
        assert "the inputs of 0 hardly differ between samples" in roots[0].sentence
        assert "their mean is about 4" in roots[0].sentence  # 40, but for the differences of so few rows


def rmsprop(steps, **changed):
    """Verdicts under RMSprop, whose first steps are larger by the factor of its young average."""
    judge, verdicts = Judge(SpectralCondition()), ()
    for step in steps:
        young = 1 / math.sqrt(1 - 0.99**step)
        values = {key: dict.fromkeys(LAYERS, young * value) for key, value in changed.items() if key != "part"}
        summary = {"loss": 2.0, "loss_change_predicted": -2.0 * young * changed["part"]} if "part" in changed else {}
        settings = set_by("RMSprop", rectified=young)
        verdicts = judge.judge(measured(step, summary=summary, **values), settings)
    return [verdict.cause for verdict in verdicts if verdict.layer == NETWORK]


@pytest.mark.parametrize(("part", "off"), [(0.9, False), (8.0, True)])
def test_rmsprops_first_steps_promise_more_than_the_next_ones(part, off):
    assert rmsprop((1, 2, 4, 8, 16), part=part) == ["rates_too_large"] * off


@pytest.mark.parametrize(("size", "off"), [(0.002, True), (0.02, False)])
def test_rmsprops_large_first_steps_do_not_hide_that_the_next_ones_are_small(size, off):
    causes = rmsprop((1, 2, 4, 8, 16, 32), update_ratio=size, update_natural=size)
    assert causes == ["rates_too_small"] * off
