"""The bands that pictures show are those that verdicts were found with."""

from __future__ import annotations

import math

import pytest
import torch

from spectral_monitor import LRCorrection, SpectralCondition, SpectralProbe
from spectral_monitor.condition.bands import bands
from spectral_monitor.condition.findings import SMALLEST, Finding
from spectral_monitor.fitting.medians import geometric_median
from tests.one_step import training_step


def probe_of(mode="warn", **settings):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities="light", mode=mode, **settings)
    for _ in range(5):
        with training_step(probe, optimizer):
            model(torch.randn(32, 16)).square().mean().backward()
    return probe


def operators(measurement):
    return [i for i, info in enumerate(measurement.layers) if info.role in ("operator", "readout")]


def test_balance_holds_updates_against_their_median():
    """The median of updates relative to weights as they are usually drawn; with 16 inputs each that is a quarter."""
    latest = probe_of().latest
    found, rows = latest.bands["update_natural"], operators(latest)
    middle = geometric_median((latest.values["update_natural"][rows] / 4).tolist()) * 4
    for i in rows:
        room = 4 if latest.layers[i].role == "readout" else 1  # under SGD a readout's updates are larger
        assert found[i].tolist() == pytest.approx([middle / 16, middle * 8 * room, middle])
    assert found[[i for i in range(len(latest.layers)) if i not in rows]].isnan().all(), "biases are not judged"
    assert latest.bands["update_ratio"][rows[0]].tolist() == pytest.approx([0, 1, math.nan], nan_ok=True)


def test_theory_holds_weights_against_one():
    latest = probe_of(condition=SpectralCondition("theory", band=(0.5, 2.0))).latest
    for i in operators(latest):
        assert latest.bands["weight_natural"][i].tolist() == [0.5, 2.0, 1.0]
    assert "update_natural" not in latest.bands


def test_what_is_made_larger_on_purpose_is_held_against_more():
    """Policy "target" gives updates by the size that weights began with, and of the data's reader by its inputs."""
    probe = probe_of("correct", correction=LRCorrection("target"))
    references = [float(probe.latest.bands["update_natural"][i, 2]) for i in operators(probe.latest)]
    expected = probe._supervisor._corrector.expected
    shares = [expected[probe.latest.layers[i].name] for i in operators(probe.latest)]
    assert max(shares) > 1.2 * min(shares)
    assert references == pytest.approx([references[1] * share / shares[1] for share in shares])


def test_a_profile_knows_what_is_larger_on_purpose(tmp_path):
    """It is held against the profile as it is, though policy "target" is at work."""
    probe = probe_of("correct", correction=LRCorrection("target"))
    probe.save_profile(tmp_path / "good.json")
    condition = SpectralCondition(tmp_path / "good.json")
    latest = probe_of("correct", correction=LRCorrection("target"), condition=condition).latest
    for i in operators(latest):
        reference = condition.profile.at(latest.step, latest.layers[i].name).update_natural
        assert float(latest.bands["update_natural"][i, 2]) == pytest.approx(reference)
        assert float(latest.values["update_natural"][i]) == pytest.approx(reference, rel=1e-3)


def test_a_value_outside_its_band_is_what_verdicts_are_made_of():
    latest = probe_of(condition=SpectralCondition(band=(0.99, 1.01), persistence=1)).latest
    low, high, _ = latest.bands["update_natural"].unbind(1)
    value = latest.values["update_natural"]
    outside = {info.name for info, out in zip(latest.layers, (value < low) | (value > high), strict=True) if out}
    assert outside == {verdict.layer for verdict in latest.verdicts if verdict.quantity == "update_natural"} != set()
    for verdict in latest.verdicts:
        i = [info.name for info in latest.layers].index(verdict.layer)
        assert verdict.band == pytest.approx(latest.bands[verdict.quantity][i, :2].tolist())


def test_the_reference_of_the_condition_goes_before_other_checks():
    found = [
        Finding("reference", "a", "weight_natural", 2.0, 1.0, (0.5, 4.0)),
        Finding("weights", "a", "weight_natural", 2.0, 3.0, (0.0, 10.0)),
        Finding("dead", "a", "update_natural", 0.0, 1.0, (SMALLEST, math.inf)),
    ]
    shown = bands(found, ["a"])
    assert shown["weight_natural"].tolist() == [[0.5, 4.0, 1.0]]
    assert set(shown) == {"weight_natural"}, "that something moves at all is not a matter of bands"
