"""What is wrong with the network as a whole: it diverges, nothing trains, all steps are too large or too small."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from spectral_monitor import LayerInfo
from spectral_monitor.condition import NETWORK, Judge, SpectralCondition
from spectral_monitor.measurement import UNUSED
from tests.condition.synthetic import LAYERS, measured, nothing, set_by

EVERY = tuple(LAYERS)


def told(*changes, start=1, settings=None, **condition):
    """Causes of the network's roots after each measurement, one a step; ``settings``: for each, or for all."""
    judge = Judge(SpectralCondition(**condition))
    found = []
    for k, change in enumerate(changes):
        given = settings[k] if isinstance(settings, list) else settings
        verdicts = judge.judge(measured(start + k, **change), given)
        found.append({v.cause: v for v in verdicts if v.layer == NETWORK and v.is_root})
    return found


def every(value, *keys):
    return {key: dict.fromkeys(EVERY, value) for key in keys}


@pytest.mark.parametrize(
    "change",
    [
        {"weight_natural": {"a": math.inf}},
        {"update_fro": {"a": math.inf}},
        {"drift_ratio": nothing("a"), "reasons": {"drift_ratio/a": "NaN or inf in its values"}},
        {"weight_natural": {"a": 2e4}},
        {"feature_rms": {"a": 2e4}},
    ],
)
def test_divergence_is_said_at_once(change):
    (found,) = told(change, start=2)
    assert set(found) == {"diverged"}
    assert "divide every learning rate by 10" in found["diverged"].sentence
    assert (found["diverged"].remedy.action, found["diverged"].remedy.value) == ("scale_lr", 0.1)


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (20.0, "because they grow from layer to layer: initialize smaller weights"),
        (30.0, "normalize inputs, or initialize"),
    ],
)
def test_outputs_that_are_huge_before_the_first_step_are_not_laid_to_learning_rates(first, why):
    start = {"feature_rms": {"a": first, "b": 500.0, "head": 2e4}}
    judge, resumed = Judge(SpectralCondition()), Judge(SpectralCondition())
    (at_once,) = judge.judge(measured(1, **start))
    resumed.load_state_dict(json.loads(json.dumps(judge.state_dict())))
    later = [who.judge(measured(2, **every(math.inf, "weight_natural")))[0] for who in (judge, resumed)]
    assert {verdict.cause for verdict in (at_once, *later)} == {"diverged"}
    (sentence,) = {verdict.sentence for verdict in (at_once, *later)}
    assert sentence.startswith("the outputs of head have RMS 20000 before the first step")
    assert why in sentence
    assert at_once.remedy.action == "check"


@pytest.mark.parametrize(("ratio", "by"), [(3.0, 30), (1.4, 20), (0.1, 10), (math.nan, 10)])
def test_the_advice_after_a_divergence_is_of_the_first_step(ratio, by):
    """20 times its root, in one digit (that of 1.4 is 24, which is 2e1); by ten at least."""
    blown = every(math.inf, "weight_natural")
    found = told(every(ratio, "update_ratio"), blown | every(40.0, "update_ratio"), ignore=["exploding"])[-1]
    assert f"divide every learning rate by {by}" in found["diverged"].sentence
    assert found["diverged"].remedy.value == pytest.approx(1 / by)


def test_a_step_that_was_skipped_for_nan_gradients_is_no_divergence():
    """As a gradient scaler does; weights and updates are finite."""
    assert told({"contribution": nothing("a"), "reasons": {"contribution/a": "NaN or inf in its gradient"}}) == [{}]
    assert told({"weight_natural": {"a.bias": math.inf}}) == [{}], "of a bias that norm is not the weights'"


def test_large_outputs_are_a_divergence_only_from_ten_thousand_on():
    assert "diverged" not in told({"feature_rms": {"a": 9e3}})[0]


