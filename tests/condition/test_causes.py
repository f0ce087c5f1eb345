"""Causes of one layer are told from the numbers that give them away, and from their neighbours."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import replace

import pytest

from spectral_monitor.condition import CAUSES
from spectral_monitor.condition.causes import NO_CAUSE, layers, losses, network, outputs, silent
from spectral_monitor.condition.verdict import Remedy
from tests.condition.synthetic import LAYERS, heavy, judged, measured, nothing, only_verdict, set_by, verdicts_on

WIDE = {
    "a": replace(LAYERS["a"], fan_in=64, fan_out=1024, shape=(1024, 64)),
    "b": replace(LAYERS["b"], fan_in=1024, fan_out=1024, shape=(1024, 1024)),
    "c": replace(LAYERS["c"], fan_in=1024, fan_out=1024, shape=(1024, 1024)),
    "head": replace(LAYERS["head"], fan_in=1024, fan_out=10, shape=(10, 1024)),
}
ADAM, SGD = set_by("AdamW"), set_by("SGD")


def test_learning_rate_too_large():
    verdict = only_verdict(update_natural={"b": 9.0}, lr={"b": 1.0}, settings=set_by(lr={"b": 1.0}))
    assert (verdict.layer, verdict.cause) == ("b", "lr_too_large")
    assert verdict.sentence == "its learning rate is 1, that of the other layers 0.01: use 0.01"
    assert (verdict.remedy.action, verdict.remedy.layers, verdict.remedy.value) == (
        "set_lr",
        ("b",),
        pytest.approx(0.01),
    )


def test_learning_rate_too_small():
    verdict = only_verdict(update_natural={"c": 0.001}, lr={"c": 0.0001})
    assert (verdict.layer, verdict.cause) == ("c", "lr_too_small")
    assert verdict.sentence == "its learning rate is 0.0001, that of the other layers 0.01: use 0.01"


@pytest.mark.parametrize(("factor", "named"), [(6.5, False), (10.0, False), (14.1, True), (100.0, True)])
def test_a_learning_rate_by_itself_is_evidence_beyond_seven_times_the_others(factor, named):
    """log(10 / 7) / log(2) = 0.5 of evidence at each measurement, log(14.1 / 7) / log(2) = 1.01."""
    changed = {"lr": {"b": 0.01 * factor}}
    assert bool(verdicts_on(1, **changed)) is named
    assert bool(verdicts_on(2, **changed)) is (factor > 7)


def test_remedies_are_at_the_peak_of_the_schedule():
    """At a tenth of the warm-up rates are a tenth; what is written in the optimizer's settings is the peak."""
    lr = dict.fromkeys(LAYERS, 0.001) | {"b": 0.1}
    settings = set_by(lr=lr, peak=0.01) | {"b": replace(ADAM["b"], lr=0.1, peak=1.0)}
    verdict = only_verdict(lr=lr, settings=settings, update_natural={"b": 10.0})
    assert verdict.sentence == "its learning rate is 1, that of the other layers 0.01: use 0.01"


def told_of_rate(factor, size, **changed):
    """What is said of b, whose learning rate is so many times the others' 0.01, and its update so many times theirs."""
    lr = dict.fromkeys(LAYERS, 0.01) | {"b": 0.01 * factor}
    updates = dict.fromkeys(LAYERS, 0.1) | {"b": 0.1 * size}
    return only_verdict(lr=lr, settings=set_by(lr=lr), update_natural=updates, **changed)


