"""Which learning rates stand out from the others, and which differ on purpose, held against rates that were planted."""

from __future__ import annotations

import pytest

from spectral_monitor import LayerInfo
from spectral_monitor.condition.optimizers.rates import RULES, follows, rates, rule_of

FANS = ((64, 784), (256, 64), (64, 256), (256, 64), (64, 256), (10, 64))
"""Outputs and inputs of six layers, of which the last is the readout."""


def rated(*lrs, fans=FANS, names="abcdefghijklmnopqrstuvwxyz", last="readout"):
    """Matrices with these learning rates, in the order of the model."""
    found = []
    for i, lr in enumerate(lrs):
        fan_out, fan_in = fans[i % len(fans)]
        role = last if i == len(lrs) - 1 else "operator"
        found.append((LayerInfo(names[i], role, fan_out, fan_in, (fan_out, fan_in)), lr))
    return found


def table(lr, name="tok"):
    return LayerInfo(name, "embedding", 64, 1, (1000, 64)), lr


def by_rule(rule, unit=0.01, **off):
    """Six layers whose learning rates follow a rule; ``off``: name -> factor."""
    return [(info, unit * RULES[rule](info) * off.get(info.name, 1.0)) for info, _ in rated(*[1.0] * 6)]


def factors(given, **how):
    return {name: rate.factor for name, rate in rates(given, **how).items()}


def purposes(given, **how):
    return {name: rate.purpose for name, rate in rates(given, **how).items() if rate.purpose}


@pytest.mark.parametrize("rule", RULES)
def test_rates_that_follow_a_rule_have_no_odd_one(rule):
    given = by_rule(rule)
    assert factors(given) == pytest.approx(dict.fromkeys("abcdef", 1.0))
    assert rule_of(given) == rule


@pytest.mark.parametrize("factor", [100.0, 0.01])
@pytest.mark.parametrize("layer", "abcde")
@pytest.mark.parametrize("rule", RULES)
def test_one_layer_off_a_rule_is_held_against_the_rule(rule, layer, factor):
    given = by_rule(rule, **{layer: factor})
    found = rates(given)
    assert factors(given) == pytest.approx(dict.fromkeys("abcdef", 1.0) | {layer: factor})
    assert found[layer].usual_lr == pytest.approx(0.01 * RULES[rule](given["abcdef".index(layer)][0]))
    assert rule_of(given) == ""


def test_a_rule_must_tell_layers_apart():
    alike = rated(*[0.01] * 4, fans=((64, 64),))
    assert follows("one rate", alike)
    assert not follows("1/fan_in", alike)
    assert rule_of(alike) == "one rate", "the plainest"
    assert rule_of([]) == ""


def test_without_a_majority_rates_are_held_against_their_median():
    given = rated(0.001, 0.004, 0.002, 0.016, 0.008)
    assert [rate.usual_lr for rate in rates(given).values()] == pytest.approx([0.004] * 5)


def test_learning_rates_of_zero_are_left_out():
    assert set(rates(rated(0.01, 0.0, 0.01, 0.01))) == {"a", "c", "d"}
    assert rates(rated(0.0, 0.0)) == rates([]) == {}


DECAY = 0.5


