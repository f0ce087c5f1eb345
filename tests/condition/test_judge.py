"""When a finding becomes a verdict, how it ends, and what never becomes one."""

from __future__ import annotations

import cProfile
import json
import math
import pickle
import pstats

import pytest
from synthetic import LAYERS, judged, measured, nothing

from spectral_monitor import LayerInfo
from spectral_monitor.condition import Judge, SpectralCondition, Verdict

FAST = {"update_natural": {"b": 10.0}}


def names(verdicts):
    return [verdict.layer for verdict in verdicts]


def run(judge, *changes, start=1):
    """Verdicts after each of several measurements."""
    return [judge.judge(measured(step, **change)) for step, change in enumerate(changes, start)]


def test_a_network_in_order_has_no_verdict():
    judge, verdicts = judged([measured(step) for step in range(1, 30)])
    assert verdicts == ()
    assert judge.began == ()


def test_a_verdict_needs_as_many_measurements_as_the_persistence_says():
    for persistence in (1, 3, 5):
        judge = Judge(SpectralCondition(persistence=persistence))
        seen = [bool(verdicts) for verdicts in run(judge, *[FAST] * 6)]
        assert seen == [False] * (persistence - 1) + [True] * (7 - persistence)


def test_measurements_outside_must_be_consecutive():
    judge = Judge(SpectralCondition())
    assert not any(run(judge, FAST, FAST, {}, FAST, FAST, {}, FAST, FAST))


def test_what_a_verdict_says():
    measurements = [measured(step, **FAST) for step in (10, 20, 30, 40)]
    _, (verdict,) = judged(measurements)
    assert (verdict.layer, verdict.quantity, verdict.value) == ("b", "update_natural", 10.0)
    assert verdict.ratio == pytest.approx(100)
    assert verdict.band == pytest.approx((0.1 / 8, 0.8))
    assert (verdict.steps, verdict.measurements) == (30, 4)
    assert "100 times its share" in verdict.sentence


def test_a_verdict_ends_only_well_inside_the_band():
    judge = Judge(SpectralCondition(band=(1 / 8, 8), hysteresis=0.8))  # must come below 8 ** 0.8 = 5.3
    near, well = {"update_natural": {"b": 0.6}}, {"update_natural": {"b": 0.5}}
    seen = run(judge, FAST, FAST, FAST, near, near, FAST, well, near)
    assert [len(verdicts) for verdicts in seen] == [0, 0, 1, 1, 1, 1, 0, 0]
    assert [verdict.measurements for verdicts in seen for verdict in verdicts] == [3, 3, 3, 4]  # outside the band


def test_an_episode_begins_once_and_ends_once():
    judge = Judge(SpectralCondition())
    began, ended = [], []
    for step, change in enumerate([FAST] * 5 + [{}] * 2 + [FAST] * 4, 1):
        judge.judge(measured(step, **change))
        began.append(names(judge.began))
        ended.append(list(judge.ended))
    assert began == [[], [], ["b"], [], [], [], [], [], [], ["b"], []]
    assert ended == [[], [], [], [], [], ["b"], [], [], [], [], []]


def test_another_check_of_the_same_layer_is_no_new_episode():
    judge = Judge(SpectralCondition())
    run(judge, *[FAST] * 3)
    both = FAST | {"update_ratio": {"b": 2.0}}
    for verdicts in run(judge, *[both] * 4, start=4):
        assert names(verdicts) == ["b"]
        assert judge.began == ()


def test_the_worst_layer_comes_first():
    _, verdicts = judged([measured(s, update_natural={"a": 0.005, "c": 20.0}) for s in (1, 2, 3)])
    assert names(verdicts) == ["c", "a"]


def test_embeddings_and_biases_are_no_part_of_the_balance():
    changed = {"update_natural": {"tok": 1e-6, "a.bias": 100.0, "b.bias": 1e-6}}
    assert not judged([measured(step, **changed) for step in range(1, 6)])[1]