@pytest.mark.parametrize(
    ("others", "own", "fro", "both"),
    [
        (0.0049, 2.0, 8.0, True),
        (0.0051, 1.9, 8.0, False),  # the others move
        (0.0049, 2.1, 8.0, False),  # further above a usual pace than the others are below
        (1.9e-4, 0.09, 2.0, True),  # a network that was trained before takes smaller steps
        (2.1e-4, 0.09, 2.0, False),
        (1e-5, 0.11, 2.0, False),
        (math.nan, 0.09, 8.0, False),
        (1e-5, math.nan, 8.0, False),
    ],
)
def test_where_the_others_hardly_move_either_rate_may_be_wrong(others, own, fro, both):
    """Each layer's relative update and its natural norm are the same number, which is then its pace."""
    pace = dict.fromkeys(LAYERS, others) | {"b": own}
    changed = {"update_ratio": pace, "weight_fro": dict.fromkeys(LAYERS, fro)}
    if own > 0 < others:
        changed["update_natural"] = pace
    lr = dict.fromkeys(LAYERS, 0.01) | {"b": 10.0}
    verdict = only_verdict(lr=lr, settings=set_by(lr=lr), **({"update_natural": {"b": 100.0}} | changed))
    assert verdict.sentence == "its learning rate is 10, that of the other layers 0.01" + (
        ", at which they hardly move: use one of the two for all layers" if both else ": use 0.01"
    )
    assert verdict.remedy == (None if both else Remedy("set_lr", ("b",), 0.01))


def test_a_small_matrix_at_a_usual_pace_is_not_blamed_for_the_others():
    """The first steps are a large part of weights that begin at 0.02, as in a GPT, of which the body is too slow."""
    pace = {
        "update_ratio": dict.fromkeys(LAYERS, 0.0075) | {"head": 0.6},
        "update_natural": dict.fromkeys(LAYERS, 0.0026) | {"head": 0.2},
    }
    lr = dict.fromkeys(LAYERS, 0.01) | {"head": 0.3}
    assert "hardly move" in only_verdict(lr=lr, settings=set_by(lr=lr), **pace).sentence
    fast = {key: {name: 30 * value for name, value in values.items()} for key, values in pace.items()}
    assert only_verdict(lr=lr, settings=set_by(lr=lr), **fast).remedy == Remedy("set_lr", ("head",), 0.01)


@pytest.mark.parametrize(
    ("others", "own", "both"), [(0.55, 0.02, True), (0.45, 0.02, False), (0.55, 1.9e-3, False), (0.55, 2.1e-3, True)]
)
def test_where_steps_of_the_others_are_too_large_either_rate_may_be_wrong(others, own, both):
    verdict = told_of_rate(1 / 30, 1 / 30, update_ratio=dict.fromkeys(LAYERS, others) | {"b": own})
    assert verdict.cause == "lr_too_small"
    assert verdict.sentence.endswith(
        ", at which steps change them by 0.55 of their size: use one of the two for all layers"
        if both
        else ": use 0.01"
    )
    assert (verdict.remedy is None) == both


@pytest.mark.parametrize(("factor", "size"), [(30.0, 1.0), (30.0, 2.9), (1 / 30, 0.35), (1 / 30, 2.9)])
def test_a_rate_that_makes_the_update_like_the_others_may_be_meant(factor, size):
    """In the natural norm: at the others' rate it would be further off, and the spectral condition asks for less."""
    verdict = told_of_rate(factor, size)
    assert verdict.cause == ("lr_too_large" if factor > 1 else "lr_too_small")
    assert verdict.remedy is None
    assert "if this is intended" in verdict.sentence
    assert f"expected={{'b': {factor:.3g}}}" in verdict.sentence


@pytest.mark.parametrize(("factor", "size"), [(30.0, 3.1), (30.0, 30.0), (1 / 30, 0.32), (1 / 30, 1 / 30)])
def test_a_rate_that_takes_the_update_away_from_the_others_is_to_be_changed(factor, size):
    """Three times as large, or a third as large, is no longer alike."""
    verdict = told_of_rate(factor, size)
    assert verdict.remedy.action == "set_lr"
    assert verdict.remedy.value == pytest.approx(0.01)
    assert verdict.sentence.endswith("use 0.01")


def test_a_rate_that_was_declared_is_held_to_it():
    verdict = told_of_rate(1.0, 1.0, condition={"expected": {"b": 100}})
    assert verdict.sentence.endswith("use 1")


@pytest.mark.parametrize("frozen", ["a", "tok"])
def test_a_learning_rate_stands_out_whatever_layers_are_frozen(frozen):
    """Nothing is known of the rate of one that is frozen, be it the first."""
    settings = set_by(lr={"b": 1.0})
    settings[frozen] = replace(settings[frozen], frozen=True)
    changed = {"lr": {"b": 1.0}, "update_natural": nothing(frozen)}
    assert only_verdict(**changed, settings=settings).cause == "lr_too_large"