STILL = every(0.0, "update_natural", "update_ratio", "contribution")
CLOSED = (
    "every gradient is 0: the loss does not change with the outputs, as where a ReLU or a clamp after them is closed "
    "for all samples"
)


@pytest.mark.parametrize(
    ("change", "settings", "why"),
    [
        ({"lr": dict.fromkeys(EVERY, 0.0)}, None, "every learning rate is 0"),
        ({"lr": nothing(*EVERY)}, None, "no optimizer holds its parameters"),
        ({}, set_by("SGD", frozen=True), "every layer is frozen"),
        ({}, None, CLOSED),
        ({"contribution": {}}, None, "every update is 0, NaN or skipped"),
        (
            dict.fromkeys(("update_fro", "update_natural"), nothing(*EVERY))
            | {"reasons": {f"update_fro/{name}": UNUSED for name in EVERY}},
            None,
            "no gradient arrives: the loss does not depend on any of them, or outputs are detached",
        ),
    ],
)
def test_that_nothing_trains_is_said_at_the_second_measurement_and_why(change, settings, why):
    first, second = told(STILL | change, STILL | change, settings=settings)
    assert first == {}, "once may be a schedule that begins at 0, or a skipped step"
    assert set(second) == {"nothing_trains"}
    assert second["nothing_trains"].sentence == f"no parameter moves: {why}"


def test_a_frozen_network_is_silent_where_something_else_is_trained():
    assert told(*[STILL] * 4, settings=set_by("SGD", frozen=True, elsewhere=True)) == [{}] * 4


def test_updates_that_are_all_nan_are_none():
    gone = {key: nothing(*EVERY) for key in STILL}
    assert [set(found) for found in told(gone, gone)] == [set(), {"nothing_trains"}]


def test_where_only_biases_train_something_does():
    some = {"update_natural": dict.fromkeys(EVERY, 0.0) | {"a.bias": 0.01}}
    assert not any("nothing_trains" in found for found in told(*[some] * 4))


def test_one_step_at_zero_before_a_warm_up_is_forgotten():
    assert told(STILL | {"lr": dict.fromkeys(EVERY, 0.0)}, *[{}] * 3, STILL)[-1] == {}


@pytest.mark.parametrize("step", [4, 100])
def test_steps_are_too_large_where_weights_have_moved_more_than_the_root_of_their_number(step):
    usual = 1.8 * math.sqrt(step)
    assert told(every(0.99 * usual, "drift_ratio"), start=step) == [{}]
    (found,) = told(every(2.1 * usual, "drift_ratio"), start=step)
    assert set(found) == {"rates_too_large"}
    assert found["rates_too_large"].ratio == pytest.approx(2.1)
    apart = [every(1.15 * 1.8 * math.sqrt(step + k), "drift_ratio") for k in range(3)]
    slowly = told(*apart, start=step)  # log(1.15) / log(1.25) = 0.63 each
    assert ["rates_too_large" in found for found in slowly] == [False, True, True]


@pytest.mark.parametrize(("ratio", "by"), [(0.6, 20), (3.0, 30), (0.04, 4), (0.01, 3)])
def test_the_advice_follows_the_root_of_the_median_step(ratio, by):
    """20 times it; by three at least."""
    (found,) = told(every(9.0, "drift_ratio") | every(ratio, "update_ratio"), ignore=["exploding"])
    advice = f"divide every learning rate but those of embeddings by about {by}"
    assert found["rates_too_large"].sentence.endswith(advice + " or more" * (ratio > 1))
    assert found["rates_too_large"].remedy.value == pytest.approx(1 / by)


