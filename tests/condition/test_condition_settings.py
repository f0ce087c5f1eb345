"""What a user may ask of the condition, and what is refused at once."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from spectral_monitor.condition import SpectralCondition, save_profile
from tests.condition.synthetic import LAYERS, judged, measured


@pytest.mark.parametrize(
    "band",
    [
        (4, 0.25),
        (0.5, 0.9),
        (0.5, 1),
        (1, 4),
        (1.5, 4),
        (0, 4),
        (-1, 4),
        (0.25,),
        (0.1, 1, 10),
        4,
        "1/4",
        (math.nan, 4),
        (0.5, "4"),
    ],
)
def test_an_impossible_band_is_refused(band):
    with pytest.raises(ValueError, match="0 < low < 1 < high"):
        SpectralCondition(band=band)


@pytest.mark.parametrize("persistence", [0, -1, 1.5, "3", True])
def test_an_impossible_persistence_is_refused(persistence):
    with pytest.raises(ValueError, match="persistence must be an integer >= 1"):
        SpectralCondition(persistence=persistence)


@pytest.mark.parametrize("hysteresis", [0, -0.5, 1.1, math.nan])
def test_an_impossible_hysteresis_is_refused(hysteresis):
    with pytest.raises(ValueError, match="hysteresis must be in"):
        SpectralCondition(hysteresis=hysteresis)


@pytest.mark.parametrize("reference", ["balanced", "Theory", "", None, 3])
def test_an_unknown_reference_is_refused_with_the_known(reference):
    with pytest.raises(ValueError, match="'balance', 'theory' or the path of a profile"):
        SpectralCondition(reference)


def test_what_must_be_measured():
    assert SpectralCondition().quantity == "update_natural"
    assert SpectralCondition("theory").quantity == "weight_natural"


def test_the_band_is_the_users():
    measurements = [measured(step, update_natural={"b": 0.3}) for step in (1, 2, 3)]
    assert not judged(measurements)[1]
    assert [verdict.layer for verdict in judged(measurements, band=(1 / 2, 2))[1]] == ["b"]


def test_a_band_may_have_no_end_above():
    """As far below it as it reaches down is evidence enough, then."""
    assert not judged([measured(s, update_natural={"b": 1e6}) for s in (1, 2, 3)], band=(1 / 100, math.inf))[1]
    small = measured(1, update_natural={"b": 0.1 / 10_100, "c": 0.2})
    assert [verdict.layer for verdict in judged([small], band=(1 / 100, math.inf))[1]] == ["b"]


@pytest.mark.parametrize(("factor", "named"), [(7.9, False), (8.1, True), (1 / 15.9, False), (1 / 16.1, True)])
def test_updates_may_be_twice_as_far_down_as_up(factor, named):
    """Healthy updates are spread further down; against the theory a band of weights is as wide both ways."""
    judge, _ = judged([measured(1, update_natural={"b": 0.1 * factor, "c": 0.2})])  # c has four times the inputs
    assert bool(judge.state_dict()["records"]) is named
    assert SpectralCondition().limits == (1 / 16, 8.0)
    assert SpectralCondition("theory").limits == (1 / 16, 16.0)


@pytest.mark.parametrize("factor", [0, -1, math.inf, float("inf"), math.nan, "10", True, None])
def test_an_impossible_expected_factor_is_refused(factor):
    with pytest.raises(ValueError, match=r"expected\['head'\] must be a factor above 0"):
        SpectralCondition(expected={"head": factor})


def test_expected_must_map_names_to_factors():
    with pytest.raises(ValueError, match="expected maps patterns of layer names to factors"):
        SpectralCondition(expected=["head"])


def test_a_pattern_of_expected_that_matches_no_layer_is_refused_with_the_names():
    condition = SpectralCondition(expected={"heads.*": 10})
    with pytest.raises(ValueError, match=r"heads.*tok, a, a.bias, b, b.bias, c, c.bias, head"):
        condition.check(LAYERS.values())
    with pytest.raises(ValueError, match="heads"):
        judged([measured(1)], expected={"heads.*": 10})


def test_the_first_pattern_that_matches_counts():
    condition = SpectralCondition(expected={"head": 10, "*": 2})
    assert condition.factors(LAYERS.values()) == dict.fromkeys(LAYERS, 2.0) | {"head": 10.0}
    assert SpectralCondition(expected={"h*": 3}).factors(LAYERS.values()) == {"head": 3.0}


def test_a_name_in_expected_stands_for_itself_whatever_is_in_it():
    condition, layers = SpectralCondition(expected={"a[0]": 10}), [replace(LAYERS["head"], name="a[0]")]
    condition.check(layers)
    assert condition.factors(layers) == {"a[0]": 10.0}


@pytest.mark.parametrize("ignore", ["rates", ["rate"], ["updates", "losses"]])
def test_an_unknown_check_to_ignore_is_refused_with_the_known(ignore):
    with pytest.raises(ValueError, match=r"ignore must be a list of checks.*valid checks: rates, updates, weights"):
        SpectralCondition(ignore=ignore)


def test_of_several_unknown_checks_the_first_gets_a_suggestion():
    with pytest.raises(ValueError, match=r"got 'rats', 'zzz'; did you mean 'rates'"):
        SpectralCondition(ignore=["rats", "zzz"])


def test_conditions_that_ignore_the_same_are_equal():
    """Files have lists."""
    assert SpectralCondition(ignore=["rates"]) == SpectralCondition(ignore=("rates",))
    assert SpectralCondition(ignore=[]) == SpectralCondition()


def test_a_profile_is_given_as_a_reference():
    with pytest.raises(TypeError, match="profile"):
        SpectralCondition(profile=None)


def test_conditions_are_values(tmp_path):
    path = tmp_path / "p.json"
    save_profile([measured(1)], path)
    for condition in (SpectralCondition(), SpectralCondition("theory", band=(0.5, 2)), SpectralCondition(Path(path))):
        copy = pickle.loads(pickle.dumps(condition))
        assert copy == condition
        assert copy.limits == condition.limits
        assert copy.profile == condition.profile
    assert SpectralCondition() != SpectralCondition(persistence=4)
