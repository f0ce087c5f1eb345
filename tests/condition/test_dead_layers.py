"""Layers that do not move: which of them is to blame, and what is merely cut off."""

from __future__ import annotations

import pytest

from spectral_monitor.condition import Judge, SpectralCondition
from spectral_monitor.measurement import LOST, LayerInfo
from tests.condition.synthetic import LAYERS, judged, measured, nothing, only_verdict, set_by, verdicts_on


def causes(verdicts):
    return {verdict.layer: (verdict.cause, verdict.root) for verdict in verdicts}


def test_an_update_of_exactly_nothing_may_be_chance_once():
    judge = Judge(SpectralCondition())
    still = {"update_natural": {"b": 0.0}}
    assert [len(judge.judge(measured(step, **still))) for step in (1, 2)] == [0, 1]


def test_an_update_of_nothing_and_then_one_that_is_not_is_healthy():
    """Any size: a natural norm of 5 is as far from nothing as it gets."""
    judge = Judge(SpectralCondition())
    for step, size in enumerate((0.0, 5.0, 0.0, 1e6, 0.0), 1):
        everywhere = dict.fromkeys(LAYERS, max(size, 1.0))
        assert judge.judge(measured(step, update_natural=everywhere | {"b": size})) == ()


def test_frozen_by_a_learning_rate_of_zero():
    changed = {"update_natural": {"b": 0.0}, "contribution": {"b": 0.0}, "lr": {"b": 0.0}}
    verdict = only_verdict(**changed, settings=set_by(lr={"b": 0.0}))
    assert (verdict.layer, verdict.cause) == ("b", "lr_zero")
    assert "its learning rate is 0 while others learn at 0.01" in verdict.sentence
    assert (verdict.remedy.action, verdict.remedy.value) == ("set_lr", 0.01)


def test_a_layer_that_is_frozen_on_purpose_is_not_dead():
    still = {"update_natural": {"b": 0.0}, "contribution": {"b": 0.0}}
    settings = set_by()
    settings["b"] = set_by(frozen=True)["b"]
    assert not verdicts_on(9, settings=settings, **still)


def test_outputs_of_exactly_zero_have_inputs_of_zero():
    """b has no bias, and is given the zero state of a recurrence; a ReLU behind it is not to blame, nor is c."""
    gone = {"update_natural": {"b": 0.0}, "contribution": {"b": 0.0, "b.bias": 0.0}}
    verdict = only_verdict(feature_rms={"b": 0.0}, **gone)
    assert (verdict.layer, verdict.cause) == ("b", "dead_input")
    assert only_verdict(feature_rms={"b": 0.1}, **gone).cause == "dead"


def test_weight_decay_alone_is_dead():
    verdict = only_verdict(contribution={"b": 0.0, "b.bias": 0.0})
    assert (verdict.layer, verdict.quantity, verdict.cause) == ("b", "contribution", "dead")


def test_of_a_chain_of_dead_layers_the_one_to_blame_is_the_root():
    """b's ReLU never opens: nothing arrives below it, and c sees zeros but has a bias that learns."""
    dead = {"contribution": dict.fromkeys(("tok", "a", "a.bias", "b", "b.bias", "c"), 0.0)}
    verdicts = verdicts_on(weight_natural={"b.bias": 100.0}, **dead)
    assert causes(verdicts) == {
        "b": ("dead", ""),
        "tok": ("dead_above", "b"),
        "a": ("dead_above", "b"),
        "c": ("dead_input", "b"),
    }
    told = {verdict.layer: verdict for verdict in verdicts}
    assert set(told["b"].consequences) == {"tok", "a", "c"}
    assert "biases of size 100" in told["b"].sentence
    assert "(b)" in told["a"].sentence


@pytest.mark.parametrize(("size", "said"), [(4.9, False), (5.0, True)])
def test_only_biases_of_five_and_more_are_said_to_keep_a_relu_shut(size, said):
    still = dict.fromkeys(("a", "a.bias"), 0.0)
    verdict = only_verdict(weight_natural={"a.bias": size}, contribution=still)
    assert ("biases of size" in verdict.sentence) is said


def test_two_dead_layers_apart_are_one_root():
    (verdict,) = verdicts_on(contribution=dict.fromkeys(("a", "a.bias", "c", "c.bias"), 0.0))
    assert (verdict.cause, set(verdict.layers)) == ("dead", {"a", "c"})


def test_a_layer_without_a_learning_rate_is_not_to_blame_for_a_dead_one():
    """b has a learning rate of 0, so that its contribution is 0 too; a is dead on its own."""
    changed = {"contribution": dict.fromkeys(("a", "a.bias", "b", "b.bias"), 0.0), "lr": {"b": 0.0}}
    assert causes(verdicts_on(**changed)) == {"b": ("lr_zero", ""), "a": ("dead", "b")}


