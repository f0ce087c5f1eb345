"""Every cause is told from the numbers that give it away, and from its neighbours."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import replace

import pytest
from synthetic import LAYERS, judged, measured, nothing, only_verdict

from spectral_monitor import LayerInfo
from spectral_monitor.condition import CAUSES, causes
from spectral_monitor.condition.network import family

WIDE = {
    "a": replace(LAYERS["a"], fan_in=64, fan_out=1024, shape=(1024, 64)),
    "b": replace(LAYERS["b"], fan_in=1024, fan_out=1024, shape=(1024, 1024)),
    "c": replace(LAYERS["c"], fan_in=1024, fan_out=1024, shape=(1024, 1024)),
    "head": replace(LAYERS["head"], fan_in=1024, fan_out=10, shape=(10, 1024)),
}


def rates(rule, lr=0.01):
    return {name: lr * rule(info) for name, info in WIDE.items()}


def sgd_rule(info):
    return info.fan_out / info.fan_in


def adam_rule(info):
    return 1 / info.fan_in


def test_learning_rate_too_large():
    verdict = only_verdict(update_natural={"b": 9.0}, lr={"b": 1.0})
    assert (verdict.layer, verdict.cause) == ("b", "lr_too_large")
    assert "learning rate 100 times that of the other layers; divide it by about 90" in verdict.sentence


def test_learning_rate_too_small():
    verdict = only_verdict(update_natural={"c": 0.001}, lr={"c": 0.0001})
    assert (verdict.layer, verdict.cause) == ("c", "lr_too_small")
    assert "1/100 of that of the other layers; multiply it by about 100" in verdict.sentence


def test_a_learning_rate_that_explains_little_of_it_is_not_blamed():
    assert only_verdict(update_natural={"b": 9.0}, lr={"b": 0.025}).cause == "unknown"


def test_a_learning_rate_that_goes_the_other_way_is_not_blamed():
    assert only_verdict(update_natural={"b": 9.0}, lr={"b": 0.0001}).cause == "unknown"


def test_a_layer_off_the_rule_of_the_others_is_told_by_the_rule():
    """The others follow 1/fan_in; 1/fan_in of b is 1/1024, and its rate is 50 times that."""
    lr = rates(adam_rule) | {"b": 0.01 * 50 / 1024}
    verdict = only_verdict(layers=WIDE, update_natural={"b": 5.0}, lr=lr)
    assert verdict.cause == "lr_too_large"
    assert "learning rate 50 times" in verdict.sentence


def test_what_stands_out_by_the_settings_needs_less_of_a_deviation():
    """Three times its share is in order, but not for a learning rate 100 times that of the others."""
    assert only_verdict(update_natural={"b": 0.4}, lr={"b": 1.0}).cause == "lr_too_large"
    assert not judged([measured(step, update_natural={"b": 0.4}) for step in range(1, 9)])[1]


def test_rule_of_sgd_under_adam():
    verdict = only_verdict(layers=WIDE, update_natural={"head": 0.002}, lr=rates(sgd_rule))
    assert (verdict.layer, verdict.cause) == ("head", "sgd_rule_under_adam")
    assert "1/fan_in" in verdict.sentence


def test_the_same_rule_under_sgd_is_right():
    verdict = only_verdict(layers=WIDE, update_natural={"head": 0.002}, lr=rates(sgd_rule), optimizers=["SGD"])
    assert verdict.cause == "unknown"


def test_rates_of_the_tangent_parametrization():
    verdict = only_verdict(layers=WIDE, update_natural={"head": 0.4}, lr=rates(adam_rule), optimizers=["SGD"])
    assert (verdict.layer, verdict.cause) == ("head", "ntk_scaling")
    assert not judged([measured(s, layers=WIDE, update_natural={"head": 0.4}, lr=rates(adam_rule)) for s in (1, 2, 3)])[
        1
    ]


def test_where_every_fan_out_is_the_same_the_right_rule_for_sgd_is_not_taken_for_another():
    layers = {name: replace(info, fan_out=64) for name, info in WIDE.items()}
    lr = {name: 0.01 * 64 / info.fan_in for name, info in layers.items()}
    verdict = only_verdict(layers=layers, update_natural={"head": 5.0}, lr=lr, optimizers=["SGD"])
    assert verdict.cause == "readout_width"


def test_weights_of_the_tangent_parametrization():
    sizes = {name: math.sqrt(math.prod(info.shape)) for name, info in WIDE.items()}
    changed = {"weight_fro": sizes, "drift_ratio": dict.fromkeys(WIDE, 0.01), "update_natural": {"b": 0.02}}
    verdict = only_verdict(layers=WIDE, optimizers=["SGD"], **changed)
    assert (verdict.layer, verdict.cause) == ("b", "ntk_scaling")
    blown_up = changed | {"drift_ratio": dict.fromkeys(WIDE, 50.0), "update_natural": {"b": 0.001}}
    assert only_verdict(layers=WIDE, optimizers=["SGD"], **blown_up).cause == "unknown"


def test_readout_initialised_too_large():
    verdict = only_verdict(weight_natural={"head": 30.0}, drift_ratio={"head": 0.1})
    assert (verdict.layer, verdict.quantity, verdict.cause) == ("head", "weight_natural", "readout_init")
    assert "1/fan_in = 0.016" in verdict.sentence


def test_a_readout_in_default_initialisation_whose_update_is_too_large():
    changed = {"update_natural": {"head": 2.0}, "weight_natural": {"head": 8.0}}
    assert only_verdict(**changed, optimizers=["SGD"]).cause == "readout_init"


def test_weights_initialised_too_large():
    verdict = only_verdict(weight_natural={"b": 30.0}, drift_ratio={"b": 0.1})
    assert (verdict.layer, verdict.cause) == ("b", "weights_too_large")
    assert "initialised 30 times larger" in verdict.sentence


def test_weights_that_grew_large_were_not_initialised_so():
    verdict = only_verdict(weight_natural={"b": 30.0}, drift_ratio={"b": 40.0})
    assert verdict.cause == "exploding"


def test_weights_that_grow_without_end():
    everywhere = dict.fromkeys(LAYERS, 150.0)
    _, verdicts = judged([measured(s, weight_natural=everywhere, drift_ratio=everywhere) for s in (1, 2, 3)])
    assert {v.layer: v.cause for v in verdicts} == dict.fromkeys(("a", "b", "c", "head"), "exploding") | {
        "tok": "embedding_scale"
    }
    still = {"drift_ratio": dict.fromkeys(LAYERS, 0.1), "weight_natural": everywhere | {"tok": 1.0}}
    assert not judged([measured(s, **still) for s in (1, 2, 3)])[1]  # large, but it began so


def test_another_layers_weights():
    changed = {"update_natural": {"b": 1.0}, "weight_natural": {"a": 9.0}, "drift_ratio": {"a": 0.1}}
    verdict = only_verdict(**changed, optimizers=["SGD"])
    assert (verdict.layer, verdict.cause) == ("b", "weights_elsewhere")
    assert "the weights of a are 9 times" in verdict.sentence


def test_another_layers_weights_are_not_to_blame_where_they_grew():
    changed = {"update_natural": {"b": 1.0}, "weight_natural": {"a": 9.0}, "drift_ratio": {"a": 20.0}}
    assert only_verdict(**changed, optimizers=["SGD"]).cause == "unknown"


def test_another_layers_learning_rate():
    verdict = only_verdict(update_ratio={"b": 0.8}, lr={"a": 1.0})
    assert (verdict.layer, verdict.cause) == ("b", "lr_elsewhere")


def test_exploding():
    verdict = only_verdict(update_ratio={"b": 0.8}, drift_ratio={"b": 7.0})
    assert (verdict.layer, verdict.quantity, verdict.cause) == ("b", "update_ratio", "exploding")
    assert verdict.band == (0.0, 0.5)
    assert "divide its learning rate by about 8" in verdict.sentence


def test_exploding_for_its_learning_rate():
    assert only_verdict(update_ratio={"b": 0.8}, lr={"b": 0.2}).cause == "lr_too_large"


def test_vanishing():
    verdict = only_verdict(update_natural={"b": 0.001}, drift_ratio={"b": 0.01})
    assert (verdict.layer, verdict.cause) == ("b", "vanishing")


def test_frozen_by_a_learning_rate_of_zero():
    verdict = only_verdict(update_natural={"b": 0.0}, contribution={"b": 0.0}, lr={"b": 0.0})
    assert (verdict.layer, verdict.cause) == ("b", "lr_zero")


def test_weight_decay_alone_is_dead():
    verdict = only_verdict(contribution={"b": 0.0, "b.bias": 0.0})
    assert (verdict.layer, verdict.quantity, verdict.cause) == ("b", "contribution", "dead")


def test_of_a_chain_of_dead_layers_the_one_to_blame_is_named():
    """b's ReLU never opens: nothing arrives below it, and c sees zeros but has a bias that learns."""
    dead = {"contribution": dict.fromkeys(("tok", "a", "a.bias", "b", "b.bias", "c"), 0.0)}
    _, verdicts = judged([measured(s, weight_natural={"b.bias": 100.0}, **dead) for s in (1, 2, 3)])
    told = {verdict.layer: verdict for verdict in verdicts}
    causes = {layer: verdict.cause for layer, verdict in told.items()}
    assert causes == {"tok": "dead_above", "a": "dead_above", "b": "dead", "c": "dead_input"}
    assert "biases of size 100" in told["b"].sentence
    assert "(b)" in told["a"].sentence


