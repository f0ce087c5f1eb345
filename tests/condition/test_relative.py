"""Rates that differ on purpose, as factors of the largest of their optimizer."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from spectral_monitor.condition.optimizers.rates import RULES
from spectral_monitor.condition.optimizers.recipe import relative_rates
from tests.condition.synthetic import LAYERS, set_by


def factors(lr=None, rule="one rate", layers=LAYERS, now=1.0, **changed):
    """Layer -> factor, where a layer's peak is so many times 0.01 by the rule; ``changed``: fields of settings."""
    peaks = {name: 0.01 * RULES[rule](info) * (lr or {}).get(name, 1.0) for name, info in layers.items()}
    given = set_by("AdamW", layers=layers)
    settings = {name: replace(of, peak=peaks[name], lr=now * peaks[name]) for name, of in given.items()}
    settings = {name: replace(of, **changed.get(name.replace(".", "_"), {})) for name, of in settings.items()}
    return relative_rates([SimpleNamespace(info=info) for info in layers.values()], settings)


ONE = dict.fromkeys(LAYERS, 1.0)


def test_one_rate_for_all_is_the_largest_of_all():
    assert factors() == ONE
    assert factors(now=0.1) == ONE, "peaks count, not a warm-up"


def test_a_head_on_purpose_is_the_largest_and_the_others_are_parts_of_it():
    assert factors({"head": 5.0}) == pytest.approx(dict.fromkeys(LAYERS, 1 / 5) | {"head": 1.0})
    assert factors({"head": 1.04}) == ONE, "the same, but for rounding"


@pytest.mark.parametrize("layer", ["b", "c"])
@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_a_rate_that_stands_out_for_no_reason_counts_as_one(layer, factor):
    assert factors({layer: factor}) == ONE


@pytest.mark.parametrize(("factor", "kept"), [(10.0, 10.0), (0.1, 0.1), (0.5, 0.5), (11.0, 1.0), (0.09, 1.0)])
def test_biases_may_have_up_to_ten_times_the_rate_or_a_tenth(factor, kept):
    assert factors({"b.bias": factor}) == pytest.approx(ONE | {"b.bias": kept})


@pytest.mark.parametrize("rule", ["1/fan_in", "fan_out/fan_in"])
def test_what_follows_a_rule_of_width_counts_as_one(rule):
    hidden = {name: info for name, info in LAYERS.items() if info.role != "embedding"}
    assert factors(rule=rule, layers=hidden) == dict.fromkeys(hidden, 1.0)


def test_layer_wise_decay_is_kept_and_vectors_are_held_against_its_middle():
    names = [f"l{k}" for k in range(5)]
    layers = {name: replace(LAYERS["a"], name=name) for name in names}
    layers["l0.bias"] = replace(LAYERS["a.bias"], name="l0.bias")
    decay = {name: 0.5 ** (4 - k) for k, name in enumerate(names)}
    found = factors(decay | {"l0.bias": 1 / 16}, layers=layers)
    assert found == pytest.approx(decay | {"l0.bias": 1 / 16})


def test_frozen_layers_and_rates_of_zero_are_left_out():
    gone = {"a": {"frozen": True}, "b": {"peak": 0.0}, "a_bias": {"frozen": True}, "b_bias": {"peak": 0.0}}
    assert set(factors(**gone)) == {"tok", "c", "c.bias", "head"}
    assert factors({"head": 5.0}, head={"frozen": True, "peak": 0.05}) == {k: 1.0 for k in LAYERS if k != "head"}


def test_each_optimizer_has_a_largest_rate_of_its_own():
    apart = {"owner": 1, "peak": 3.0}
    found = factors({"head": 5.0}, tok=apart, a=apart, a_bias=apart | {"peak": 1.5})
    rest = {"b": 0.2, "b.bias": 0.2, "c": 0.2, "c.bias": 0.2, "head": 1.0}
    assert found == pytest.approx({"tok": 1.0, "a": 1.0, "a.bias": 0.5} | rest)