def test_a_layer_off_the_rule_of_the_others_is_told_by_the_rule():
    """The others follow 1/fan_in; b has 1024 inputs, and 50 times that rate."""
    lr = {name: 1.0 / info.fan_in for name, info in WIDE.items()} | {"b": 50 / 1024}
    verdict = only_verdict(layers=WIDE, lr=lr, settings=set_by(layers=WIDE, lr=lr))
    assert verdict.cause == "lr_too_large"
    assert verdict.sentence.startswith("its learning rate is 0.0488, the rule that the others follow gives 0.000977")


def test_a_learning_rate_that_explains_little_of_it_is_not_blamed():
    assert only_verdict(update_natural={"b": 9.0}, lr={"b": 0.02}).cause == "unknown"


@pytest.mark.parametrize(("update", "rate"), [(9.0, 0.0025), (0.1 / 90, 0.04)])
def test_a_learning_rate_that_goes_the_other_way_is_not_blamed(update, rate):
    """It is four times smaller, and the update 90 times larger; or the reverse."""
    assert only_verdict(update_natural={"b": update}, lr={"b": rate}).cause == "unknown"


def test_what_stands_out_by_the_settings_needs_less_of_a_deviation():
    """Four times the median is healthy, but not for a learning rate of five times the others'."""
    assert only_verdict(4, update_natural={"b": 0.4}, lr={"b": 0.05}).cause == "lr_too_large"
    assert not verdicts_on(9, update_natural={"b": 0.4})


def test_what_was_declared_is_no_fault_and_what_deviates_from_it_is():
    lr = {"head": 1.0}
    assert only_verdict(lr=lr).layer == "head"
    assert not verdicts_on(lr=lr, update_natural={"head": 10.0}, condition={"expected": {"head": 100}})
    verdict = only_verdict(condition={"expected": {"head": 100}})
    assert (verdict.layer, verdict.cause) == ("head", "lr_too_small")
    assert verdict.sentence.endswith("use 1")


def test_a_learning_rate_that_a_correction_has_seen_to_is_not_told():
    lr, multipliers = {"b": 1.0}, dict.fromkeys(LAYERS, 1.0)
    assert only_verdict(lr=lr, lr_multiplier=multipliers).cause == "lr_too_large"
    assert not verdicts_on(lr={"b": 0.01}, lr_multiplier=multipliers | {"b": 0.01})


def test_readout_initialised_too_large():
    verdict = only_verdict(**heavy(head=30.0), drift_ratio={"head": 0.1})
    assert (verdict.layer, verdict.quantity, verdict.cause) == ("head", "weight_natural", "readout_init")
    gain = 30 * 8 / math.sqrt(10)  # beside 1, the median of the others
    advice = f"divide them by {gain:.0f}, or initialize them to 0"
    assert verdict.sentence == f"its initial weights are {gain:.0f}x larger than typical: {advice}"
    assert (verdict.remedy.action, verdict.remedy.value) == ("scale_weights", pytest.approx(1 / gain))


def test_weights_that_began_too_large_stay_the_cause_of_the_explosion_they_set_off():
    """By then every layer has moved far, so that no size of now tells of the beginning."""
    begun = [measured(step, **heavy(c=30.0), drift_ratio=dict.fromkeys(LAYERS, 0.1)) for step in (1, 2)]
    everyone = dict.fromkeys(LAYERS, 400.0)
    blown = {"update_ratio": everyone, "drift_ratio": everyone, **heavy(**everyone)}
    judge, before = judged(begun)
    after = judge.judge(measured(3, **blown))
    for verdicts in (before, after):
        assert [(v.layer, v.cause, round(1 / v.remedy.value)) for v in verdicts if v.is_root] == [
            ("c", "weights_too_large", 30)
        ]
    assert {v.cause for v in after if not v.is_root} >= {"exploding"}
    _, first = judged([measured(3, **blown)])
    assert not {"weights_too_large", "readout_init"} & {v.cause for v in first}, "nothing is known of how they began"


