"""When findings become verdicts, how verdicts end, and what never becomes one."""

from __future__ import annotations

import cProfile
import json
import math
import pickle
import pstats

import pytest

from spectral_monitor import LayerInfo
from spectral_monitor.condition import Judge, Remedy, SpectralCondition, Verdict
from spectral_monitor.condition.findings import SMALLEST, Finding
from spectral_monitor.measurement import HEALTHY, NOT_JUDGED, LayerState
from tests.condition.synthetic import LAYERS, WATCHFUL, judged, measured, nothing, set_by

FAR = {"update_natural": {"b": 10.0}}
"""A hundred times the median: 100/8 times the band's end, log(12.5) / log(8) = 1.2 of evidence."""
NEAR = {"update_natural": {"b": 0.1 * 8 * 8 ** (1 / 3)}}
"""Beyond the band by a third of its width, on the log scale: 1/3 of evidence."""


def names(verdicts):
    return [verdict.layer for verdict in verdicts]


def run(judge, *changes, start=1):
    """Verdicts after each of several measurements."""
    return [judge.judge(measured(step, **change)) for step, change in enumerate(changes, start)]


def test_a_healthy_network_has_no_verdict():
    judge, verdicts = judged([measured(step) for step in range(1, 30)])
    assert verdicts == ()
    assert judge.began == ()


def finding(value, band=(1 / 16, 8.0), scale=8.0):
    return Finding("reference", "b", "update_natural", value, 1.0, band, scale)


@pytest.mark.parametrize(
    ("value", "evidence"), [(64.0, 1.0), (16.0, 1 / 3), (8.0, 0.0), (1.0, -1.0), (1 / 128, 1.0), (1 / 16, 0.0)]
)
def test_evidence_is_the_excess_in_units_of_the_band(value, evidence):
    assert finding(value).evidence == pytest.approx(evidence)


def test_evidence_at_the_ends_of_a_band_without_end():
    assert finding(0.0, (SMALLEST, math.inf), 2.0).evidence == 0.5, "exactly nothing: once may be chance"
    assert finding(0.0, (0.0, 1.0), 4.0).evidence == -math.inf, "no update is no update that is too large"
    assert finding(1e9, (SMALLEST, math.inf), 2.0).evidence == -math.inf
    assert finding(0.5, (0.0, math.inf), 2.0).evidence == -math.inf


@pytest.mark.parametrize(("persistence", "at"), [(1, 1), (3, 3), (5, 5), (12, 12)])
def test_evidence_adds_up_until_the_persistence_is_reached(persistence, at):
    """A third of the band's width beyond it takes as many measurements as the persistence says."""
    judge = Judge(SpectralCondition(band=WATCHFUL.band, persistence=persistence))
    just = {"update_natural": {"b": NEAR["update_natural"]["b"] * 1.001}}
    seen = [bool(verdicts) for verdicts in run(judge, *[just] * 14)]
    assert seen == [False] * (at - 1) + [True] * (15 - at)


def test_what_is_far_off_has_its_verdict_at_once():
    assert names(run(Judge(WATCHFUL), FAR)[0]) == ["b"]
    further = Judge(SpectralCondition(band=WATCHFUL.band, persistence=9))  # log(12.5) / log(8) = 1.21 each, of 3
    assert [bool(verdicts) for verdicts in run(further, *[FAR] * 4)] == [False, False, True, True]


def test_a_measurement_inside_takes_as_much_evidence_away_as_it_is_inside():
    """At the reference itself that is 1: more than two thirds, so that nothing is left."""
    judge = Judge(WATCHFUL)
    assert not any(run(judge, NEAR, NEAR, {}, NEAR, NEAR, {}, NEAR, NEAR))
    just_inside = {"update_natural": {"b": 0.1 * 7.9}}
    judge = Judge(WATCHFUL)
    assert [len(v) for v in run(judge, NEAR, NEAR, just_inside, NEAR, NEAR)] == [0, 0, 0, 0, 1]