def test_a_network_without_any_gradient():
    (verdict,) = verdicts_on(contribution=dict.fromkeys(LAYERS, 0.0), drift_ratio=dict.fromkeys(LAYERS, 0.0))
    assert (verdict.cause, set(verdict.layers)) == ("dead", set(LAYERS) - {"a.bias", "b.bias", "c.bias"})
    assert "no layer gets a gradient" in verdict.sentence


@pytest.mark.parametrize(
    ("size", "told"),
    [
        ({"b": 0.0}, "no layer gets a gradient: b is all 0, so nothing gets through: begin with random weights"),
        ({"b.bias": 0.0}, "no layer gets a gradient: the loss does not depend on them"),
        ({"b.bias": 10.0}, "as by a ReLU that never opens behind b (biases of size 10)"),
    ],
)
def test_a_network_without_any_gradient_names_what_blocks_it(size, told):
    still = dict.fromkeys(LAYERS, 0.0)
    (verdict,) = verdicts_on(contribution=still, drift_ratio=still, weight_natural=size)
    assert told in verdict.sentence


@pytest.mark.parametrize(("moves", "told"), [(False, "because norm.weight is all 0"), (True, "outputs are detached")])
def test_a_gain_of_zero_that_gets_no_gradient_is_named(moves, told):
    gain = LayerInfo("norm.weight", "vector", 1, 8, (8,))
    still = dict.fromkeys(("b", "b.bias"), 0.0) | {"norm.weight": 0.1 * moves}
    layers = {**LAYERS, gain.name: gain}
    verdict = only_verdict(15, layers=layers, contribution=still, weight_natural={"norm.weight": 0.0})
    assert (verdict.layer, verdict.cause) == ("b", "dead")
    assert told in verdict.sentence


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        ("b", "its weights are all 0 and hardly any gradient reaches them"),
        ("ab", "no gradient reaches its weights, because b is all 0"),
    ],
)
def test_weights_of_zero_are_named_where_gradients_are_too_small_to_move_them(layers, told):
    still = dict.fromkeys((*layers, *(f"{layer}.bias" for layer in layers)), 0.0)
    reasons, nothing_moves = {"contribution/b": LOST}, {"contribution": still, "update_natural": still}
    verdict = only_verdict(weight_natural={"b": 0.0}, reasons=reasons, **nothing_moves)
    assert (verdict.cause, set(verdict.layers)) == ("dead", set(layers))
    assert verdict.sentence.startswith(told)


def test_a_loss_of_exactly_zero_after_training_makes_no_layer_dead():
    trained = measured(1)
    done = {"contribution": dict.fromkeys(LAYERS, 0.0), "drift_ratio": dict.fromkeys(LAYERS, 0.5)}
    assert judged([trained, *(measured(step, **done) for step in (2, 3, 4))])[1] == ()


def test_without_gradients_an_update_of_nothing_is_unmoved():
    verdict = only_verdict(update_natural={"b": 0.0}, contribution=nothing("b"))
    assert verdict.cause == "unmoved"


def test_a_schedule_that_is_at_zero_for_all_makes_no_layer_dead():
    zero = {key: dict.fromkeys(LAYERS, 0.0) for key in ("lr", "update_natural", "contribution")}
    (verdict,) = verdicts_on(9, **zero)
    assert verdict.cause == "nothing_trains"


def test_without_learning_rates_a_network_that_does_not_move_at_all_has_no_dead_layer():
    still = {"update_natural": dict.fromkeys(LAYERS, 0.0)}
    (verdict,) = verdicts_on(5, only=["update_natural"], **still)
    assert verdict.cause == "nothing_trains"


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        (["b", "b.bias"], "no gradient reaches its weights any more"),
        (["head"], "an output layer needs no ReLU after it"),
        ([*LAYERS], "no layer gets a gradient any more: unless the loss is exactly 0"),
    ],
)
def test_layers_that_had_gradients_before_were_closed_by_training(layers, told):
    """Steps that were too large close ReLUs: initializing the layer again, with the same steps, would not help."""
    still = dict.fromkeys(layers, 0.0)
    alive, gone = {}, {"contribution": still}
    for changes, closed in (([alive, gone, gone], True), ([gone, gone, gone], False)):
        verdicts = judged([measured(k, summary={"loss": 1.0}, **change) for k, change in enumerate(changes, 1)])[1]
        (root,) = (verdict for verdict in verdicts if verdict.is_root)
        assert root.cause == "dead"
        assert (told in root.sentence) == closed
        assert ("divide learning rates by 3 or more" in root.sentence) == closed
