"""A judge goes on where another stopped, bit for bit, whenever that was."""

from __future__ import annotations

import json

import pytest

from spectral_monitor.condition import Judge
from tests.condition.synthetic import LAYERS, WATCHFUL, ZERO, measured, nothing, set_by

STEPS = [
    {"update_natural": {"b": 1.7}, "summary": {"loss": 2.0, "loss_distance": 30.0}},
    {"update_natural": {"b": 1.7}, "summary": {"loss": 0.5}},
    {"update_natural": {"b": 10.0}, "lr": {"b": 1.0}},
    {"update_natural": {"b": 10.0}, "update_ratio": {"c": 3.0}, "lr": {"b": 1.0}},
    {"update_natural": {"b": 0.6}, "summary": {"stale_gradient": 1.0}},
    {"summary": {"stale_gradient": float("nan")}},
    {"summary": {"stale_gradient": 0.0}},
    {"contribution": {"a": 0.0, "a.bias": 0.0}, "feature_rms": dict.fromkeys("abc", 60.0)},
    {"contribution": {"a": 0.0, "a.bias": 0.0}},
    {},
    {"weight_natural": {"head": 0.0}, "update_ratio": nothing("head"), "reasons": {"update_ratio/head": ZERO}},
    {"update_natural": {"b": 10.0}, "drift_ratio": nothing("head"), "update_ratio": {"head": 0.5}},
    {"update_natural": {"b": 10.0}, "update_ratio": {"head": 0.1}},
    {  # as heavy as before, and now of low rank: what was drawn at the start is still known to have been
        "weight_fro": {"c": 240.0},
        "weight_natural": dict.fromkeys("abc", 20.0) | {"head": 20.0},
        "drift_ratio": dict.fromkeys(LAYERS, 0.1),
    },
    {"drift_ratio": dict.fromkeys(LAYERS, 90.0)},
    {"drift_ratio": dict.fromkeys(LAYERS, 90.0)},
    {"weight_natural": {"a": float("inf")}},
]


def watched(judge, steps, start=1):
    """What a judge says at every measurement."""
    said = []
    for step, change in enumerate(steps, start):
        verdicts = judge.judge(measured(step, **change), set_by("AdamW", lr=change.get("lr")))
        said.append((verdicts, judge.began, judge.ended, judge.states, judge.waits, judge.findings))
    return said


def test_a_judge_goes_on_where_another_stopped_whenever_that_was():
    whole = watched(Judge(WATCHFUL), STEPS)
    causes = {verdict.cause for verdicts, *_ in whole for verdict in verdicts}
    assert causes >= {"lr_too_large", "unknown", "dead", "rates_too_large", "diverged"}, "many kinds of evidence"
    for cut in range(len(STEPS)):
        first, second = Judge(WATCHFUL), Judge(WATCHFUL)
        watched(first, STEPS[:cut])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert repr(watched(second, STEPS[cut:], cut + 1)) == repr(whole[cut:]), cut


def test_a_state_of_another_version_is_refused():
    judge = Judge(WATCHFUL)
    with pytest.raises(ValueError, match="version 99"):
        judge.load_state_dict(judge.state_dict() | {"version": 99})


def test_the_state_is_of_plain_types():
    judge = Judge(WATCHFUL)
    watched(judge, STEPS)
    assert json.loads(json.dumps(judge.state_dict())) == judge.state_dict()
