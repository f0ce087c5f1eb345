"""Output layers that begin too large, data that hardly differ between samples, and the first steps of RMSprop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.condition import NETWORK, Judge, SpectralCondition
from spectral_monitor.condition.network import MIN_SPREAD
from spectral_monitor.condition.trends.outputs import HEAD_LIMIT, HEAD_OUTPUTS, ROUNDING
from spectral_monitor.condition.verdict import Remedy
from tests.condition.synthetic import LAYERS, judged, measured, set_by, verdicts_on
from tests.condition.test_documented_limits import PAGE, is_off, numbers
from tests.one_step import training_step

DENSE = {name: info for name, info in LAYERS.items() if info.role != "embedding"}


def heads(gain, outputs=2.1, others=1.0):
    """A head and other layers that multiply features by these numbers, and the size of the head's first outputs."""
    gains = {"a": others, "b": others, "c": others, "head": gain}
    weights = {name: x * math.sqrt(LAYERS[name].fan_out) for name, x in gains.items()}
    return {"weight_fro": weights, "feature_rms": {"a": 1.0, "head": outputs}}


@pytest.mark.parametrize(
    ("gain", "outputs", "off"),
    [(5.05, 2.1, True), (4.95, 2.1, False), (9.0, 1.9, False), (9.0, math.nan, False)],
)
def test_a_head_that_begins_too_large_is_off_if_its_outputs_are_too(gain, outputs, off):
    assert is_off("head", heads(gain, outputs)) == off
    assert not is_off("weights", heads(gain, outputs))


def test_only_the_first_outputs_of_a_head_count():
    assert not is_off("head", heads(9.0, 1.0), heads(9.0, 9.0))
    assert is_off("head", heads(9.0, 9.0), heads(9.0, 1.0))
    assert not is_off("head", heads(9.0, 9.0), start=100)


def test_the_limits_of_heads_are_those_of_the_page():
    line = next(line for line in PAGE.splitlines() if "of an output layer whose first outputs" in line)
    assert numbers(line) == [HEAD_OUTPUTS, HEAD_LIMIT]


def test_only_heads_of_new_networks_have_the_stricter_limit():
    assert not is_off("head", heads(1.0, 9.0) | {"weight_fro": {"c": 9 * 8.0, "head": math.sqrt(10)}})
    large = heads(9.0)
    trained = large | {"weight_fro": {name: 0.2 * value for name, value in large["weight_fro"].items()}}
    assert not verdicts_on(**trained)
    assert [verdict.cause for verdict in verdicts_on(**large)] == ["readout_init"]


@pytest.mark.parametrize("gain", [9.0, 30.0])
def test_the_advice_is_to_divide_the_weights_of_the_head(gain):
    (verdict,) = verdicts_on(**heads(gain))
    assert (verdict.layer, verdict.cause) == ("head", "readout_init")
    assert verdict.remedy == Remedy("scale_weights", ("head",), 1 / gain)


@pytest.mark.parametrize(
    ("sizes", "off"), [((9.9,), False), ((10.1,), True), ((9.9, 29.0), False), ((20.0, 11.0), True)]
)
def test_an_embedding_of_a_new_network_may_not_begin_above_ten(sizes, off):
    """It may grow to thirty."""
    judge, verdicts = Judge(SpectralCondition()), ()
    for step, size in enumerate((*sizes, *[sizes[-1]] * 100), 1):
        verdicts = judge.judge(measured(step, weight_natural={"tok": size}))
    assert [(verdict.layer, verdict.cause) for verdict in verdicts] == [("tok", "embedding_scale")] * off


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
        (3e-7, False),  # rounding of one vector for all, such as a learned query
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


@pytest.mark.parametrize(("size", "off"), [(0.02, True), (0.04, False)])
def test_adagrads_large_first_steps_do_not_hide_that_the_next_ones_are_small(size, off):
    """Each step is the first one over the root of their number."""
    judge, verdicts = Judge(SpectralCondition()), ()
    for step in (1, 2, 4, 8, 16, 32):
        sizes = dict.fromkeys(LAYERS, size / math.sqrt(step))
        verdicts = judge.judge(measured(step, update_ratio=sizes, update_natural=sizes), set_by("Adagrad"))
    assert [verdict.cause for verdict in verdicts] == ["rates_too_small"] * off