def test_two_dead_layers_apart_are_each_to_blame():
    dead = {"contribution": dict.fromkeys(("a", "a.bias", "c", "c.bias"), 0.0)}
    _, verdicts = judged([measured(s, **dead) for s in (1, 2, 3)])
    assert {verdict.layer: verdict.cause for verdict in verdicts} == {"a": "dead", "c": "dead"}


def test_a_frozen_layer_is_not_to_blame_for_a_dead_one():
    """b is frozen by a learning rate of 0, so that its contribution is 0 too; a is dead on its own."""
    changed = {"contribution": dict.fromkeys(("a", "a.bias", "b", "b.bias"), 0.0), "lr": {"b": 0.0}}
    _, verdicts = judged([measured(s, **changed) for s in (1, 2, 3)])
    assert {verdict.layer: verdict.cause for verdict in verdicts} == {"a": "dead", "b": "lr_zero"}


def test_a_network_without_any_gradient():
    _, verdicts = judged([measured(s, contribution=dict.fromkeys(LAYERS, 0.0)) for s in (1, 2, 3)])
    assert {verdict.cause for verdict in verdicts} == {"dead"}
    assert "nor does any other layer" in verdicts[0].sentence


def test_an_update_lost_to_rounding():
    changed = {"update_natural": {"b": 0.0}, "contribution": nothing("b")}
    assert only_verdict(**changed).cause == "unmoved"


