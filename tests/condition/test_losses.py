"""What the loss tells of the network as a whole, and what the way of its weights does where no loss is known."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from spectral_monitor.condition import NETWORK, Judge, SpectralCondition
from spectral_monitor.condition.causes import network as causes
from spectral_monitor.condition.findings import Finding
from tests.condition.synthetic import LAYERS, judged, measured, set_by
from tests.condition.test_whole import every, told


def distances(distance, outputs=0.3, **more):
    change = {"feature_rms": dict.fromkeys(LAYERS, 1.0) | {"head": outputs}, "summary": {"loss_distance": distance}}
    return change | more


def test_targets_that_are_far_from_the_outputs_are_named_at_once_and_stay_the_root():
    race = every(9.0, "drift_ratio")  # by themselves a sign of steps that are too large
    found = told(distances(500.0), distances(400.0, **race), *[distances(1.0, **race)] * 6)
    assert [set(some) for some in found] == [{"target_scale"}] * 8
    verdict = found[0]["target_scale"]
    assert (verdict.quantity, verdict.value, verdict.remedy.action) == ("loss_distance", 500.0, "check")
    assert "outputs must change by at least 500 times their usual size" in verdict.sentence


def test_a_run_that_diverges_keeps_the_cause_that_was_there_before():
    found = told(distances(500.0), every(math.inf, "weight_natural"), every(math.inf, "weight_natural"))
    assert [set(some) for some in found] == [{"target_scale"}, *[{"target_scale", "diverged"}] * 2]
    diverged = found[-1]["diverged"]
    assert "divide every learning rate" not in diverged.sentence
    assert diverged.remedy.action == "check"
    (alone,) = told(every(math.inf, "weight_natural"))
    assert "divide every learning rate by 10" in alone["diverged"].sentence


@pytest.mark.parametrize(
    ("distance", "outputs", "named"),
    [(9.0, 0.3, False), (11.0, 0.3, True), (9.0, 0.0, False), (400.0, 50.0, False), (600.0, 50.0, True)],
)
def test_targets_are_held_against_the_outputs_or_against_one(distance, outputs, named):
    assert ("target_scale" in told(distances(distance, outputs))[0]) == named


def test_only_the_first_distance_counts():
    assert not any(told(distances(1.0), *[distances(500.0)] * 6)), "where the loss is flat it grows without end"
    assert not told(distances(500.0), start=100)[-1], "of a run that goes on"


def losses(*values, ratio=0.5):
    return [{"summary": {"loss": value}, **every(ratio, "update_ratio")} for value in values]


def test_a_loss_that_comes_back_is_of_steps_that_are_too_large():
    found = told(*losses(2.0, 0.2, 1.4, 1.2), start=15)
    assert not any(found), "what it began with is not known"
    found = told(*losses(2.0, *[0.2] * 15, 1.4, 1.2))
    assert [set(some) for some in found[-2:]] == [{"rates_too_large"}] * 2
    verdict = found[-2]["rates_too_large"]
    assert (verdict.quantity, verdict.value) == ("loss", 1.4)
    assert verdict.band == (0.0, pytest.approx(0.6))
    assert "the loss is 1.4 at step 17, but it was 0.2 before" in verdict.sentence
    assert verdict.remedy.value == pytest.approx(1 / 10), "20 times the root of 0.5, in one digit"


def test_a_loss_that_does_not_fall_is_of_steps_that_are_too_large_where_they_are():
    found = told(*losses(*[2.0] * 15, 2.4, 2.5, 2.6))
    assert "rates_too_large" in found[-1]
    assert "it began at 2" in found[-1]["rates_too_large"].sentence
    assert not any(told(*losses(*[2.0] * 15, *[1.7] * 9)))


@pytest.mark.parametrize(
    "values",
    [
        (2.0, *[0.1] * 15, *[0.45] * 9),  # a noisy loss, far below the first
        (2.0, *[1.1] * 15, *[1.75] * 9),  # that has not fallen by half
        (2.0, *[-1.0] * 15, *[1.4] * 9),  # below 0: nothing can be said of ratios
        (2.0, *[math.nan] * 20),
    ],
)
def test_losses_that_say_nothing(values):
    assert not any(told(*losses(*values)))


def test_a_loss_that_comes_back_under_steps_of_ordinary_size_is_left_alone():
    """As where targets move, in reinforcement learning."""
    assert not any(told(*losses(2.0, *[0.2] * 15, *[1.4] * 9, ratio=0.05)))


def promises(*parts, loss=2.0):
    """Steps that would by their gradients take these parts of the loss off it."""
    return [{"summary": {"loss": loss, "loss_change_predicted": -part * loss}} for part in parts]


def test_steps_that_would_take_more_off_the_loss_than_there_is_are_too_large():
    found = told(*promises(4.0, 9.0, 0.1, 9.0, 8.0))
    assert [set(some) for some in found] == [set()] * 4 + [{"rates_too_large"}], "the median of five"
    verdict = found[-1]["rates_too_large"]
    assert (verdict.quantity, verdict.value) == ("loss_change_predicted", 8.0)
    assert "each step is predicted to lower the loss by 8 times its value, more than is possible" in verdict.sentence
    assert not any(told(*promises(*[2.9] * 9))), "three times at most"
    assert not any(told(*promises(*[-9.0] * 9))), "uphill, as momentum goes now and then"


def test_where_the_loss_is_known_to_go_below_zero_zero_is_no_end_of_it():
    assert not any(told(*promises(9.0, loss=-2.0), *promises(*[9.0] * 9)))
    assert not any(told(*promises(*[9.0] * 9, loss=0.0)))
    unknown = [{"summary": {"loss": 2.0, "loss_change_predicted": math.nan}}] * 9
    assert not any(told(*unknown))


def test_what_steps_promised_is_part_of_the_state():
    one, other = Judge(SpectralCondition()), Judge(SpectralCondition())
    *before, last = promises(*[9.0] * 5)
    for step, change in enumerate(before, 1):
        one.judge(measured(step, **change))
    other.load_state_dict(one.state_dict())
    assert [verdict.cause for verdict in other.judge(measured(5, **last))] == ["rates_too_large"]
    one.judge(measured(5, **promises(1.0, loss=-1.0)[0]))
    other.load_state_dict(one.state_dict())
    assert not other.judge(measured(6, **last))


def test_steps_of_ordinary_size_that_all_point_one_way_are_not_called_too_large():
    way = [every(0.05, "update_ratio") | every(0.05 * step, "drift_ratio") for step in range(1, 1800, 40)]
    judge, found = Judge(SpectralCondition()), []
    for k, change in enumerate(way):
        verdicts = judge.judge(measured(1 + 40 * k, **change))
        found.append({verdict.cause: verdict for verdict in verdicts})
    assert set(found[-1]) == {"one_direction"}
    verdict = found[-1]["one_direction"]
    assert verdict.remedy.action == "check"
    assert "in steps of ordinary size (0.05 of the weights) that all point the same way" in verdict.sentence
    fast = told(*[every(0.05, "update_ratio") | every(0.05 * k, "drift_ratio") for k in range(1, 9)], start=1)
    assert not any(fast), "a straight beginning is healthy"


@pytest.mark.parametrize(
    ("ratio", "way", "cause"),
    [
        (0.09, 0.8, "one_direction"),
        (0.12, 0.8, "rates_too_large"),
        (0.09, 0.6, "rates_too_large"),
        (0.09, 1.9, "one_direction"),
        (0.09, 2.1, "rates_too_large"),
    ],
)
def test_what_tells_one_direction_is_the_size_of_steps_and_the_part_of_their_sum(ratio, way, cause):
    changes = [every(ratio, "update_ratio") | every(way * ratio * (1800 + k), "drift_ratio") for k in range(6)]
    assert set(told(*changes, start=1800)[-1]) == {cause}


def test_only_the_way_of_the_weights_tells_one_direction():
    """Outputs of RMS 50 are no way, although 1000 steps of a twentieth make 50 too."""
    grown = Finding("features_grow", NETWORK, "feature_rms", 50.0, 40.0, (0.0, 1.0))
    explained = causes._too_large(
        grown, SimpleNamespace(step=1000, corrected=False, rows=()), causes.History(0.05, math.nan, "")
    )
    assert explained.code == "rates_too_large"


def test_drift_without_a_step_has_no_direction():
    drift = Finding("rates_too_large", NETWORK, "drift_ratio", 90.0, 1.0, (0.0, 8.0))
    explained = causes._too_large(
        drift, SimpleNamespace(step=9, corrected=False, rows=()), causes.History(0.0, math.nan, "")
    )
    assert explained.code == "rates_too_large"


@pytest.mark.parametrize("pace", [math.nan, 0.0, math.inf])
def test_without_a_pace_rates_are_divided_by_ten(pace):
    loss = Finding("loss_returns", NETWORK, "loss", 9.0, 1.0, (0.0, 1.0))
    explained = causes.of_network(
        loss, SimpleNamespace(step=90, corrected=False, rows=()), causes.History(pace, math.nan, "")
    )
    assert explained.remedy.value == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("before", "now", "cause"),
    [
        (losses(2.0, *[0.2] * 15), losses(1.4)[0], "rates_too_large"),
        ([distances(500.0)], {}, "target_scale"),
    ],
)
def test_what_the_loss_was_is_part_of_the_state(before, now, cause):
    one, other = Judge(SpectralCondition()), Judge(SpectralCondition())
    for step, change in enumerate(before, 1):
        one.judge(measured(step, **change))
    state = one.state_dict()
    other.load_state_dict(state | {"records": []})  # it is found again, not remembered
    now = now or {"summary": {"loss_distance": 1.0}}
    verdicts = other.judge(measured(len(before) + 1, **now))
    assert [verdict.cause for verdict in verdicts] == [cause]


def test_a_state_of_before_there_were_distances_knows_none():
    one, other = Judge(SpectralCondition()), Judge(SpectralCondition())
    state = one.state_dict()
    whole = {key: value for key, value in state["whole"].items() if key != "distance"}
    other.load_state_dict(state | {"whole": whole})
    assert [verdict.cause for verdict in other.judge(measured(1, **distances(500.0)))] == ["target_scale"]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ((-1.4, -1.5, -1.7, -5.0, -2000.0, -6e6), True),
        ((0.5, 0.3, -0.1, -5.0, -2000.0, -6e6, -5e6), True),  # it stays named
        ((1.4, 1.0, -0.5, -1.5, -2.0, -2.5), False),  # the likelihood of a density
        ((1.4, 1.0, -0.5, -1.5, -2.0, -1.9e4, -1.0), True),
        ((1.4, 1.0, -5.0, -2.0, -3.0, -1.0, -1.9e4), False),  # a loss that jumps
        ((-1.4, -1.5, -1.7, -5.0, -2000.0, -4e4), False),  # less than ten thousand times its size at the start
        ((1.4, 2.0, 10.0, 1e3, 1e6, 1e9), False),
    ],
)
def test_a_loss_that_falls_without_end_is_named(values, named):
    changes = [{"summary": {"loss": value}} for value in values]
    verdict = told(*changes, start=5)[-1].get("loss_input")  # the first steps are those up to step 8
    assert (verdict is not None) == named
    assert not named or ("check its sign" in verdict.sentence and "times its size at the start" in verdict.sentence)


def test_a_loss_that_falls_without_end_is_named_beside_divergence():
    changes = [{"summary": {"loss": -(30.0**k)}} for k in range(7)]
    last = {"summary": {"loss": math.nan}} | every(math.inf, "weight_natural")
    found = told(*changes, last, start=7)
    assert found[-1]["loss_input"].is_root
    assert "loss_input" not in told(*changes, last, start=9)[-1], "its size at the start is not known"


def test_losses_of_two_optimizers_may_compete():
    two = set_by() | {name: set_by(owner=1)[name] for name in ("a", "b")}
    changes = [measured(7 + k, summary={"loss": -(30.0**k)}) for k in range(7)]
    causes_of = [{verdict.cause for verdict in judged(changes, settings=s)[1]} for s in (set_by(), two)]
    assert ["loss_input" in found for found in causes_of] == [True, False]