def test_what_a_verdict_says():
    measurements = [measured(step, **FAR) for step in (10, 20, 30, 40)]
    _, (verdict,) = judged(measurements)
    assert (verdict.layer, verdict.quantity, verdict.value) == ("b", "update_natural", 10.0)
    assert verdict.ratio == pytest.approx(100)
    assert verdict.band == pytest.approx((0.1 / 16, 0.8))
    assert (verdict.steps, verdict.measurements) == (30, 4)
    assert "100x larger than typical" in verdict.sentence
    assert (verdict.is_root, verdict.layers, verdict.consequences) == (True, ("b",), ())


def test_what_stands_out_without_a_known_cause_is_no_verdict_but_no_healthy_layer_either():
    """Nothing in its settings or weights explains it: 5 of 47 published recipes have such a layer, and train well."""
    judge = Judge(SpectralCondition())
    assert not any(run(judge, *[FAR] * 4))
    assert judge.states["b"] == LayerState(NOT_JUDGED, "its size stands out, but no known cause explains it")
    assert judge.states["a"] == LayerState(HEALTHY)
    assert [names(verdicts) for verdicts in run(judge, {}, start=5)] == [[]]
    assert judge.states["b"] == LayerState(HEALTHY)
    explained = FAR | {"lr": {"b": 1.0}}
    assert [verdict.cause for verdict in run(judge, explained, start=6)[0]] == ["lr_too_large"]
    for chosen in ({"band": (1 / 16, 8)}, {"reference": "theory"}):
        assert SpectralCondition(**chosen).is_own
    assert names(run(Judge(WATCHFUL), FAR)[0]) == ["b"]


def test_a_verdict_ends_only_well_inside_the_band():
    judge = Judge(SpectralCondition(band=(1 / 8, 8), hysteresis=0.8))  # must come below 8 ** 0.8 = 5.3
    near, well = {"update_natural": {"b": 0.6}}, {"update_natural": {"b": 0.5}}
    seen = run(judge, FAR, near, near, FAR, well, near)
    assert [len(verdicts) for verdicts in seen] == [1, 1, 1, 1, 0, 0]
    assert [verdict.measurements for verdicts in seen for verdict in verdicts] == [1, 1, 1, 2]  # outside the band


def test_however_much_evidence_there_was_one_healthy_measurement_lifts_a_verdict():
    """After a hundred measurements far off one that is well inside lifts the verdict all the same."""
    judge = Judge(WATCHFUL)
    assert all(run(judge, *[FAR] * 100))
    assert run(judge, {}, start=101) == [()]


def test_an_episode_begins_once_and_ends_once():
    judge = Judge(WATCHFUL)
    began, ended = [], []
    for step, change in enumerate([NEAR] * 5 + [{}] * 2 + [FAR] * 4, 1):
        judge.judge(measured(step, **change))
        began.append(names(judge.began))
        ended.append(list(judge.ended))
    assert began == [[], [], ["b"], [], [], [], [], ["b"], [], [], []]
    assert ended == [[], [], [], [], [], ["b"], [], [], [], [], []]


def test_another_check_of_the_same_layer_is_no_new_episode():
    judge = Judge(WATCHFUL)
    run(judge, FAR)
    both = FAR | {"update_ratio": {"b": 4.0}}
    for verdicts in run(judge, *[both] * 4, start=4):
        assert names(verdicts) == ["b"]
        assert judge.began == ()


def test_the_worst_layer_comes_first():
    _, verdicts = judged([measured(s, update_natural={"a": 0.0005, "c": 60.0}) for s in (1, 2, 3)])
    assert names(verdicts) == ["c", "a"]


def test_embeddings_and_biases_are_no_part_of_the_balance():
    changed = {"update_natural": {"tok": 1e-6, "a.bias": 100.0, "b.bias": 1e-6}}
    assert not judged([measured(step, **changed) for step in range(1, 6)])[1]


