"""Learning rates and weights that follow a rule, but one that does not fit the optimizer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from spectral_monitor import LayerInfo
from spectral_monitor.condition import NETWORK
from tests.condition.synthetic import LAYERS, ZERO, judged, measured, nothing, set_by, verdicts_on
from tests.condition.test_causes import WIDE


def rates(rule, layers=WIDE, lr=0.01):
    return {name: lr * rule(info) for name, info in layers.items()}


def sgd_rule(info):
    return info.fan_out / info.fan_in


def adam_rule(info):
    return 1 / info.fan_in


def causes(optimizer, lr=None, layers=WIDE, **changed):
    settings = set_by(optimizer, layers=layers, lr=lr)
    return {v.layer: v for v in verdicts_on(1, layers=layers, settings=settings, lr=lr or {}, **changed)}


def test_the_rule_for_sgd_under_adam_is_said_at_once():
    found = causes("AdamW", rates(sgd_rule))
    assert found[NETWORK].cause == "sgd_rule_under_adam"
    assert {v.root for layer, v in found.items() if layer != NETWORK} <= {NETWORK}
    assert "proportional to 1/fan_in" in found[NETWORK].sentence


@pytest.mark.parametrize(("optimizer", "rule"), [("SGD", sgd_rule), ("AdamW", adam_rule), ("Muon", sgd_rule)])
def test_a_rule_that_fits_is_healthy(optimizer, rule):
    assert causes(optimizer, rates(rule)) == {}


def test_rates_of_the_tangent_parametrization():
    found = causes("SGD", rates(adam_rule))
    assert found[NETWORK].cause == "ntk_scaling"
    assert "learning rates are proportional to 1/fan_in under SGD" in found[NETWORK].sentence


def test_where_every_fan_out_is_the_same_the_right_rule_for_sgd_is_not_taken_for_another():
    layers = {name: replace(info, fan_out=64) for name, info in WIDE.items()}
    assert causes("SGD", rates(sgd_rule, layers), layers) == {}


def ones(layers=WIDE, drift=0.01, size=1.0):
    """Weights with entries of size 1."""
    sizes = {name: size * math.sqrt(math.prod(info.shape)) for name, info in layers.items()}
    return {"weight_fro": sizes, "drift_ratio": dict.fromkeys(layers, drift)}


def test_weights_of_the_tangent_parametrization():
    found = causes("SGD", **ones())
    assert found[NETWORK].cause == "ntk_scaling"
    assert "weights have entries of size 1" in found[NETWORK].sentence
    assert [v.layer for v in found.values() if v.is_root] == [NETWORK], (
        "no layer is told by itself that it is too heavy"
    )
    assert NETWORK not in causes("SGD", **ones(drift=1.5)), "what exploded is no parametrization"
    assert NETWORK not in causes("Adam", **ones()), "where entries move by the learning rate, features do too"


@pytest.mark.parametrize(("outputs", "cause"), [(1.0, "ntk_scaling"), (100.0, "weights_too_large")])
def test_outputs_show_whether_the_forward_pass_divides_weights_of_size_one(outputs, cause):
    """Else weights were drawn from a unit normal distribution by mistake."""
    found = causes("SGD", **ones(), feature_rms=dict.fromkeys(WIDE, outputs))
    assert cause in {verdict.cause for verdict in found.values() if verdict.is_root}
    assert {"ntk_scaling", "weights_too_large"} - {cause} - {verdict.cause for verdict in found.values()}


@pytest.mark.parametrize(("size", "told"), [(0.49, False), (0.51, True), (1.0, True), (1.99, True), (2.01, False)])
def test_entries_of_size_one_are_so_within_a_factor_of_two(size, told):
    """In every layer."""

    def is_told(change):
        return NETWORK in (found := causes("SGD", **change)) and found[NETWORK].cause.startswith("ntk")

    assert is_told(ones(size=size)) is told
    one = ones(size=size)["weight_fro"]["b"]
    change = ones()
    change["weight_fro"]["b"] = one
    assert is_told(change) is told


@pytest.mark.parametrize(("inputs", "told"), [(16, False), (31, False), (32, True)])
def test_in_narrow_networks_entries_of_size_1_say_nothing(inputs, told):
    narrow = {name: replace(info, fan_in=inputs, shape=(info.fan_out, inputs)) for name, info in WIDE.items()}
    assert (NETWORK in causes("SGD", layers=narrow, **ones(narrow))) is told


def adapters(rank=4, width=1024):
    """A frozen layer and low-rank adapters beside three more: the first halves have many inputs, the second few."""
    first = {f"{n}.A": LayerInfo(f"{n}.A", "operator", rank, width, (rank, width)) for n in "xyz"}
    second = {f"{n}.B": LayerInfo(f"{n}.B", "operator", width, rank, (width, rank)) for n in "wxyz"}
    return {"frozen": replace(WIDE["b"], name="frozen")} | first | second


def adapted(step, update=None):
    """Adam moves every entry by 0.01; what began at zero is small for long. ``update``: of single layers."""
    layers = adapters()
    second = [name for name in layers if name.endswith(".B")]
    sizes = {name: 0.01 * math.sqrt(i.fan_in * i.fan_out) * (update or {}).get(name, 1.0) for name, i in layers.items()}
    naturals = {name: 0.01 * i.fan_in * (update or {}).get(name, 1.0) for name, i in layers.items()}
    frozen = {key: nothing("frozen") for key in ("lr", "update_ratio", "contribution")}
    changed = frozen | {
        "weight_fro": dict.fromkeys(layers, 2.0) | dict.fromkeys(second, 0.0 if step == 1 else 0.05),
        "weight_natural": dict.fromkeys(layers, 9.0) | dict.fromkeys(second, 0.0 if step == 1 else 0.05),
        "update_fro": sizes | nothing("frozen"),
        "update_natural": naturals | nothing("frozen"),
        "drift_ratio": dict.fromkeys(layers, 4.0 if step > 20 else 0.1) | nothing(*second),
    }
    return measured(step, layers=layers, reasons={f"drift_ratio/{name}": ZERO for name in second}, **changed)


def test_adapters_that_began_at_zero_say_nothing_of_how_large_weights_should_be():
    """A halves have 256 times the inputs of B halves, and naturally 256 times the natural update under Adam."""
    settings = set_by("AdamW", layers=adapters())
    settings["frozen"] = replace(settings["frozen"], frozen=True)
    measurements = [adapted(step) for step in range(1, 26)]
    naturals = measurements[-1].values["update_natural"].tolist()
    assert max(naturals[1:]) / min(naturals[1:]) == pytest.approx(256)
    assert judged(measurements, settings=settings)[1] == ()
    _, (verdict,) = judged([adapted(step, {"y.A": 30.0}) for step in range(1, 26)], settings=settings)
    assert (verdict.layer, verdict.cause) == ("y.A", "unknown")


def test_one_adam_rate_for_very_different_inputs_is_healthy():
    """Natural norms of updates go with the inputs then; entries are alike. What is odd is odd by its entries."""
    layers = WIDE | {"x": replace(LAYERS["a"], name="x", fan_in=16, shape=(64, 16))}
    sizes = {name: 0.01 * math.sqrt(i.fan_in * i.fan_out) for name, i in layers.items()}
    naturals = {name: 0.001 * i.fan_in for name, i in layers.items()}
    settings = set_by("AdamW", layers=layers)
    both = {"update_fro": sizes, "update_natural": naturals}
    assert not verdicts_on(9, layers=layers, settings=settings, **both)
    odd = {"update_fro": sizes | {"x": sizes["x"] / 100}, "update_natural": naturals}
    assert [v.layer for v in verdicts_on(9, layers=layers, settings=settings, **odd)] == ["x"]
