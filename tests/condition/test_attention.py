"""Verdicts on attention: they need growth, or long; a layer is named with what to do."""

from __future__ import annotations

import pytest

from spectral_monitor.condition import Judge, SpectralCondition
from tests.condition.synthetic import measured


def told(key, values, judge=None):
    """The causes after each measurement."""
    judge = judge or Judge(SpectralCondition())
    found = []
    for step, value in enumerate(values, 1):
        changed = {} if value is None else {key: {"b": value}}
        found.append({v.cause: v for v in judge.judge(measured(step, **changed))})
    return found


def test_logits_that_grow_beyond_the_limit_are_named_at_once_if_far_beyond():
    found = told("attention_logit_max", [4, 8, 30, 120])
    assert [set(some) for some in found] == [set(), set(), set(), {"logits_exploding"}]
    verdict = found[-1]["logits_exploding"]
    assert (verdict.layer, verdict.quantity, verdict.value, verdict.band) == ("b", "attention_logit_max", 120, (0, 50))
    assert "attention logit is 120, grown from 4" in verdict.sentence
    assert (verdict.remedy.action, verdict.remedy.value) == ("scale_lr", 0.1)


def test_a_little_beyond_takes_more_measurements():
    found = told("attention_logit_max", [4, 60, 60, 60, 60, 60])
    assert [len(some) for some in found] == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("values", [[80, 85, 90, 95, 100], [4, 30, 45, 49, 49], [-3, -1, 0.0, 2, 4]])
def test_large_from_the_start_or_within_the_limit_is_no_verdict(values):
    assert not any(told("attention_logit_max", values))


def test_under_a_correction_the_advice_is_a_smaller_size():
    """For then the learning rate is the correction's."""
    judge = Judge(SpectralCondition())
    for step, logit in enumerate([4.0, 8.0, 500.0], 1):
        changed = {"attention_logit_max": {"b": logit}, "lr_multiplier": dict.fromkeys("abcdef", 3.0)}
        found = {verdict.cause: verdict for verdict in judge.judge(measured(step, **changed))}
    assert "divide the correction's size by 4" in found["logits_exploding"].sentence
    assert found["logits_exploding"].remedy.action == "check"


def test_it_is_lifted_when_logits_are_small_again():
    found = told("attention_logit_max", [4, 200, 200, 10, 10, 10])
    assert [len(some) for some in found] == [0, 1, 1, 0, 0, 0]


def test_a_head_must_be_collapsed_for_long():
    found = told("attention_entropy_lowest", [0.3, *[0.01] * 9])
    assert [len(some) for some in found] == [0] * 8 + [1, 1]
    assert "a single key" in found[-1]["attention_collapsed"].sentence
    found = told("attention_entropy_lowest", [0.3, *[0.045] * 9])
    assert [len(some) for some in found] == [0] * 8 + [1, 1], "a little below the limit as well"


@pytest.mark.parametrize("values", [[0.01] * 7, [0.06] * 20, [*[0.01] * 7, 0.2] * 3])
def test_a_head_that_collapses_for_a_while_is_no_verdict(values):
    assert not any(told("attention_entropy_lowest", values))


def test_steps_that_do_not_measure_it_do_not_count():
    assert not any(told("attention_entropy_lowest", [0.01, None] * 7))


def test_it_goes_on_from_its_state():
    first, second = Judge(SpectralCondition()), Judge(SpectralCondition())
    told("attention_entropy_lowest", [0.01] * 7, first)
    second.load_state_dict(first.state_dict())
    assert "attention_collapsed" in told("attention_entropy_lowest", [0.01], second)[-1]
    old = first.state_dict()
    del old["attention"]  # of a judge that knew no attention
    second.load_state_dict(old)
    assert "attention_collapsed" not in told("attention_entropy_lowest", [0.01], second)[-1]