@pytest.mark.parametrize("nan", [math.nan, math.inf])
def test_a_step_with_nan_counts_neither_way(nan):
    """It is another check that says that training diverges."""
    reasons = {"*/b": "NaN or inf in its values"}
    broken = {"update_natural": {"b": nan}, "reasons": reasons}
    judge = Judge(SpectralCondition(band=WATCHFUL.band, ignore=["diverged"]))
    assert not any(run(judge, NEAR, NEAR, broken))
    assert names(judge.judge(measured(4, **NEAR))) == ["b"]
    for step in range(5, 12):
        judge.judge(measured(step, **broken))
        assert judge.ended == ()
    assert names(judge.judge(measured(20, **NEAR))) == ["b"]
    assert judge.began == ()


def unheld(step, layer):
    gone = {key: nothing(layer) for key in ("update_natural", "update_ratio", "contribution", "lr", "drift_ratio")}
    return measured(step, reasons={f"update_natural/{layer}": "no optimizer updates it"}, **gone)


def test_a_layer_that_no_optimizer_holds_has_no_verdict():
    judge, verdicts = judged([unheld(step, "b") for step in range(1, 9)])
    assert verdicts == ()
    assert judge.ended == ()


def test_the_episode_of_a_layer_that_gets_frozen_ends():
    judge, _ = judged([measured(step, **FAR) for step in (1, 2, 3)])
    ended = []
    for step in range(4, 8):
        judge.judge(unheld(step, "b"))
        ended += judge.ended
    assert ended == ["b"]


def test_the_record_of_a_layer_that_is_used_now_and_then_is_kept():
    judge, _ = judged([measured(step, **NEAR) for step in (1, 2)])
    began = []
    for step in range(3, 20):
        given = measured(step, **NEAR) if step % 3 == 0 else unheld(step, "b")
        assert names(judge.judge(given)) == (["b"] if step % 3 == 0 else [])
        began += judge.began
        assert judge.ended == ()
    assert names(began) == ["b"], "and it warns once"


def test_an_update_uphill_is_not_a_dead_one():
    assert not judged([measured(step, contribution={"b": -0.01}) for step in range(1, 6)])[1]


def rising(step, b=1.0):
    return {"lr": dict.fromkeys(LAYERS, 1e-3 * step) | {"b": 1e-3 * step * b}}


def test_layers_are_compared_during_a_warm_up():
    """Learning rates that rise together change nothing in how layers compare."""
    judge = Judge(WATCHFUL)
    assert not any(run(judge, *[rising(step) for step in range(1, 20)]))
    assert names(judge.judge(measured(20, **rising(20), **FAR))) == ["b"]


def test_a_learning_rate_that_stands_out_is_named_while_all_of_them_rise():
    judge = Judge(WATCHFUL)
    assert [v.cause for v in judge.judge(measured(1, **rising(1, b=100.0), **FAR))] == ["lr_too_large"]


@pytest.mark.parametrize(
    ("only", "changed"),
    [
        (["update_natural"], {"update_natural": {"b": 10.0}}),
        (["update_natural"], {"update_natural": {"b": 0.0}}),
        (["update_ratio"], {"update_ratio": {"b": 4.0}}),
        (["weight_natural"], {"weight_natural": {"b": 40.0}}),
        (["contribution", "lr"], {"contribution": {"b": 0.0}}),
        (["lr"], {"lr": {"b": 1.0}}),
    ],
)
def test_it_works_with_what_was_measured(only, changed):
    _, verdicts = judged([measured(step, only=only, **changed) for step in (1, 2, 3)])
    assert names(verdicts) == ["b"]
    assert not judged([measured(step, only=only) for step in (1, 2, 3)])[1]


def test_judge_and_verdicts_can_be_pickled():
    judge, verdicts = judged([measured(step, **FAR) for step in (1, 2, 3)])
    assert pickle.loads(pickle.dumps(verdicts)) == verdicts
    assert pickle.loads(pickle.dumps(judge)).judge(measured(4, **FAR)) == judge.judge(measured(4, **FAR))