@pytest.mark.parametrize("nan", [math.nan, math.inf])
def test_a_step_with_nan_counts_neither_way(nan):
    reasons = {"*/b": "NaN or inf in its values"}
    broken = measured(3, update_natural={"b": nan}, reasons=reasons)
    judge, verdicts = judged([measured(1, **FAST), measured(2, **FAST), broken])
    assert verdicts == ()
    assert names(judge.judge(measured(4, **FAST))) == ["b"]
    for step in range(5, 12):
        judge.judge(measured(step, update_natural={"b": nan}, reasons=reasons))
    assert judge.ended == ()
    assert names(judge.judge(measured(20, **FAST))) == ["b"]
    assert judge.began == ()


def frozen(step, layer):
    gone = {key: nothing(layer) for key in ("update_natural", "update_ratio", "contribution", "lr", "drift_ratio")}
    return measured(step, reasons={f"update_natural/{layer}": "no optimizer updates it"}, **gone)


def test_a_layer_frozen_on_purpose_is_in_order():
    judge, verdicts = judged([frozen(step, "b") for step in range(1, 9)])
    assert verdicts == ()
    assert judge.ended == ()


def test_the_episode_of_a_layer_that_gets_frozen_ends():
    judge, _ = judged([measured(step, **FAST) for step in (1, 2, 3)])
    ended = []
    for step in range(4, 8):
        judge.judge(frozen(step, "b"))
        ended += judge.ended
    assert ended == ["b"]


def test_a_layer_that_is_used_now_and_then_stays_named():
    judge, _ = judged([measured(step, **FAST) for step in (1, 2, 3)])
    for step in range(4, 20):
        judge.judge(measured(step, **FAST) if step % 3 == 0 else frozen(step, "b"))
        assert judge.ended == ()


def test_an_update_uphill_is_not_a_dead_one():
    assert not judged([measured(step, contribution={"b": -0.01}) for step in range(1, 6)])[1]


def test_a_warm_up_is_an_exception_while_it_lasts():
    def rising(step):
        return measured(step, lr=dict.fromkeys(LAYERS, 1e-3 * min(step, 6)), **FAST)

    judge = Judge(SpectralCondition())
    seen, waits = [], []
    for step in range(1, 10):
        seen.append(bool(judge.judge(rising(step))))
        waits.append(judge.waits)
    assert waits == ["", *["the learning rate is warming up"] * 5, "", "", ""]
    assert seen == [False] * 7 + [True] * 2  # the first measurement counts, for nobody knows then that it rises


def test_a_warm_up_hides_nothing_for_long():
    judge = Judge(SpectralCondition())
    for step in range(1, 21):
        verdicts = judge.judge(measured(step, lr=dict.fromkeys(LAYERS, 1e-3 * step), **FAST))
    assert names(verdicts) == ["b"]


def test_a_warm_up_is_no_excuse_for_a_learning_rate_that_stands_out():
    judge = Judge(SpectralCondition())
    for step in (1, 2, 3):
        lr = dict.fromkeys(LAYERS, 1e-3 * step) | {"b": 0.1 * step}
        verdicts = judge.judge(measured(step, lr=lr, **FAST))
    assert [verdict.cause for verdict in verdicts] == ["lr_too_large"]


def test_a_schedule_that_is_at_zero_for_all_is_in_order():
    zero = {"lr": dict.fromkeys(LAYERS, 0.0), "update_natural": dict.fromkeys(LAYERS, 0.0)}
    assert not judged([measured(step, contribution=dict.fromkeys(LAYERS, 0.0), **zero) for step in range(1, 9)])[1]


def test_start_up_begins_with_the_first_learning_rate():
    judge = Judge(SpectralCondition())
    for step in range(1, 41):
        lr = 1e-3 * max(step - 30, 0)
        assert judge.judge(measured(step, lr=dict.fromkeys(LAYERS, lr), **FAST)) == ()
    assert judge.waits == "the learning rate is warming up"