@pytest.mark.parametrize(
    ("change", "spared"),
    [
        ({}, ("tok",)),
        ({"update_natural": {"tok": 0.5}}, ("tok",)),
        ({"update_natural": {"tok": 0.6}}, ()),
        ({"update_natural": {"tok": 0.05}, "peak": 0.2}, ()),
        ({"update_natural": {"tok": 0.0}}, ()),
        ({"update_natural": nothing("tok")}, ()),
        ({"lr_multiplier": dict.fromkeys(EVERY, 2.0)}, ()),
    ],
    ids=["usual", "at most", "too large as well", "too large at its peak", "still", "unknown", "corrected"],
)
def test_embeddings_keep_their_rates_unless_they_take_too_large_steps_themselves(change, spared):
    peak = change.pop("peak", 0.01)
    far = every(9.0, "drift_ratio") | every(0.6, "update_ratio") | change
    (found,) = told(far, settings=set_by(peak=peak), ignore=["exploding"])
    verdict = found["rates_too_large"]
    assert (verdict.remedy.layers, verdict.remedy.spared) == ((), spared)
    assert ("every learning rate but those of embeddings by" in verdict.sentence) is bool(spared)


def test_under_a_correction_it_is_the_size_that_is_to_change():
    multiplied = {"lr_multiplier": dict.fromkeys(EVERY, 2.0)}
    far = every(9.0, "drift_ratio") | every(0.6, "update_ratio") | multiplied
    (found,) = told(far, ignore=["exploding"])
    text = 'divide the size of the correction, or every learning rate if that is "lr", by about 20'
    assert text in found["rates_too_large"].sentence
    (found,) = told(every(math.inf, "weight_natural") | multiplied)
    assert text.replace("about 20", "10") in found["diverged"].sentence


def test_the_largest_step_so_far_counts_and_nan_does_not():
    large, small = every(3.0, "update_ratio"), every(0.1, "update_ratio")
    gone = {"update_ratio": nothing(*EVERY)}
    found = told(large, gone, small | every(9.0, "drift_ratio"), ignore=["exploding"])[-1]
    assert "by about 30" in found["rates_too_large"].sentence


def small(size):
    """Updates of this size, relative and natural."""
    return every(size, "update_ratio", "update_natural")


def test_steps_are_too_small_where_neither_relative_nor_natural_ones_are_large():
    """The root of the fastest relative and the median natural one; 0.0065 is the least."""
    assert not any(told(*[small(0.00651)] * 20))
    found = told(*[small(0.0065 / 1.5)] * 20, settings=set_by("AdamW"))
    assert [set(some) for some in found] == [set()] * 15 + [{"rates_too_small"}] * 5, "from step 16 on"
    assert found[-1]["rates_too_small"].value == pytest.approx(0.0065 / 1.5)
    assert "multiply every learning rate by about 10" in found[-1]["rates_too_small"].sentence
    assert not any(told(*[every(0.001, "update_natural") | every(0.5, "update_ratio")] * 20))


def test_how_large_steps_were_before_counts():
    assert not any(told(small(0.1), *[small(1e-4)] * 20)), "a schedule that has come down"


def warm_up(steps, peak=0.01, initial=True, first=0):
    """Settings of a LambdaLR that rises to its peak in so many steps; updates are in proportion to the rate."""
    rates = [peak * min(1.0, (t + 1) / steps) for t in range(first, first + 40)]
    settings = [set_by("SGD", lr=dict.fromkeys(EVERY, lr), peak=peak if initial else lr) for lr in rates]
    return [small(2 * lr) | {"lr": dict.fromkeys(EVERY, lr)} for lr in rates], settings


def test_a_warm_up_is_projected_to_its_peak():
    """A rate of 0.01 makes steps of 0.02; after 200 of 1000 steps of warm-up they are 0.004, and rise by 0.5 %."""
    changes, settings = warm_up(1000, first=200)
    assert not any(told(*changes, start=200, settings=settings))
    without = [{name: replace(of, peak=of.lr) for name, of in some.items()} for some in settings]
    assert set(told(*changes, start=200, settings=without)[-1]) == {"rates_too_small"}
    changes, settings = warm_up(1000, peak=1e-4)
    assert not any(told(*changes, settings=settings)), "while it rises nothing is said"
    changes, settings = warm_up(20, peak=1e-4)
    found = told(*changes, settings=settings)
    assert set(found[-1]) == {"rates_too_small"}
    assert found[-1]["rates_too_small"].value == pytest.approx(2e-4)


