"""The kind of recipe in a sentence, as it is told once."""

from __future__ import annotations

import pytest

from spectral_monitor.condition.optimizers.rates import RULES
from spectral_monitor.condition.optimizers.recipe import describe
from tests.condition.synthetic import LAYERS, set_by


def told(optimizer="AdamW", rule="one rate", settings=None, **off):
    lrs = {name: 0.01 * RULES[rule](info) * off.get(name, 1.0) for name, info in LAYERS.items()}
    return describe(LAYERS.values(), settings or set_by(optimizer, lr=lrs))


@pytest.mark.parametrize(
    ("optimizer", "rule", "start"),
    [
        ("AdamW", "one rate", "one AdamW rate for all matrices (standard parametrization)"),
        ("AdamW", "1/fan_in", "AdamW rates proportional to 1/fan_in (muP)"),
        ("AdamW", "fan_out/fan_in", "AdamW rates proportional to fan_out/fan_in, which is the rule for SGD"),
        ("SGD", "one rate", "one SGD rate for all matrices (standard parametrization)"),
        ("SGD", "fan_out/fan_in", "SGD rates proportional to fan_out/fan_in (spectral parametrization)"),
        ("SGD", "1/fan_in", "SGD rates proportional to 1/fan_in (neural tangent parametrization)"),
        ("Muon", "one rate", "Muon for hidden matrices"),
        ("Rocket", "one rate", ""),
    ],
)
def test_each_kind_has_its_sentence(optimizer, rule, start):
    assert told(optimizer, rule).startswith(start)
    assert bool(told(optimizer, rule)) == bool(start)


def test_what_has_a_rate_of_its_own_is_said_besides():
    """The head is left out when the rule of the others is looked for."""
    sentence = told(head=10.0)
    assert sentence.startswith("one AdamW rate for all matrices")
    assert sentence.endswith("; a head with a rate of its own (10 times the others')")


def test_a_rate_that_stands_out_is_no_part_of_a_recipe():
    assert told(b=100.0) == ""


def test_each_optimizer_has_its_own_part():
    settings = set_by("Muon") | {name: of for name, of in set_by("AdamW", owner=1).items() if name in ("tok", "head")}
    assert told(settings=settings) == "Muon for hidden matrices: its updates have the same size at any width"


def test_it_is_told_of_peaks_not_of_a_warm_up():
    assert told(settings=set_by("AdamW", lr={"b": 1e-5}, peak=0.01)).startswith("one AdamW rate")
    assert told(settings=set_by("AdamW", peak=0.0)) == ""


def test_frozen_layers_do_not_count():
    frozen = set_by("AdamW", lr={"b": 1.0}, frozen=True)
    assert told(settings=frozen) == ""
    assert told(settings=set_by("AdamW") | {"b": frozen["b"]}).startswith("one AdamW rate")


@pytest.mark.parametrize(("names", "told_of"), [(("a", "b"), True), (("a", "head"), True), (("a", "tok"), False)])
def test_a_recipe_takes_two_matrices_of_features(names, told_of):
    sentence = describe([LAYERS[name] for name in names], set_by("AdamW"))
    assert sentence.startswith("one AdamW rate") is told_of
    assert bool(sentence) is told_of


def test_without_settings_nothing_is_told():
    assert describe(LAYERS.values(), {}) == ""


def test_two_matrices_make_a_recipe_and_one_does_not():
    adam, muon = set_by("AdamW"), set_by("Muon", owner=1)
    assert told(settings=muon | {name: adam[name] for name in ("b", "c")}).count("one AdamW rate") == 1
    assert "AdamW" not in told(settings=muon | {"b": adam["b"]})
