"""Measurements of differing quantities: what counts towards a verdict, and what a verdict is then told by."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from spectral_monitor.condition import Judge, load_profile, save_profile
from tests.condition.synthetic import HEALTHY, LAYERS, WATCHFUL, ZERO, measured, nothing

FAR = {"update_natural": {"b": 10.0}}
"""Evidence enough at once."""
NEAR = {"update_natural": {"b": 1.7}}
"""A third of it: log(17 / 8) / log(8) = 0.36."""
WITHOUT = [key for key in HEALTHY if key != "update_natural"]


def run(judge, changes):
    """Verdicts after each; what a measurement has besides: ``only``."""
    return [judge.judge(measured(step, **change)) for step, change in enumerate(changes, 1)]


@pytest.mark.parametrize(
    "between", [{"only": ["bfa"]}, {"only": ["lr"]}, {"only": WITHOUT}], ids=["none", "lr", "others"]
)
def test_only_measurements_that_have_the_quantity_count(between):
    seen = run(Judge(WATCHFUL), [NEAR, between, between, NEAR, between, between, between, NEAR, between])
    assert [len(verdicts) for verdicts in seen] == [0] * 7 + [1, 1]
    assert (seen[7][0].steps, seen[7][0].measurements) == (7, 3)


@pytest.mark.parametrize("between", [{"only": []}, {"only": ["lr"]}, {"only": WITHOUT}], ids=["none", "lr", "others"])
def test_a_verdict_stands_until_its_quantity_is_measured_again(between):
    judge = Judge(WATCHFUL)
    (said,) = run(judge, [FAR, FAR, FAR])[-1]
    for step in range(4, 12):
        (verdict,) = judge.judge(measured(step, **between))
        assert verdict == replace(said, steps=step - 1)
        assert (judge.began, judge.ended) == ((), ())
        assert not any(finding.quantity == "update_natural" for finding in judge.findings)
    assert judge.judge(measured(12, only=["update_natural"])) == ()
    assert judge.ended == ("b",)


def test_evidence_is_taken_away_by_measurements_that_have_the_quantity():
    some = {"only": ["lr"]}
    seen = run(Judge(WATCHFUL), [NEAR, some, NEAR, some, {}, some, NEAR, NEAR, some])
    assert not any(seen)


def test_what_tells_causes_apart_may_have_been_measured_before():
    """Learning rates are measured now and then, updates always: the cause is the rate all the same."""
    rates = {"lr": {"b": 0.05}}
    seen = run(Judge(WATCHFUL), [{**NEAR, **rates}, *[{**NEAR, "only": ["update_natural"]}] * 3])
    assert [verdict.cause for (verdict,) in seen[1:]] == ["lr_too_large"] * 3
    assert all("its learning rate is 0.05" in verdict.sentence for (verdict,) in seen[1:])


def test_a_value_that_is_lost_at_its_own_step_is_not_the_one_before():
    """NaN is what was measured."""
    judge = Judge(WATCHFUL)
    run(judge, [FAR])
    assert judge.judge(measured(4, update_natural=nothing("b"))) == ()


def test_what_is_gone_for_good_is_forgotten_by_measurements_that_would_have_it():
    judge, gone = Judge(WATCHFUL), {"update_natural": nothing("b")}
    run(judge, [FAR])
    for step in range(4, 30):
        assert judge.judge(measured(step, only=["lr"]))
    for step in (30, 31, 32):
        assert not judge.judge(measured(step, **gone))
    assert judge.ended == ("b",)


def test_what_was_nan_once_is_not_forgotten_by_measurements_that_do_not_have_it():
    judge = Judge(WATCHFUL)
    run(judge, [FAR])
    judge.judge(measured(4, update_natural=nothing("b")))
    for step in range(5, 12):
        judge.judge(measured(step, only=["lr"]))
    assert [verdict.layer for verdict in judge.judge(measured(12, **FAR))] == ["b"]


def test_what_began_at_zero_grows_between_measurements_of_its_steps():
    """These are measured at every fourth step; it has grown at the ninth, and until then nobody compares."""
    judge, waits = Judge(WATCHFUL), []
    ratios = {1: math.nan, 5: 0.5, 9: 0.1}
    for step in range(1, 14):
        if step % 4 == 1:
            reasons = {"update_ratio/head": ZERO} if step == 1 else {}
            size = {"update_ratio": {"head": ratios.get(step, 0.05)}}
            judge.judge(measured(step, reasons=reasons, **FAR, **size))
        else:
            judge.judge(measured(step, only=["update_natural"], **FAR))
        waits.append(bool(judge.waits))
    assert waits == [True] * 8 + [False] * 5


def test_it_goes_on_where_another_left_off():
    some = {**NEAR, "only": ["update_natural"]}
    rates, nothing_read = {"only": ["lr"], "lr": {"b": 0.05}}, {"only": []}
    steps = [NEAR, some, rates, some, nothing_read, some, {}, some, some, nothing_read, some]
    whole = Judge(WATCHFUL)
    expected = run(whole, steps)
    for cut in range(len(steps)):
        first, second = Judge(WATCHFUL), Judge(WATCHFUL)
        run(first, steps[:cut])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        rest = [second.judge(measured(step, **steps[step - 1])) for step in range(cut + 1, len(steps) + 1)]
        assert rest == expected[cut:]
    assert [len(verdicts) for verdicts in expected] == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1]
    assert expected[4][0].cause == "lr_too_large"


def test_nan_is_not_in_the_state():
    judge = Judge(WATCHFUL)
    judge.judge(measured(1, update_natural=nothing("a", "c")))
    known = judge.state_dict()["known"]["update_natural"]
    assert set(known) == set(LAYERS) - {"a", "c"}
    assert not any(map(math.isnan, known.values()))


def test_a_profile_is_of_measurements_that_have_all_of_it(tmp_path):
    taken = [measured(5, only=["update_natural"]), measured(10), measured(15, only=["lr"]), measured(20)]
    save_profile(taken, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json").steps["head"] == (10, 20)
    with pytest.raises(
        ValueError, match="lr, update_natural, weight_natural at the same steps; give them one interval"
    ):
        save_profile([measured(1, only=["lr"]), measured(2, only=WITHOUT), *taken[:1]], tmp_path / "other.json")