def born_at_zero(step, size, *, below=0.0):
    """A readout that began at zero, of the size it has now; what is below it gets next to no gradient."""
    below_it = dict.fromkeys(("tok", "a", "a.bias", "b", "b.bias", "c", "c.bias"), below)
    changed = {"weight_natural": {"head": size}, "update_natural": below_it | {"head": 0.1}, "contribution": below_it}
    changed |= {"drift_ratio": nothing("head"), "update_ratio": {"head": 1.0}}
    zero = "undefined: it divides by a norm that is zero"
    return measured(step, reasons={"drift_ratio/head": zero}, **changed)


def test_what_is_below_a_readout_that_began_at_zero_is_in_order_while_that_grows():
    measurements = [born_at_zero(1, 0.1)] + [born_at_zero(step, 0.1 * 1.2**step, below=1e-4) for step in range(2, 15)]
    judge, verdicts = judged(measurements)
    assert verdicts == ()
    assert judge.waits == "head began at zero and is still growing"
    for step in range(15, 20):  # it has grown, and still nothing arrives below
        verdicts = judge.judge(born_at_zero(step, 1.4, below=1e-4))
    assert names(verdicts) == ["head"]


def test_growing_from_zero_hides_nothing_for_ever():
    judge = Judge(SpectralCondition())
    seen = [judge.judge(born_at_zero(step, 0.1 * 1.06**step, below=1e-4)) for step in range(1, 35)]
    assert not any(seen[:30])
    assert names(seen[-1]) == ["head"]


def test_a_matrix_that_begins_to_grow_late_is_excused_while_it_does():
    """The readout began at zero too, so that no gradient arrived at first."""
    judge = Judge(SpectralCondition())
    reasons = {"drift_ratio/c": "undefined: it divides by a norm that is zero"}
    for step, size in enumerate((0.0, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5), 1):
        update = {"update_ratio": {"c": 1.0}, "update_natural": {"c": 0.1 if size else 0.0}}
        drift = {"drift_ratio": nothing("c")}
        assert judge.judge(measured(step, weight_natural={"c": size}, reasons=reasons, **update, **drift)) == ()


def test_a_layer_that_stays_at_zero_is_not_excused_for_ever():
    zeroed = {"weight_natural": {"b": 0.0}, "update_natural": {"b": 0.0}, "contribution": {"b": 0.0}}
    reasons = {"update_ratio/b": "undefined: it divides by a norm that is zero"}
    measurements = [measured(s, reasons=reasons, update_ratio=nothing("b"), **zeroed) for s in range(1, 21)]
    _, (verdict,) = judged(measurements)
    assert (verdict.layer, verdict.cause) == ("b", "dead_input")


def test_tied_weights_are_compared_with_nothing():
    changed = {"update_natural": {"head": 50.0}, "weight_natural": {"tok": 1e-4, "head": 30.0}}
    measurements = [measured(step, **changed) for step in range(1, 6)]
    assert set(names(judged(measurements)[1])) == {"head", "tok"}
    assert not judged(measurements, tied={"head": "tok"})[1]


def test_tied_weights_are_no_part_of_the_median():
    """a and head are tied: what is left in the middle is b, c."""
    changed = {"update_natural": {"a": 100.0, "head": 100.0, "b": 1.0, "c": 1.0}}
    assert not judged([measured(step, **changed) for step in range(1, 6)], tied={"head": "a"})[1]


def test_tied_weights_may_explode_once():
    changed = {"update_ratio": {"tok": 3.0, "head": 3.0}}
    _, verdicts = judged([measured(step, **changed) for step in range(1, 6)], tied={"head": "tok"})
    assert names(verdicts) == ["tok"]


@pytest.mark.parametrize(
    ("only", "changed"),
    [
        (["update_natural"], {"update_natural": {"b": 10.0}}),
        (["update_natural"], {"update_natural": {"b": 0.0}}),
        (["update_ratio"], {"update_ratio": {"b": 2.0}}),
        (["weight_natural"], {"weight_natural": {"b": 40.0}}),
        (["contribution", "lr"], {"contribution": {"b": 0.0}}),
    ],
)
def test_it_works_with_what_was_measured(only, changed):
    _, verdicts = judged([measured(step, only=only, **changed) for step in (1, 2, 3)])
    assert names(verdicts) == ["b"]
    assert not judged([measured(step, only=only) for step in (1, 2, 3)])[1]