@pytest.mark.parametrize(("factor", "cause"), [(30.0, "weights_too_large"), (1 / 90, "weights_too_small")])
def test_weights_initialised_on_another_scale(factor, cause):
    verdict = only_verdict(**heavy(c=factor), drift_ratio={"c": 0.1})
    assert (verdict.layer, verdict.cause) == ("c", cause)
    assert verdict.remedy.value == pytest.approx(1 / factor)


def test_weights_that_decay_has_made_small_did_not_begin_so():
    """Their way since the start is then as long as they were, and no longer."""
    gone = measured(50, **heavy(c=1 / 90), drift_ratio={"c": 1.0})
    _, verdicts = judged([measured(1), gone, gone, gone])
    assert not verdicts
    _, unseen = judged([gone] * 3)
    assert [v.cause for v in unseen] == ["weights_too_small"], (
        "where the beginning was not measured it may have been so"
    )


def test_what_the_others_decay_to_does_not_change_how_a_layer_began():
    light = heavy(**{name: 1 / 20 for name in LAYERS if name not in ("c", "tok")})
    small = measured(50, **light, drift_ratio=dict.fromkeys(LAYERS, 0.9) | {"c": 0.1})
    _, verdicts = judged([measured(1), small, small, small])
    assert "c" not in {v.layer for v in verdicts}
    begun = measured(1, **heavy(c=30.0), drift_ratio={"c": 0.1})
    _, first = judged([begun] * 3)
    _, later = judged([begun] * 3 + [measured(50, **heavy(c=15.0), drift_ratio={"c": 0.5})] * 3)
    assert first[0].sentence == later[0].sentence
    assert "initial weights are 30x larger" in later[0].sentence


def test_a_readout_may_begin_as_small_as_it_likes():
    assert not verdicts_on(9, **heavy(head=1e-3))


def test_trained_weights_are_not_initialised_at_all():
    """What is loaded has less stable rank than what was drawn: natural norms next to those of one direction."""
    low_rank = {name: 7.0 * math.sqrt(info.fan_in / info.fan_out) for name, info in LAYERS.items()}
    sizes = {"weight_fro": {"c": 240.0}, "weight_natural": low_rank | {"tok": 1.0, "c": 30 * low_rank["c"]}}
    assert not verdicts_on(9, **sizes, drift_ratio={"c": 0.1})


def test_weights_that_grew_large_were_not_initialised_so():
    changed = {"weight_natural": {"b": 150.0}, "weight_fro": {"b": 1200.0}, "drift_ratio": {"b": 40.0}}
    verdict = only_verdict(**changed)
    assert verdict.cause == "exploding"
    assert "have moved by 40 times their initial size and amplify inputs by up to 150" in verdict.sentence


def test_weights_that_grow_without_end():
    large = {"weight_natural": {"b": 250.0, "c": 150.0}, "condition": {"ignore": ["rates_too_large"]}}
    assert {v.layer for v in verdicts_on(**large, drift_ratio={"b": 11.0, "c": 11.0})} == {"b", "c"}
    assert not verdicts_on(**large, drift_ratio={"b": 9.0, "c": 9.0}), "large, but it began so"


def test_heavy_weights_explain_a_small_update_and_no_large_one():
    """Under most optimizers larger weights get smaller gradients; six times the median is no finding by itself."""
    six = {"weight_fro": {"c": 48.0}, "drift_ratio": {"c": 0.1}}
    assert only_verdict(update_natural={"c": 0.001}, **six).cause == "weights_too_large"
    assert only_verdict(update_natural={"c": 100.0}, **six).cause == "unknown"
    narrow = {"condition": {"band": (0.8, 1.25)}, **six}
    assert [only_verdict(update_natural={"c": 0.1 * x}, **narrow).cause for x in (3.5, 1.0)] == [
        "unknown",
        "weights_too_large",
    ]
    grown = {"weight_fro": {"c": 48.0}, "drift_ratio": {"c": 3.0}}
    assert only_verdict(update_natural={"c": 0.001}, **grown).cause == "unknown"