@pytest.mark.parametrize("size", [0.001, 100.0])
def test_embedding_on_the_wrong_scale(size):
    verdict = only_verdict(weight_natural={"tok": size})
    assert (verdict.layer, verdict.cause) == ("tok", "embedding_scale")


def test_embeddings_on_usual_scales():
    for size in (0.02, 0.3, 5.0):
        assert not judged([measured(s, weight_natural={"tok": size}) for s in (1, 2, 3)])[1]


def test_one_learning_rate_for_different_fan_ins_under_adam():
    layers = WIDE | {"x": replace(LAYERS["a"], name="x", fan_in=16, shape=(64, 16))}
    assert next(iter(layers)) != "x"  # the first matrix has a wider band
    verdict = only_verdict(layers=layers, update_natural={"x": 0.01})
    assert (verdict.layer, verdict.cause) == ("x", "fan_in")
    assert "multiply its learning rate by about 64" in verdict.sentence
    assert only_verdict(layers=layers, update_natural={"x": 0.01}, optimizers=["Muon", "AdamW"]).cause == "unknown"


def adapters(rank=4, width=1024):
    """A frozen layer and low-rank adapters beside three more: the first halves have many inputs, the second few."""
    first = {f"{n}.A": LayerInfo(f"{n}.A", "operator", rank, width, (rank, width)) for n in "xyz"}
    second = {f"{n}.B": LayerInfo(f"{n}.B", "operator", width, rank, (width, rank)) for n in "wxyz"}
    return {"frozen": replace(WIDE["b"], name="frozen")} | first | second


def adapted(step, weight=9.0, update=5.0, drift=4.0):
    """What began at zero is small for long, and its updates are."""
    layers = adapters()
    second = [name for name in layers if name.endswith(".B")]
    frozen = {"lr": nothing("frozen"), "update_natural": nothing("frozen"), "update_ratio": nothing("frozen")}
    changed = frozen | {
        "weight_natural": dict.fromkeys(layers, weight) | dict.fromkeys(second, 0.0 if step == 1 else 0.05),
        "update_natural": frozen["update_natural"] | {name: update for name in layers if name.endswith(".A")},
        "drift_ratio": dict.fromkeys(layers, drift) | nothing(*second),
        "contribution": nothing("frozen"),
    }
    zero = "undefined: it divides by a norm that is zero"
    return measured(step, layers=layers, reasons={f"drift_ratio/{name}": zero for name in second}, **changed)