def ladder(per_level=1, levels=5, head=1.0, **off):
    lrs = [0.01 * DECAY ** (levels - k // per_level) for k in range(levels * per_level)]
    given = rated(*lrs, 0.01 * head, fans=((64, 64),))
    return [(info, lr * off.get(info.name, 1.0)) for info, lr in given]


@pytest.mark.parametrize("per_level", [1, 2])
@pytest.mark.parametrize("head", [1.0, 10.0])
def test_layer_wise_decay_is_no_fault(per_level, head):
    assert set(factors(ladder(per_level, head=head)).values()) == {1.0}


@pytest.mark.parametrize("factor", [30.0, 1 / 30])
@pytest.mark.parametrize("layer", "bcde")
def test_a_faulty_layer_in_layer_wise_decay_is_held_against_its_neighbours(layer, factor):
    """The geometric mean of the rates before and behind it is what a constant decay makes of it."""
    given = ladder(**{layer: factor})
    assert factors(given) == pytest.approx(dict.fromkeys("abcdef", 1.0) | {layer: factor})
    assert rates(given)[layer].usual_lr == pytest.approx({i.name: lr for i, lr in ladder()}[layer])


def test_rates_that_fall_towards_the_readout_are_layer_wise_decay_upside_down():
    """Then layers are held against the one in the middle; in fine-tuning the readout is what learns most."""
    given = rated(*[0.01 * DECAY**k for k in range(7)], fans=((64, 64),))
    assert factors(given) == pytest.approx({name: DECAY ** (k - 3) for k, name in enumerate("abcdefg")})


def test_a_faulty_layer_between_two_rates_is_no_layer_wise_decay():
    """Put where its neighbours say, it makes any three rates a ladder of two equal steps."""
    given = rated(0.001, 0.001, 1.0, 0.01, 0.01, 0.01, 0.01, 0.01, fans=((64, 64),))
    assert rates(given)["c"].usual_lr == 0.01
    assert rates(given)["c"].factor == pytest.approx(100)


def test_steps_of_different_heights_are_no_layer_wise_decay():
    """Two layers a level, so that none stands alone; only the last step, to the head, may be another one."""
    heights = (1, 1.5, 1.5**2, 3 * 1.5**2, 3 * 1.5**3)
    given = rated(*[0.001 * height for height in heights for _ in range(2)], fans=((64, 64),))
    assert set(factors(given).values()) != {1.0}


def test_rates_without_order_are_no_layer_wise_decay():
    given = rated(0.01, 0.02, 0.005, 0.08, 0.0025, 0.04, fans=((64, 64),))
    assert len(set(factors(given).values())) == 6


@pytest.mark.parametrize(("factor", "purpose"), [(10.0, "a head"), (100.0, ""), (0.1, ""), (2.0, "a head")])
def test_a_head_may_learn_ten_times_as_fast(factor, purpose):
    given = rated(*[0.01] * 5, 0.01 * factor)
    assert purposes(given).get("f", "").startswith(purpose)
    assert bool(purposes(given)) == bool(purpose)
    assert rates(given)["f"].factor == pytest.approx(1.0 if purpose else factor)


def test_new_layers_behind_a_backbone_may_learn_ten_times_as_fast():
    new = rated(*[0.001] * 4, 0.01, 0.01)
    assert purposes(new) == dict.fromkeys("ef", "new layers with a rate of their own")
    assert set(factors(new).values()) == {1.0}
    assert purposes(rated(*[0.001] * 4, 0.1, 0.1)) == {}, "a hundred times is no recipe"
    assert purposes(rated(0.001, 0.01, 0.01, *[0.001] * 4)) == {}, "nor are layers in the middle"


def test_a_backbone_may_learn_a_tenth_as_fast():
    slow = rated(0.001, 0.001, *[0.01] * 4)
    assert purposes(slow) == dict.fromkeys("ab", "a backbone with a rate of its own")
    assert purposes(rated(0.0001, 0.0001, *[0.01] * 4)) == {}
    assert purposes(rated(0.001, *[0.01] * 5)) == {}, "one layer is no backbone"
    assert purposes(rated(0.015, 0.015, *[0.01] * 4)) == {}, "nor is what learns faster"


def adapters(times, blocks=4):
    names = [f"h.{i}.lora_{part}.weight" for i in range(blocks) for part in "AB"]
    return rated(*[1e-4, times * 1e-4] * blocks, names=names, last="operator", fans=((64, 64),))


def test_slow_layers_that_are_not_the_first_are_no_backbone():
    infos = [LayerInfo(name, "operator", 8, 8, (8, 8)) for name in ("up", "gate", "mix", "down", "out")]
    slow = [(info, 0.001 if info.name in ("gate", "down") else 0.01) for info in infos]
    assert rates(slow)["gate"].factor == pytest.approx(0.1)
    first = [(info, 0.001 if info.name in ("up", "gate") else 0.01) for info in infos]
    assert rates(first)["gate"].factor == 1


@pytest.mark.parametrize(("times", "meant"), [(16.0, True), (4.0, True), (31.9, True), (32.1, False)])
def test_one_kind_of_layer_may_have_a_rate_of_its_own(times, meant):
    """LoRA+ gives its B matrices 16 times the rate of the A matrices."""
    given = adapters(times)
    assert bool(purposes(given)) is meant
    assert all("lora_" in purpose for purpose in purposes(given).values())
    assert list(factors(given).values()) == pytest.approx([1.0, 1.0 if meant else times] * 4)


def test_layers_that_share_no_part_of_their_names_are_no_kind():
    given = rated(*[1e-4, 1e-4, 1.6e-3, 1e-4, 1.6e-3, 1e-4, 1e-4, 1e-4], fans=((64, 64),))
    assert purposes(given) == {}


@pytest.mark.parametrize(
    ("times", "meant"), [(10.0, True), (31.9, True), (32.1, False), (1 / 31.9, True), (1 / 32.1, False)]
)
def test_embeddings_may_have_a_rate_of_their_own(times, meant):
    given = [table(0.01 * times), *rated(*[0.01] * 4)]
    assert bool(purposes(given)) is meant
    assert rates(given)["tok"].factor == pytest.approx(1.0 if meant else times)
    assert purposes([table(0.01), *rated(*[0.01] * 4)]) == {}


def test_embeddings_beside_a_rule_of_fans_have_a_rate_of_their_own_whatever_it_is():
    """muP: the rate of an embedding does not go with the width, that of the others does."""
    assert purposes([table(3.0), *by_rule("1/fan_in")]) == {"tok": "embeddings with a rate of their own"}


def test_embeddings_do_not_decide_what_is_usual():
    given = [table(1.0, "x"), table(1.0, "y"), table(1.0, "z"), *rated(*[0.01] * 3)]
    assert [rates(given)[name].usual_lr for name in "abcx"] == pytest.approx([0.01] * 4)


def test_beside_fewer_than_three_matrices_embeddings_count():
    """Muon leaves embeddings and the readout to AdamW: two embeddings and a head at one rate, or at another."""
    given = [table(0.01, "tok"), table(0.01, "pos"), *rated(1.0)]
    assert rates(given)["a"].usual_lr == 0.01


def two_rates(**steps):
    """Seven layers of which four have one rate and three a hundredth of it, in no order that says why."""
    given = rated(0.1, 0.001, 0.1, 0.001, 0.1, 0.001, 0.1, fans=((64, 64),), last="operator")
    return {name for name, factor in factors(given, steps=steps).items() if factor == pytest.approx(1)}


def test_of_two_rates_that_are_about_as_frequent_the_one_with_healthy_steps_is_usual():
    fast, slow = dict.fromkeys("aceg", 0.05), dict.fromkeys("bdf", 0.0005)
    assert two_rates(**fast, **slow) == set("aceg")
    fast, slow = dict.fromkeys("aceg", 5.0), dict.fromkeys("bdf", 0.05)
    assert two_rates(**fast, **slow) == set("bdf")


def test_without_steps_the_more_frequent_rate_is_usual():
    assert two_rates() == set("aceg")
    assert rates(rated(0.1, 0.001, 0.1, fans=((64, 64),), last="operator"))["b"].usual_lr == 0.1


def test_a_rate_of_a_few_is_no_rival_however_healthy_its_steps():
    given = rated(*[0.1] * 4, 0.001, *[0.1] * 4, fans=((64, 64),), last="operator")
    steps = dict.fromkeys("abcdfghi", 6.0) | {"e": 0.06}
    assert factors(given, steps=steps)["e"] == pytest.approx(0.01)


@pytest.mark.parametrize(("many", "few", "usual"), [(6, 2, 0.1), (5, 2, 0.001), (9, 3, 0.1), (8, 3, 0.001)])
def test_a_rate_of_three_quarters_of_the_layers_has_no_rival(many, few, usual):
    """Whatever its steps; with a layer less the other rate, whose steps are healthy, is the usual one."""
    lrs = [0.001 if k % 3 == 1 and k < 3 * few else 0.1 for k in range(many + few)]
    given = rated(*lrs, fans=((64, 64),), last="operator")
    steps = {info.name: 6.0 if lr == 0.1 else 0.06 for info, lr in given}
    assert {rate.usual_lr for rate in rates(given, steps=steps).values()} == {usual}


def test_a_declared_factor_is_taken_out():
    given = rated(*[0.01] * 5, 1.0)
    assert factors(given)["f"] == pytest.approx(100)
    assert factors(given, expected={"f": 100.0})["f"] == pytest.approx(1)
    found = rates(rated(*[0.01] * 6), expected={"f": 100.0})["f"]
    assert (found.usual_lr, found.factor) == (pytest.approx(1.0), pytest.approx(0.01)), (
        "what deviates from it is judged"
    )


def test_one_layer_is_never_the_rule_of_two_others():
    infos = [LayerInfo(name, "operator", 8, 8, (8, 8)) for name in "abc"]
    rated = [(info, 0.1 if info.name == "b" else 0.001) for info in infos]
    steps = {"a": 0.9, "b": 0.06, "c": 0.9}  # as if the fast one were the healthy one
    assert {name: round(rate.factor, 2) for name, rate in rates(rated, steps=steps).items()} == {
        "a": 1,
        "b": 100,
        "c": 1,
    }


def test_of_two_layers_the_one_with_the_healthier_steps_has_the_usual_rate():
    infos = [LayerInfo(name, "operator", 8, 8, (8, 8)) for name in "ab"]
    rated = [(infos[0], 0.1), (infos[1], 0.001)]
    assert rates(rated, steps={"a": 6.0, "b": 0.06})["a"].factor == pytest.approx(100)
    assert rates(rated, steps={"a": 0.06, "b": 0.0006})["b"].factor == pytest.approx(0.01)


def test_an_input_layer_with_the_rate_of_biases_has_it_on_purpose():
    infos = [LayerInfo(name, "operator", 8, 8, (8, 8)) for name in "abcd"]
    rated = [(info, 0.008 if info.name == "a" else 0.001) for info in infos]
    assert rates(rated, vectors=0.008)["a"].factor == 1
    assert rates(rated, vectors=0.001)["a"].factor == pytest.approx(8), "only its own bias has it"
    odd = [(info, 0.008 if info.name == "b" else 0.001) for info in infos]
    assert rates(odd, vectors=0.008)["b"].factor == pytest.approx(8), "it is not the first"


def test_a_single_matrix_between_them_makes_no_mup():
    infos = [LayerInfo(n, "readout" if n == "readout" else "operator", 8, 8, (8, 8)) for n in ("first", "b", "readout")]
    found = rates([(info, 0.001 / (64 if info.name == "b" else 1)) for info in infos], vectors=0.001)
    assert found["b"].factor == pytest.approx(1 / 64)


@pytest.mark.parametrize("ratio", [4.0, 64.0])
def test_input_and_output_with_the_rate_of_biases_are_those_of_mup(ratio):
    names = ["first", "b", "c", "readout"]
    infos = [LayerInfo(n, "readout" if n == "readout" else "operator", 8, 8, (8, 8)) for n in names]
    lr = {"first": 0.001, "b": 0.001 / ratio, "c": 0.001 / ratio, "readout": 0.001}
    found = rates([(info, lr[info.name]) for info in infos], vectors=0.001)
    assert all(rate.factor == 1 for rate in found.values())
    assert found["readout"].usual_lr == pytest.approx(0.001 / ratio)
    lr["b"] *= 100
    found = rates([(info, lr[info.name]) for info in infos], vectors=0.001)
    assert max(found, key=lambda name: found[name].factor) == "b", "a fault between them is still one"