def test_weights_that_have_become_zero_explain_nothing():
    """Long after the start, so that nobody waits for them to grow."""
    gone = {"weight_natural": {"c": 0.0}, "weight_fro": {"c": 0.0}, "update_natural": {"c": 100.0}}
    _, (verdict,) = judged([*[measured(step) for step in range(1, 14)], measured(14, **gone)])
    assert (verdict.layer, verdict.cause) == ("c", "unknown")


def test_exploding():
    verdict = only_verdict(update_ratio={"b": 4.0}, drift_ratio={"b": 7.0})
    assert (verdict.layer, verdict.quantity, verdict.cause) == ("b", "update_ratio", "exploding")
    assert verdict.band == (0.0, 1.0)
    assert "divide its learning rate by about 40" in verdict.sentence
    assert (verdict.remedy.action, verdict.remedy.value) == ("scale_lr", pytest.approx(1 / 40))


def test_exploding_for_its_learning_rate():
    assert only_verdict(update_ratio={"b": 4.0}, lr={"b": 0.04}).cause == "lr_too_large"


@pytest.mark.parametrize("factor", [0.25, 0.1, 2.0])
def test_an_explosion_is_not_blamed_on_a_learning_rate_that_is_smaller_or_hardly_larger(factor):
    verdict = only_verdict(update_ratio={"b": 4.0}, lr={"b": 0.01 * factor}, condition={"ignore": ["rates"]})
    assert verdict.cause == "exploding"


def test_vanishing():
    verdict = only_verdict(update_natural={"b": 0.001}, drift_ratio={"b": 0.01})
    assert (verdict.layer, verdict.cause) == ("b", "vanishing")
    assert "moved by 0.01 of its size since the start, the others by 1" in verdict.sentence


@pytest.mark.parametrize(
    ("gradient", "clip", "cause"), [(1e-7, 1e-3, "eps"), (1e-7, 1.0, "vanishing"), (1e-9, 1e-3, "vanishing")]
)
def test_a_layer_whose_gradients_clipping_takes_below_eps_does_not_vanish(gradient, clip, cause):
    verdict = only_verdict(
        settings=set_by(eps=1e-8),
        summary={"clip_factor": clip},
        update_natural={"b": 0.001},
        update_fro=dict.fromkeys(LAYERS, 1.0) | {"b": 0.01},
        contribution={"b": gradient},
        drift_ratio={"b": 0.01},
    )
    assert (verdict.layer, verdict.cause) == ("b", cause)
    assert ("clip less" in verdict.sentence) == (cause == "eps")


def test_a_layer_that_moves_more_than_the_others_does_not_vanish():
    """However little it has moved before; 1.9 times is off in a narrow band only."""
    narrow = {"band": (1 / 16, 1.5), "persistence": 1}
    assert only_verdict(update_natural={"b": 0.19}, drift_ratio={"b": 0.01}, condition=narrow).cause == "unknown"


@pytest.mark.parametrize("size", [0.001, 100.0])
def test_embedding_on_the_wrong_scale(size):
    verdict = only_verdict(weight_natural={"tok": size})
    assert (verdict.layer, verdict.cause) == ("tok", "embedding_scale")
    assert verdict.remedy.value == pytest.approx(0.02 / size if size < 1 else 1 / size)


@pytest.mark.parametrize("size", [0.02, 0.3, 5.0])
def test_embeddings_on_usual_scales(size):
    assert not verdicts_on(9, weight_natural={"tok": size})


@pytest.mark.parametrize(("size", "cause"), [(0.001, "embedding_scale"), (0.5, "exploding")])
def test_an_embedding_that_explodes_is_of_the_wrong_scale_only_if_it_is(size, cause):
    changed = {"weight_natural": {"tok": size}, "update_ratio": {"tok": 4.0}}
    assert only_verdict(**changed, condition={"ignore": ["embeddings"]}).cause == cause


@pytest.mark.parametrize(("size", "cause"), [(0.0075, "exploding"), (0.006, "embedding_scale"), (5.0, "exploding")])
def test_usual_entries_are_advice_where_the_steps_would_be_small_beside_them(size, cause):
    """Steps of three times the entries, which 0.02 / size times as large entries would divide by that."""
    changed = {"weight_natural": {"tok": size}, "update_ratio": {"tok": 3.0}}
    assert only_verdict(**changed, condition={"ignore": ["embeddings"]}).cause == cause