def test_without_a_known_peak_the_rate_of_now_is_one():
    changes, settings = warm_up(20, initial=False)
    assert not any(told(*changes, settings=settings))


def test_weights_that_were_trained_before_may_be_tuned_slowly():
    """Their stable rank tells: natural norms are nearly as large as those of one direction."""
    norms = {name: 7.0 * math.sqrt(info.fan_in / info.fan_out) for name, info in LAYERS.items()}
    assert not any(told(*[small(1e-4) | {"weight_natural": norms}] * 20))


def test_layers_whose_steps_are_not_known_are_not_said_to_be_slow():
    unknown = {"update_natural": nothing(*(name for name in EVERY if not name.endswith("bias")))}
    assert not any(told(*[every(1e-4, "update_ratio") | unknown] * 30))


def all_weights(gain, rms=None):
    """The first measurement of weights that multiply the size of independent inputs by this; outputs as large."""
    dense = ("a", "b", "c", "head")
    sizes = {"feature_rms": dict.fromkeys(dense, gain if rms is None else rms)}
    return sizes | {"weight_fro": {name: gain * math.sqrt(LAYERS[name].fan_out) for name in dense}}


def test_weights_that_all_began_too_large():
    """Usual ones multiply by 0.1 to 1.6. Beyond three times that they are told at once, and later too."""
    found = told(all_weights(7.0), *[all_weights(2.0)] * 3)
    assert [set(some) for some in found] == [{"weights_too_large"}] * 4
    assert "so large that they multiply features by 7 or more" in found[0]["weights_too_large"].sentence
    assert "divide initial weights by about 12" in found[0]["weights_too_large"].sentence  # 7 / 0.6
    assert found[0]["weights_too_large"].remedy.value == pytest.approx(0.6 / 7)
    assert told(all_weights(4.7)) == [{}]


def test_weights_that_are_divided_where_they_are_used():
    """As with an equalized learning rate. Outputs show it or, where none is known, entries, here of size 1 or 2."""
    unknown = {"feature_rms": nothing(*LAYERS)}
    assert [set(told(all_weights(gain) | unknown)[0]) for gain in (8.0, 16.0)] == [set(), {"weights_too_large"}]
    for rms, causes in ((1.9, set()), (2.1, {"weights_too_large"})):
        assert set(told(all_weights(8.0, rms))[0]) == causes


@pytest.mark.parametrize(
    "recurrent", [("weight_ih_l0", "weight_hh_l0_reverse", "weight_hh_l1"), ("weight_ih", "weight_hh")]
)
def test_recurrent_layers_do_not_divide_their_weights(recurrent):
    """Their outputs are not seen, and entries may be of size 1."""
    layers = {name: replace(LAYERS["a"], name=name) for name in (*(f"rnn.{name}" for name in recurrent), "rnn.weight")}
    large = {"weight_fro": dict.fromkeys(layers, 8.0 * math.sqrt(LAYERS["a"].fan_out))}
    assert set(told({"layers": layers} | large)[0]) == {"weights_too_large"}
    few = {name: layers[name] for name in ("rnn.weight", *list(layers)[:1])}
    assert not any(told({"layers": few} | large)), "no more than half of them"


def test_whether_weights_are_divided_is_decided_at_the_first_measurement():
    """Outputs grow later."""
    assert not any(told(all_weights(8.0, 1.0), *[all_weights(8.0, 9.0)] * 3))


def features(**sizes):
    return {"feature_rms": dict.fromkeys("abc", 1.0) | {"head": 1.0} | sizes}


def test_inputs_that_are_too_large_are_seen_in_the_first_outputs():
    (found,) = told(features(a=250.0, b=200.0))
    assert set(found) == {"input_scale"}
    assert "the outputs of a had RMS 250 when first measured" in found["input_scale"].sentence
    assert told(features(a=24.0)) == [{}]