def test_adapters_that_began_at_zero_say_nothing_of_how_large_weights_should_be():
    """9 is 180 times the adapters that began at zero: neither initialised too large nor grown, but of many inputs."""
    _, verdicts = judged([adapted(step) for step in range(1, 12)])
    assert {verdict.layer: (verdict.quantity, verdict.cause) for verdict in verdicts} == dict.fromkeys(
        ("x.A", "y.A", "z.A"), ("update_natural", "fan_in")
    )
    assert "it has 1024 inputs, the others about 4:" in verdicts[0].sentence
    _, verdicts = judged([adapted(step, drift=0.1) for step in range(1, 12)], optimizers=["SGD"])
    assert {verdict.cause for verdict in verdicts} == {"unknown"}
    assert not judged([adapted(step, update=0.1) for step in range(1, 12)])[1]


def test_many_inputs_under_adam_explain_an_update_better_than_weights_do():
    layers = WIDE | {"x": replace(LAYERS["a"], name="x", fan_in=65536, shape=(64, 65536))}
    verdict = only_verdict(layers=layers, update_natural={"x": 9.0}, weight_natural={"x": 6.0})
    assert (verdict.layer, verdict.cause) == ("x", "fan_in")
    verdict = only_verdict(layers=layers, update_natural={"x": 9.0}, weight_natural={"x": 6.0}, optimizers=["SGD"])
    assert verdict.cause == "weights_too_large"


def test_a_layer_that_began_at_zero_was_not_initialised_too_large():
    zero = {"drift_ratio/head": "undefined: it divides by a norm that is zero"}
    sizes = [0.0, *[30.0] * 8]
    _, (verdict,) = judged(
        measured(step, weight_natural={"head": size}, drift_ratio=nothing("head"), reasons=zero)
        for step, size in enumerate(sizes, 1)
    )
    assert (verdict.layer, verdict.quantity, verdict.cause) == ("head", "weight_natural", "exploding")
    assert "come all the way from zero, and stretch by 30" in verdict.sentence


def test_the_first_matrix_has_room_on_the_side_its_inputs_explain():
    few = {"layers": WIDE, "update_natural": {"a": 0.1 / 100}}
    assert not judged([measured(s, layers=WIDE, update_natural={"a": 0.1 / 50}) for s in (1, 2, 3)])[1]
    assert only_verdict(**few).layer == "a"
    assert only_verdict(layers=WIDE, update_natural={"a": 0.1 * 9}).layer == "a"
    assert only_verdict(layers=WIDE, update_natural={"c": 0.1 / 9}).layer == "c"


def test_readouts_update_too_large_for_its_width():
    verdict = only_verdict(update_natural={"head": 1.0}, optimizers=["SGD"])
    assert (verdict.layer, verdict.cause) == ("head", "readout_width")
    assert only_verdict(update_natural={"head": 1.0}, optimizers=["Adam"]).cause == "unknown"


def test_unknown_is_said_honestly():
    verdict = only_verdict(update_natural={"b": 1.2})
    assert verdict.cause == "unknown"
    assert verdict.sentence == "update 12 times its share, and none of the known causes fits"


@pytest.mark.parametrize(
    ("layer", "size", "cause"),
    [("head", 20.0, "readout_init"), ("b", 20.0, "weights_too_large"), ("b", 0.05, "weights_too_small")],
)
def test_against_the_theory(layer, size, cause):
    changed = {"weight_natural": {layer: size}, "update_natural": {"c": 99.0}, "drift_ratio": {layer: 0.1}}
    verdict = only_verdict(condition={"reference": "theory"}, **changed)
    assert (verdict.layer, verdict.quantity, verdict.cause) == (layer, "weight_natural", cause)
    assert "standard deviation" in verdict.sentence


def test_the_deviation_that_theory_has():
    verdict = only_verdict(condition={"reference": "theory"}, weight_natural={"c": 0.05})  # 256 -> 64
    assert "deviation about 0.031," in verdict.sentence  # sqrt(64 / 256) / sqrt(256)


@pytest.mark.parametrize(
    ("optimizers", "expected"),
    [
        (["AdamW", "Adam", "Optimizer", "object"], "adam"),
        (["FusedAdam"], "adam"),
        (["Lion"], "adam"),
        (["SGD", "Optimizer"], "sgd"),
        (["SGD", "AdamW"], ""),
        (["Muon", "AdamW"], ""),
        (["Shampoo"], ""),
        ([], ""),
    ],
)
def test_family_of_an_optimizer(optimizers, expected):
    assert family(optimizers) == expected


def test_every_cause_that_is_told_is_listed():
    told = set(re.findall(r'(?:return|code =) "(\w+)"', inspect.getsource(causes)))
    told |= {"readout_init", "weights_too_large"}
    assert told == set(CAUSES)