def test_readouts_update_too_large_for_its_width():
    """Under SGD, where it has four times the room, and under Adam, where nothing explains it."""
    verdict = only_verdict(update_natural={"head": 100.0}, settings=SGD)
    assert (verdict.layer, verdict.cause) == ("head", "readout_width")
    assert "grows with its number of inputs (64)" in verdict.sentence
    assert only_verdict(update_natural={"head": 100.0}, settings=ADAM).cause == "unknown"
    assert only_verdict(update_natural={"head": 1e-5}, settings=SGD).cause == "unknown", "too small"
    assert not verdicts_on(9, update_natural={"head": 3.0}, settings=SGD)
    assert verdicts_on(9, update_natural={"head": 3.0}, settings=ADAM)


@pytest.mark.parametrize(("size", "cause"), [(0.4, "weights_too_small"), (1.2, "readout_width")])
def test_a_readout_stands_out_where_gradients_of_the_others_pass_through_small_weights(size, cause):
    """Weights of Frobenius norm 0.4 multiply features by 0.05, those of 1.2 by 0.15."""
    changed = {"update_natural": {"head": 100.0}, "weight_fro": dict.fromkeys(LAYERS, size)}
    (verdict,) = judged([measured(step, **changed) for step in (1, 2, 4)], settings=SGD)[1]
    assert (verdict.layer, verdict.cause) == ("head", cause)
    if cause == "weights_too_small":
        assert "gradients of the others pass through small weights; initial weights multiply features by only" in str(
            verdict
        )
        assert verdict.remedy.action == "check", "the remedy is not about the weights of the head"


def test_unknown_is_said_honestly():
    verdict = only_verdict(update_natural={"b": 8.0})
    assert verdict.cause == "unknown"
    assert verdict.sentence == "update 80x larger than typical; none of the known causes fits"
    assert verdict.remedy is None


@pytest.mark.parametrize(
    ("layer", "size", "cause"),
    [("head", 300.0, "readout_init"), ("b", 300.0, "weights_too_large"), ("b", 0.003, "weights_too_small")],
)
def test_against_the_theory(layer, size, cause):
    changed = {"weight_natural": {layer: size}, "update_natural": {"c": 99.0}, "drift_ratio": {layer: 0.1}}
    verdict = only_verdict(condition={"reference": "theory"}, **changed)
    assert (verdict.layer, verdict.quantity, verdict.cause) == (layer, "weight_natural", cause)
    assert "standard deviation" in verdict.sentence
    assert verdict.remedy.value == pytest.approx(1 / size)


def test_the_deviation_that_theory_has():
    verdict = only_verdict(condition={"reference": "theory"}, weight_natural={"c": 0.02}, drift_ratio={"c": 0.1})
    # 256 -> 64: sqrt(64 / 256) / sqrt(256)
    assert "its initial weights are 50 times too small: use standard deviation 0.031," in verdict.sentence


def test_against_the_theory_weights_may_have_grown():
    verdict = only_verdict(condition={"reference": "theory"}, weight_natural={"c": 300.0}, drift_ratio={"c": 5.0})
    assert verdict.cause == "weights_grown"


def test_every_cause_that_is_told_is_listed():
    source = "".join(map(inspect.getsource, (layers, silent, network, outputs, losses)))
    told = set(re.findall(r'(?:Explanation\(\s*|code = |code, \w+ = )"(\w+)"', source))
    told |= {code for code, _ in network._SENTENCES.values()}
    told |= {"lr_too_small", "width", NO_CAUSE}  # by a condition, the judge, and what is left
    assert told == set(CAUSES)


def test_a_layer_that_is_not_measured_any_more_is_unknown():
    from spectral_monitor.condition.causes import cause
    from spectral_monitor.condition.findings import Finding
    from spectral_monitor.condition.network import Network

    told = cause(Finding("reference", "gone", "update_natural", 1.0, 1.0, (0.5, 2.0)), Network(1, ()))
    assert (told.code, told.sentence) == ("unknown", "it is not measured any more")
    assert not judged([measured(1)])[1]