def test_large_outputs_of_large_weights_or_biases_are_not_the_inputs_fault():
    large = features(a=250.0)
    assert "input_scale" not in told(large | {"weight_fro": {"a": 80.0}})[0]
    assert "input_scale" not in told(large | {"weight_natural": {"a.bias": 200.0}})[0]
    assert "input_scale" not in told(large | {"weight_natural": {"a.bias": 15.0}})[0], "half of what is too large"
    assert "input_scale" in told(large | {"weight_natural": {"a.bias": 12.0}})[0]


def test_only_the_first_outputs_tell_of_inputs():
    assert not any(told(features(), *[features(a=250.0)] * 5)), "later, steps are to blame"


def test_where_the_start_was_not_measured_the_first_layer_tells_of_inputs_and_nothing_has_grown():
    late = told(*[features(a=250.0)] * 5, start=50)
    assert {cause for found in late for cause in found} == {"input_scale"}
    assert not any(told(*[features(b=250.0)] * 5, start=50)), "steps may be to blame, or inputs"
    grown = told(features(b=20.0), *[features(b=250.0)] * 5, start=50)
    assert {cause for found in grown for cause in found} == {"rates_too_large"}
    assert not any(told(*[features(a=1e-6)] * 5, start=50)), "that they began so is not known"


def test_hidden_outputs_that_have_grown_show_steps_that_are_too_large():
    """Fifty times the usual; twice that is evidence enough at once. Logits may be of any size."""
    _, found = told(features(), features(b=101.0), start=8)
    assert set(found) == {"rates_too_large"}
    assert "the outputs of b have grown to RMS 100 by step 9" in found["rates_too_large"].sentence
    assert not any(told(features(), *[features(b=49.0)] * 9, start=8))
    assert not any(told(features(), *[features(head=500.0)] * 9, start=8))
    assert not any("rates_too_large" in found for found in told(*[features(b=101.0)] * 8))


def test_narrow_layers_take_smaller_steps_at_the_rates_that_people_use():
    """With 8 inputs a quarter of what is healthy with 32 and more."""
    narrow = {name: replace(info, fan_in=min(info.fan_in, 8)) for name, info in LAYERS.items()}
    judge = {width: Judge(SpectralCondition()) for width in ("wide", "narrow")}
    for step in range(1, 20):
        sizes = small(0.0065 / 2)
        wide = judge["wide"].judge(measured(step, **sizes))
        assert not judge["narrow"].judge(measured(step, layers=narrow, **sizes))
    assert [verdict.cause for verdict in wide] == ["rates_too_small"]


@pytest.mark.parametrize(("inputs", "slow"), [(24, 0.0065 * 24 / 32), (31, 0.0065 * 31 / 32), (33, 0.0065)])
def test_steps_may_be_as_much_smaller_as_layers_have_fewer_inputs_than_32(inputs, slow):
    layers = {name: replace(info, fan_in=inputs) for name, info in LAYERS.items()}
    judge = {factor: Judge(SpectralCondition()) for factor in (0.99, 1.01)}
    for step in range(1, 60):
        found = {f: one.judge(measured(step, layers=layers, **small(f * slow))) for f, one in judge.items()}
    assert [verdict.cause for verdict in found[0.99]] == ["rates_too_small"]
    assert not found[1.01]


def test_vanishing_outputs_are_the_weights_fault():
    small_weights = {"weight_fro": {name: 0.05 * math.sqrt(info.fan_out) for name, info in LAYERS.items()}}
    small_weights["weight_natural"] = dict.fromkeys("abc", 0.1) | {"head": 0.2}
    (found,) = told(features(a=1e-2, b=1e-4, head=1e-6) | small_weights)
    assert set(found) == {"weights_too_small"}
    assert "multiply initial weights by about 12" in found["weights_too_small"].sentence  # 0.6 / 0.05
    assert found["weights_too_small"].remedy.value == pytest.approx(12)
    assert told(features(head=1.1e-4)) == [{}]


