"""One root, one message: which verdict names the cause, what follows from it, and what shares it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spectral_monitor.condition import CAUSES, NETWORK, Judge, SpectralCondition
from spectral_monitor.condition.causes import Explanation
from spectral_monitor.condition.findings import Finding
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.root_causes import Case, rank, verdicts
from spectral_monitor.condition.row import columns
from tests.condition.synthetic import LAYERS, WATCHFUL, heavy, judged, measured, set_by

FAR = {"update_natural": {"b": 10.0}}
MANY = LAYERS | {f"x{i}": replace(LAYERS["a"], name=f"x{i}") for i in range(7)}


def case(layer, code, excess=10.0):
    """A flagged check whose explanation is given."""
    quantity = "drift_ratio" if layer == NETWORK else "update_natural"
    return Case(
        Finding("reference", layer, quantity, 8.0 * excess, 1.0, (1 / 16, 8.0)), Explanation(code, f"{code}!"), 1, 3
    )


def tree(*cases, groups=None):
    """Roots with their layers and consequences, and what follows with its root."""
    settings = set_by(layers=MANY)
    for name, group in (groups or {}).items():
        settings[name] = replace(settings[name], group=group)
    measurement = measured(4, layers=MANY)
    found = verdicts(cases, Network.read(measurement, columns(measurement), settings))
    roots = {(v.layer, v.cause): (v.layers, v.consequences) for v in found if v.is_root}
    return roots, {(v.layer, v.cause): v.root for v in found if not v.is_root}


def test_layers_of_no_known_optimizer_have_a_root_each():
    """As where a run is judged from its file: that they share no group is all that is known."""
    cases = case("b", "lr_too_large"), case("c", "lr_too_large", 5)
    assert set(tree(*cases, groups={"b": -1, "c": -1})[0]) == {("b", "lr_too_large"), ("c", "lr_too_large")}
    assert set(tree(*cases, groups={"b": 2, "c": 2})[0]) == {("b", "lr_too_large")}


def test_nothing_flagged_no_verdict():
    assert tree() == ({}, {})


def test_a_fault_in_the_settings_swallows_what_follows():
    """Whatever is further off: the learning rate of b explains them all."""
    follow = [case("a", "unknown", 99), case("c", "vanishing"), case("head", "exploding"), case(NETWORK, "diverged")]
    roots, rest = tree(case("b", "lr_too_large", 2), *follow)
    assert list(roots) == [("b", "lr_too_large")]
    layers, consequences = roots["b", "lr_too_large"]
    assert (layers, set(consequences)) == (("b",), {"a", "c", "head"}), "the network is no layer that is disturbed"
    assert rest == {(c.finding.layer, c.explanation.code): "b" for c in follow}


def test_two_faults_in_two_parameter_groups_are_two_roots():
    roots, rest = tree(case("b", "lr_too_large"), case("c", "lr_too_large", 5), case("a", "unknown"))
    assert roots == {("b", "lr_too_large"): (("b",), ("a",)), ("c", "lr_too_large"): (("c",), ())}
    assert rest == {("a", "unknown"): "b"}, "what follows is counted at the worst root"


def test_several_layers_of_one_parameter_group_are_one_root():
    """The worst names it; a rate that is too small is another fault, though in the same group."""
    some = [case("a", "lr_too_large", 2), case("b", "lr_too_large", 9), case("c", "lr_too_small", 3)]
    roots, _ = tree(*some, groups=dict.fromkeys("abc", 7))
    assert roots == {("b", "lr_too_large"): (("b", "a"), ()), ("c", "lr_too_small"): (("c",), ())}


def test_a_root_of_several_layers_says_so_and_its_remedy_is_for_all():
    lr = dict.fromkeys("ab", 1.0)
    settings = set_by(layers=MANY, lr=lr)
    settings["b"] = replace(settings["b"], group=settings["a"].group)
    updates = dict.fromkeys("ab", 10.0)
    (root,) = judged([measured(1, layers=MANY, lr=lr, update_natural=updates)], settings=settings)[1]
    assert set(root.layers) == set(root.remedy.layers) == {"a", "b"}
    assert root.sentence.endswith("use 0.01")


def test_of_one_layer_the_cause_that_stands_furthest_back_counts():
    roots, rest = tree(case("b", "unknown", 99), case("b", "weights_too_large", 2), case("b", "exploding", 9))
    assert (list(roots), rest) == ([("b", "weights_too_large")], {})


def test_of_one_layer_and_kind_of_cause_the_worst_counts():
    roots, _ = tree(case("b", "unknown", 2), case("b", "exploding", 9))
    assert list(roots) == [("b", "exploding")]


def test_what_was_wrong_before_the_first_step_stands_beside_the_settings():
    roots, rest = tree(case("b", "lr_too_large"), case("tok", "embedding_scale"), case("c", "rounding"))
    assert set(roots) == {("b", "lr_too_large"), ("tok", "embedding_scale")}
    assert rest == {("c", "rounding"): "b"}, "a small learning rate makes updates that are rounded away"


@pytest.mark.parametrize(("count", "roots"), [(2, 2), (3, 1)])
@pytest.mark.parametrize("code", ["weights_too_large", "vanishing", "exploding"])
def test_one_slip_made_in_three_layers_is_one_root(code, count, roots):
    found, _ = tree(*[case(f"x{i}", code) for i in range(count)])
    assert len(found) == roots
    assert len({layers for layers, _ in found.values()}) == roots


def test_layers_that_a_dead_one_cuts_off_follow_from_it():
    roots, rest = tree(case("b", "dead"), case("a", "dead_above"), case("c", "dead_input"))
    assert roots == {("b", "dead"): (("b",), ("a", "c"))}
    assert rest == {("a", "dead_above"): "b", ("c", "dead_input"): "b"}
    roots, _ = tree(case("a", "dead_above"), case("x0", "dead_above"))
    assert roots == {("a", "dead_above"): (("a", "x0"), ())}, "one cause, where the dead one is not measured"


def test_dead_layers_of_a_network_are_one_root():
    roots, _ = tree(case("b", "dead"), case("c", "dead"))
    assert roots == {("b", "dead"): (("b", "c"), ())}


def test_layers_that_are_left_out_for_one_reason_are_one_root():
    """As both matrices of a GRU; one that is frozen beside one that was forgotten is another fault."""
    held, frozen = case("b", "left_out"), case("c", "left_out")
    assert tree(held, frozen)[0] == {("b", "left_out"): (("b", "c"), ())}
    frozen = replace(frozen, explanation=Explanation("left_out", "it is frozen"))
    assert set(tree(held, frozen)[0]) == {("b", "left_out"), ("c", "left_out")}


def test_weights_of_the_whole_network_cover_a_layer_with_the_same_cause():
    roots, _ = tree(case(NETWORK, "weights_too_small", 2), case("head", "weights_too_small", 9))
    assert set(roots) == {(NETWORK, "weights_too_small")}
    roots, _ = tree(case(NETWORK, "left_out"), replace(case("b", "left_out"), explanation=Explanation("left_out", "b")))
    assert len(roots) == 2, "biases in no optimizer and a frozen matrix are two faults"


def test_lost_updates_explain_no_divergence():
    roots, rest = tree(case(NETWORK, "diverged"), case("b", "rounding", 99))
    assert (set(roots), rest) == ({(NETWORK, "diverged")}, {("b", "rounding"): NETWORK})
    roots, _ = tree(case(NETWORK, "diverged"), case("b", "weights_too_large"))
    assert set(roots) == {(NETWORK, "diverged"), ("b", "weights_too_large")}


def test_causes_of_the_whole_network_go_before_those_of_layers_that_show_it():
    roots, rest = tree(case(NETWORK, "rates_too_large", 2), case("b", "exploding", 9), case(NETWORK, "diverged", 99))
    assert roots == {(NETWORK, "rates_too_large"): ((), ("b",))}
    assert rest == {("b", "exploding"): NETWORK, (NETWORK, "diverged"): NETWORK}


def test_two_causes_of_the_network_are_two_roots():
    roots, _ = tree(case(NETWORK, "eps"), case(NETWORK, "momentum"))
    assert set(roots) == {(NETWORK, "eps"), (NETWORK, "momentum")}


def test_that_the_network_hardly_moves_explains_no_dead_layer():
    small = case(NETWORK, "rates_too_small", 99)
    roots, rest = tree(small, *(case(name, "dead") for name in MANY if name != "tok"))
    assert {cause for _, cause in roots} == {"dead"}
    assert (NETWORK, "rates_too_small") in rest
    roots, rest = tree(small, case("b", "dead"))
    assert (set(roots), rest) == ({("b", "dead"), (NETWORK, "rates_too_small")}, {}), (
        "nor does one dead layer explain it"
    )


def test_every_cause_has_its_place_in_the_chain():
    chain = [
        *("lr_zero", "weights_too_large", "rates_too_large", "diverged"),
        *("dead", "dead_above", "rates_too_small", "unknown"),
    ]
    assert [rank(code) for code in chain] == sorted({rank(code) for code in CAUSES})


def test_a_wrong_start_explains_updates_through_the_judge():
    changed = heavy(b=30.0) | {"drift_ratio": {"b": 0.1}, "update_natural": {"c": 400.0}}
    root, other = judged([measured(step, **changed) for step in (1, 2)])[1]
    assert (root.layer, root.cause, root.consequences) == ("b", "weights_too_large", ("c",))
    assert (other.layer, other.root, other.is_root) == ("c", "b", False)


def test_a_root_warns_once():
    judge = Judge(WATCHFUL)
    began = []
    for step in range(1, 8):
        judge.judge(measured(step, **FAR) if step != 5 else measured(5, lr={"b": 1.0}, **FAR))
        began.append([(verdict.layer, verdict.cause) for verdict in judge.began])
    assert began == [[("b", "unknown")]] + [[]] * 6, "another cause of the same layer is no news"


def test_of_several_layers_with_one_root_none_warns_again_when_the_worst_is_healthy():
    """a, b and c share a parameter group; c is the worst at first."""
    judge = Judge(SpectralCondition(ignore=["updates"]))

    def look(step, lr):
        settings = set_by("Adam", layers=MANY, lr=lr)
        settings |= {name: replace(settings[name], group=0) for name in "abc"}
        return judge.judge(measured(step, layers=MANY, lr=lr), settings)

    (root,) = look(1, {"a": 0.5, "b": 0.5, "c": 1.0})
    assert (root.layer, root.layers, judge.began) == ("c", ("c", "a", "b"), (root,))
    (root,) = look(2, {"a": 0.5, "b": 0.5})
    assert (set(root.layers), judge.began, judge.ended) == ({"a", "b"}, (), ("c",))


def test_a_cause_of_more_layers_than_were_told_warns():
    """That one of them was told for another reason is no reason to be silent of the others."""
    judge = Judge(WATCHFUL)

    def look(step, **lr):
        settings = set_by("Adam", layers=MANY, lr=lr)
        settings |= {name: replace(settings[name], group=0) for name in "abc"}
        return judge.judge(measured(step, layers=MANY, lr=lr, **FAR), settings)

    (first,) = look(1)
    assert (first.layer, judge.began) == ("b", (first,))
    (root,) = (verdict for verdict in look(2, a=5.0, b=5.0, c=5.0) if verdict.is_root)
    assert (root.cause, set(root.layers), judge.began) == ("lr_too_large", {"a", "b", "c"}, (root,))
    look(3, a=5.0, b=5.0, c=5.0)
    assert judge.began == ()


def test_what_follows_does_not_warn():
    judge = Judge(WATCHFUL)
    judge.judge(measured(1, lr={"b": 1.0}, update_natural={"b": 10.0, "c": 400.0}))
    assert [verdict.layer for verdict in judge.began] == ["b"]


def test_a_root_that_follows_for_a_while_does_not_warn_again():
    judge = Judge(WATCHFUL)
    began = []
    for step, lr in enumerate((0.01, 1.0, 1.0, 0.01, 0.01), 1):
        judge.judge(measured(step, lr={"c": lr}, update_natural={"b": 400.0}))
        began.append([verdict.layer for verdict in judge.began])
        assert judge.ended == (("c",) if step == 4 else ())
    assert began == [["b"], ["c"], [], [], []]


def test_causes_of_the_network_warn_once_each():
    judge, settings = Judge(WATCHFUL), set_by("SGD", momentum=0.999)
    began = []
    for step in range(1, 6):
        large = {"drift_ratio": dict.fromkeys(LAYERS, 50.0)} if step > 2 else {}
        judge.judge(measured(step, **large), settings if step < 4 else set_by("SGD"))
        began.append([(verdict.layer, verdict.cause) for verdict in judge.began])
    assert began == [[(NETWORK, "momentum")], [], [], [(NETWORK, "rates_too_large")], []]


@pytest.mark.parametrize("rounding", [1 - 1e-9, 1.0, 1 + 1e-9])
def test_the_order_of_equals_does_not_go_with_rounding(rounding):
    """As of the two layers in the middle of an even number, which are equally far from it."""
    found = list(tree(case("c", "unknown", 9 * rounding), case("b", "unknown", 9), case("a", "unknown", 99))[0])
    assert [layer for layer, _ in found] == ["a", "b", "c"]