def test_a_verdict_as_a_row_and_as_a_line():
    verdict = Verdict("head", "update_natural", 0.1, (1e-3, 0.01), 50.0, 120, 7, "unknown", "no idea")
    row = verdict.to_row()
    assert (row["low"], row["high"]) == (1e-3, 0.01)
    assert set(row) == {
        *("layer", "quantity", "value", "low", "high", "ratio", "steps", "measurements", "cause", "sentence"),
        *("layers", "root", "consequences", "remedy"),
    }
    assert json.loads(json.dumps(row)) == row | {"layers": [], "consequences": []}
    line = str(verdict)
    assert "\n" not in line
    for part in ("head", "update_natural 0.1", "0.001 .. 0.01", "120 steps", "no idea"):
        assert part in line


def test_a_remedy_without_a_value_has_none_in_a_row():
    verdict = Verdict("b", "update_natural", 0.0, (0.0, 1.0), 0.0, 1, 1, "dead", "", remedy=Remedy("check", ("b",)))
    assert verdict.to_row()["remedy"] == {"action": "check", "layers": ("b",), "value": None, "spared": ()}


def test_limits_on_one_side():
    _, (dead,) = judged([measured(step, update_natural={"b": 0.0}) for step in (1, 2, 3)])
    assert (dead.band, dead.to_row()["low"], dead.to_row()["high"]) == ((0.0, math.inf), None, None)
    assert "update_natural 0, should be above 0, for 2 steps" in str(dead)
    _, (exploding,) = judged([measured(step, update_ratio={"b": 4.0}) for step in (1, 2, 3)])
    assert "update_ratio 4, should be below 1" in str(exploding)


def calls_to_judge(count):
    """Calls of functions that are made to judge so many layers."""
    layers = {f"l{i}": LayerInfo(f"l{i}", "operator", 64, 64 * (1 + i % 3), (64, 64)) for i in range(count)}
    lr = {name: 0.01 * (1 + i % 4) for i, name in enumerate(layers)}
    judge, measurement = Judge(WATCHFUL), measured(1, layers=layers, lr=lr)
    settings = set_by("Adam", layers=layers, lr=lr)
    with cProfile.Profile() as profile:
        judge.judge(measurement, settings)
    return pstats.Stats(profile).total_calls


def test_the_work_to_judge_grows_no_faster_than_the_layers():
    assert calls_to_judge(600) < 4.2 * calls_to_judge(150)


def test_weights_that_began_tiny_are_seen_before_the_first_step_makes_them_large():
    tiny = {"weight_natural": {"b": 1e-3}, "weight_fro": {"b": 8e-3}, "drift_ratio": {"b": 40.0}}
    (verdict,) = judged([measured(1, **tiny)])[1]
    assert (verdict.layer, verdict.cause) == ("b", "weights_too_small")
    assert judged([measured(2, **tiny)])[1] == (), "later it is what updates made of them"


def test_who_has_the_usual_rate_does_not_change_while_weights_grow():
    """Two layers of four at a hundred times the rate: large steps at first, then healthy ones of grown weights."""
    lr = {"a": 1.0, "b": 1.0}
    first = measured(1, lr=lr, update_ratio={"a": 5.0, "b": 5.0})
    later = [measured(step, lr=lr, update_ratio={"a": 0.06, "b": 0.06, "c": 1e-3, "head": 1e-3}) for step in (2, 4, 8)]
    settings = set_by(lr=lr)
    for many in range(4):
        roots = [verdict for verdict in judged([first, *later[:many]], settings=settings)[1] if verdict.is_root]
        assert {(verdict.layer, verdict.cause) for verdict in roots} >= {("a", "lr_too_large"), ("b", "lr_too_large")}
        assert not any(verdict.cause == "lr_too_small" for verdict in roots)