def test_outputs_of_exactly_nothing_are_no_small_outputs():
    """A branch whose gate begins at zero; weights of zero are known as such, and others are another matter."""
    assert told(*[features(b=0.0)] * 3) == [{}] * 3


def test_gradients_used_again_are_said_at_once():
    (found,) = told({"summary": {"stale_gradient": 1.0}})
    assert set(found) == {"stale_gradients"}


@pytest.mark.parametrize(("kind", "most"), [("AdamW", 100), ("SGD", 10), ("Adagrad", 10)])
def test_of_rates_far_too_small_no_factor_is_claimed(kind, most):
    """Under optimizers whose updates go with gradients these grow once features have."""
    found = told(*[every(1e-7, "update_ratio", "update_natural")] * 40, settings=set_by(kind))
    verdict = found[-1]["rates_too_small"]
    assert f"multiply every learning rate by {most} or more" in verdict.sentence
    assert verdict.remedy.value == most


def test_without_the_size_of_weights_no_factor_is_named():
    nothing = {"weight_natural": dict.fromkeys(LAYERS, math.nan), "weight_fro": dict.fromkeys(LAYERS, math.nan)}
    (found,) = told(features(a=1e-2, b=1e-4, head=1e-6) | nothing)
    verdict = found["weights_too_small"]
    assert "nan" not in verdict.sentence
    assert verdict.remedy.action == "check"


def adam(share, start, change=None, **fields):
    """Updates whose entries have this part of the learning rate."""
    sizes = {name: share * 0.01 * math.sqrt(info.fan_out * info.fan_in) for name, info in LAYERS.items()}
    change = {"update_fro": sizes} | (change or {})
    return told(*[change] * 3, start=start, settings=set_by(**({"optimizer": "AdamW", "eps": 1e-4} | fields)))


def test_an_eps_that_is_larger_than_gradients_is_seen_in_the_first_steps():
    assert not any(adam(0.06, 1))
    first, second, _ = adam(0.03, 1)  # log(0.05 / 0.03) / log(2) = 0.74
    assert (first, set(second)) == ({}, {"eps"})
    assert "eps 0.0001 is larger than the gradients; use 1e-8" in second["eps"].sentence
    assert (second["eps"].remedy.action, second["eps"].remedy.value) == ("set_eps", 1e-8)
    assert not any(adam(0.03, 9)), "later on noise makes updates as small"


def test_gradients_below_eps_make_half_of_the_usual_steps_a_fault():
    """A contribution of 1e-10 by an update of size 1 means entries of some 1e-12, far below eps."""
    below = every(1e-10, "contribution") | every(1e-3, "drift_ratio")
    assert not any(adam(0.16, 1, below, eps=1e-8))
    assert "gradients are smaller than eps 1e-08" in adam(0.1, 1, below, eps=1e-8)[-1]["eps"].sentence
    assert not any(adam(0.1, 1, every(1e-3, "drift_ratio"), eps=1e-8)), "gradients of ordinary size"


def test_small_weights_explain_gradients_below_eps():
    small = every(1e-10, "contribution") | every(1e-3, "drift_ratio") | every(0.4, "weight_fro")
    verdict = adam(0.1, 1, small, eps=1e-8)[-1]["weights_too_small"]
    assert verdict.cause == "weights_too_small"
    assert "gradients are smaller than eps 1e-08, because they pass through small weights" in verdict.sentence
    assert set(adam(0.03, 1, small, eps=1e-4)[-1]) == {"eps"}, "a larger eps than the default is to blame itself"