def test_without_learning_rates_a_network_that_does_not_move_at_all_is_not_called_dead():
    still = {"update_natural": dict.fromkeys(LAYERS, 0.0)}
    assert not judged([measured(step, only=["update_natural"], **still) for step in range(1, 6)])[1]


def test_it_goes_on_where_another_left_off():
    steps = [FAST, FAST, FAST, {"update_natural": {"b": 0.6}}, {}, FAST, FAST, FAST]
    whole = Judge(SpectralCondition(), ["Adam"])
    expected = run(whole, *steps)
    for cut in range(len(steps)):
        first = Judge(SpectralCondition(), ["Adam"])
        run(first, *steps[:cut])
        second = Judge(SpectralCondition(), ["Adam"])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert run(second, *steps[cut:], start=cut + 1) == expected[cut:]


def test_start_up_goes_on_too():
    first, second = Judge(SpectralCondition()), Judge(SpectralCondition())
    first.judge(born_at_zero(1, 0.1))
    second.load_state_dict(first.state_dict())
    for step in range(2, 8):
        assert second.judge(born_at_zero(step, 0.1 * 1.2**step, below=1e-4)) == ()


def test_a_state_of_another_version_is_refused():
    judge = Judge(SpectralCondition())
    with pytest.raises(ValueError, match="version 99"):
        judge.load_state_dict(judge.state_dict() | {"version": 99})


def test_judge_and_verdicts_can_be_pickled():
    judge, verdicts = judged([measured(step, **FAST) for step in (1, 2, 3)])
    assert pickle.loads(pickle.dumps(verdicts)) == verdicts
    assert pickle.loads(pickle.dumps(judge)).judge(measured(4, **FAST)) == judge.judge(measured(4, **FAST))


def test_a_verdict_as_a_row_and_as_a_line():
    verdict = Verdict("head", "update_natural", 0.1, (1e-3, 0.01), 50.0, 120, 7, "unknown", "no idea")
    row = verdict.to_row()
    assert (row["low"], row["high"]) == (1e-3, 0.01)
    assert set(row) == {
        *("layer", "quantity", "value", "low", "high", "ratio", "steps", "measurements", "cause", "sentence")
    }
    assert json.loads(json.dumps(row)) == row
    line = str(verdict)
    assert "\n" not in line
    for part in ("head", "update_natural 0.1", "0.001 .. 0.01", "120 steps", "no idea"):
        assert part in line


def test_limits_on_one_side():
    _, (dead,) = judged([measured(step, update_natural={"b": 0.0}) for step in (1, 2, 3)])
    assert (dead.band, dead.to_row()["low"], dead.to_row()["high"]) == ((0.0, math.inf), None, None)
    assert "update_natural 0, should be above 0, for 2 steps" in str(dead)
    _, (exploding,) = judged([measured(step, update_ratio={"b": 2.0}) for step in (1, 2, 3)])
    assert "update_ratio 2, should be below 0.5" in str(exploding)


def calls_to_judge(count):
    """Calls of functions that are made to judge so many layers."""
    layers = {f"l{i}": LayerInfo(f"l{i}", "operator", 64, 64 * (1 + i % 3), (64, 64)) for i in range(count)}
    lr = {name: 0.01 * (1 + i % 4) for i, name in enumerate(layers)}
    judge = Judge(SpectralCondition(), ["Adam"])
    measurement = measured(1, layers=layers, lr=lr)
    with cProfile.Profile() as profile:
        judge.judge(measurement)
    return pstats.Stats(profile).total_calls


def test_the_work_to_judge_grows_no_faster_than_the_layers():
    assert calls_to_judge(600) < 4.2 * calls_to_judge(150)