@pytest.mark.parametrize(("factor", "said"), [(1e-6, True), (0.5, False), (math.nan, False)])
def test_clipping_that_leaves_gradients_below_eps_is_named(factor, said):
    change = every(1e-3, "drift_ratio") | {"summary": {"clip_factor": factor}}
    found = adam(0.03, 1, change, eps=1e-8)[-1]
    assert set(found) == ({"eps"} if said else set())
    if said:
        assert found["eps"].sentence.endswith(
            "clipping makes gradients 1e+06 times smaller, and eps 1e-08 is larger than what is left: clip less"
        )
        assert found["eps"].remedy.action == "check", "a smaller eps would only hide it"


@pytest.mark.parametrize(("factor", "said"), [(1e-3, True), (0.9, False), (math.nan, False)])
def test_clipping_is_named_beside_slow_steps_under_sgd_where_it_takes_most_of_gradients(factor, said):
    slow = every(1e-4, "update_ratio", "update_natural", "drift_ratio") | {"summary": {"clip_factor": factor}}
    found = told(*[slow] * 16, settings=set_by("SGD"))[-1]
    assert ("or clip gradients less: clipping makes them 1000 times" in found["rates_too_small"].sentence) == said


@pytest.mark.parametrize(("gain", "said"), [(1.0, True), (1e-2, True), (1e-5, False), (0.0, True)])
def test_gradients_that_gains_next_to_zero_hold_back_are_no_matter_of_eps(gain, said):
    small = every(1e-12, "contribution") | every(1e-3, "drift_ratio")
    layers = LAYERS | {"b.scale": LayerInfo("b.scale", "vector", 1, 1, (256,))}
    gains = {"weight_natural": {"b.scale": gain, "b.bias": 1e-5}}
    found = adam(0.03, 1, small | gains | {"layers": layers}, eps=1e-8, layers=layers)
    assert ("eps" in found[-1]) == said


@pytest.mark.parametrize("optimizer", ["SGD", "Lion", "Adafactor", "RMSprop"])
def test_of_other_optimizers_neither_is_said(optimizer):
    assert not any(adam(0.03, 1, optimizer=optimizer))
    assert not any(adam(0.99, 32, optimizer=optimizer))


@pytest.mark.parametrize(
    ("momentum", "wrong"), [(0.9, False), (0.99, False), (0.995, True), (0.999, True), (1.0, False)]
)
def test_momentum_that_lasts_too_long_is_said_at_once(momentum, wrong):
    (found,) = told({}, settings=set_by("SGD", momentum=momentum))
    assert set(found) == ({"momentum"} if wrong else set())
    if momentum == 0.999:
        assert "averages gradients over about 1000 steps" in found["momentum"].sentence
        assert "if the learning rate was chosen with 0.999, multiply it by about 100 too" in found["momentum"].sentence
        assert (found["momentum"].remedy.action, found["momentum"].remedy.value) == ("set_momentum", 0.9)
        assert (found["momentum"].quantity, found["momentum"].band) == ("", (0.0, math.inf)), "yes or no is no number"
        assert math.isnan(found["momentum"].value)
        assert math.isnan(found["momentum"].ratio)


def test_outputs_that_grow_are_those_of_steps_that_are_too_large():
    def grown(size, start, layer="b"):
        change = {"feature_rms": dict.fromkeys(LAYERS, 1.0) | {layer: size}}
        return told({"feature_rms": dict.fromkeys(LAYERS, 1.0)}, change, start=start)[-1]

    found = grown(101.0, 16)  # log(101 / 50) / log(2) = 1.01
    assert set(found) == {"rates_too_large"}
    assert "the outputs of b have grown to RMS 100" in found["rates_too_large"].sentence
    assert grown(49.0, 16) == {}
    assert grown(101.0, 1) == {}, "in the first steps it is how they began"


@pytest.mark.parametrize("size", [0.0, 0.5, 1.0])
def test_outputs_that_have_come_down_are_no_fault_any_more(size):
    judge, began = Judge(SpectralCondition()), []
    usual = every(1.0, "feature_rms")
    large = {"feature_rms": {"b": 101.0}}
    changes = {
        15: usual,
        16: large,
        17: every(size, "feature_rms"),
        31: large,
        32: large,
        33: usual,
        63: large,
        64: large,
    }
    for step, change in changes.items():
        judge.judge(measured(step, **change))
        began += [(step, verdict.cause) for verdict in judge.began]
        state = json.loads(json.dumps(judge.state_dict()))
        judge = Judge(SpectralCondition())
        judge.load_state_dict(state)
    again = [(step, "rates_too_large") for step in (16, 32, 64)]
    assert began == again, "they are told again when training has become twice as long"


def test_inputs_that_are_too_large_stay_the_root_and_are_not_said_to_have_grown():
    large = {"feature_rms": dict.fromkeys(LAYERS, 1.0) | {"a": 400.0}}
    found = told(*[large] * 12, start=1)
    assert [set(some) for some in found] == [{"input_scale"}] * 12


def edges(*values):
    return [{"summary": {"edge": value, "critical_lr": math.nan}} for value in values]


def test_steps_whose_median_edge_is_above_two_are_too_long():
    found = told(*edges(*[3.5] * 8))
    assert ["global_lr_too_large" in some for some in found] == [False] * 4 + [True] * 4, "of five at least"
    verdict = found[-1]["global_lr_too_large"]
    assert (verdict.quantity, verdict.value, verdict.band) == ("edge", 3.5, (0.0, 2.0))
    assert "divide every learning rate by about 3.5 (0.01 -> 0.0029)" in verdict.sentence
    assert (verdict.remedy.action, verdict.remedy.value) == ("scale_lr", pytest.approx(1 / 3.5))


def test_steps_that_are_too_long_for_their_gradient_but_lower_the_loss_are_no_fault():
    """As where gradients are those of a straight-through estimator."""
    falling = [{"summary": {"edge": 3.5, "loss": 1.0 / step}} for step in range(1, 13)]
    assert not any(told(*falling))
    stuck = [{"summary": {"edge": 3.5, "loss": (1.0, 1.3, 0.9)[step % 3]}} for step in range(12)]
    assert told(*stuck)[-1]
    assert not told(*stuck, *falling)[-1], "the verdict is lifted"


@pytest.mark.parametrize(
    ("losses", "falls"),
    [
        ((1.0, 0.5, 9.0, 0.4, 0.3), True),
        ((1.0, 0.9, 0.2, 0.4, 0.3), True),
        ((1.0, 0.35, 1.0, 0.3, 0.4), False),
        ((1.0, 0.9, 0.5, 0.95, 0.4), False),
        ((1.0, 0.5, 0.9, 0.5, 0.4), False),
    ],
)
def test_a_loss_falls_if_the_last_two_are_below_the_first_two(losses, falls):
    (*_, last) = told(*[{"summary": {"edge": 3.5, "loss": loss}} for loss in losses])
    assert ("global_lr_too_large" in last) != falls


def test_single_long_steps_and_an_edge_of_two_are_no_fault():
    assert not any(told(*edges(*[0.2, 9.0, 0.3, 9.0, 0.1] * 6)))
    assert not any(told(*edges(*[1.95, 2.02] * 20))), "where full batches make the rate settle"
    assert not any(told(*edges(*[-3.0] * 20)))


def test_the_verdict_stands_while_the_edge_is_not_known_and_is_lifted_when_it_is_small():
    found = told(*edges(*[3.5] * 6, *[math.nan] * 5, *[0.5] * 8))
    states = ["global_lr_too_large" in some for some in found]
    assert states[5:11] == [True] * 6
    assert not states[-1]


def test_the_edges_are_part_of_the_state():
    one, other = Judge(SpectralCondition()), Judge(SpectralCondition())
    for step, change in enumerate(edges(*[3.5] * 4), 1):
        one.judge(measured(step, **change))
    other.load_state_dict(one.state_dict())
    verdicts = other.judge(measured(5, **edges(3.5)[0]))
    assert [verdict.cause for verdict in verdicts] == ["global_lr_too_large"]
