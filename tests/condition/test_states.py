"""Every matrix is healthy, off or not judged, and says why."""

from __future__ import annotations

from dataclasses import replace

from spectral_monitor.condition import Judge, SpectralCondition
from spectral_monitor.measurement import HEALTHY as GOOD
from spectral_monitor.measurement import NOT_JUDGED, NOT_STEPPED, OFF, LayerState
from tests.condition.synthetic import LAYERS, ZERO, judged, measured, nothing, set_by

FAR = {"update_natural": {"b": 10.0}}
UNMOVED = ("update_natural", "update_ratio", "contribution", "drift_ratio")


def states(*measurements, **how):
    return judged(measurements, **how)[0].states


def not_judged(reason):
    return LayerState(NOT_JUDGED, reason)


def test_every_matrix_has_a_state_and_vectors_have_none():
    found = states(measured(1))
    assert found == dict.fromkeys(("tok", "a", "b", "c", "head"), LayerState(GOOD))


def test_what_is_off_says_so_by_its_cause():
    found = states(measured(1, lr={"b": 1.0}, **FAR))
    assert found["b"] == LayerState(OFF, "lr_too_large")
    assert found["a"] == LayerState(GOOD)


def test_what_follows_names_its_root():
    found = states(measured(1, lr={"b": 1.0}, update_natural={"b": 10.0, "c": 400.0}))
    assert found["b"] == LayerState(OFF, "lr_too_large")
    assert found["c"] == LayerState(OFF, "follows from b")


def test_a_frozen_layer_is_not_judged():
    settings = set_by("Adam")
    settings["b"] = replace(settings["b"], frozen=True)
    still = {key: nothing("b") for key in UNMOVED}
    assert states(measured(1, **still), settings=settings)["b"] == not_judged("frozen")


def test_a_layer_that_no_optimizer_holds_is_not_judged():
    why = "no optimizer updates it"
    found = states(measured(1, reasons={"update_natural/b": why}, **{key: nothing("b") for key in UNMOVED}))
    assert found["b"] == not_judged(why)
    assert states(measured(1, **{key: nothing("b") for key in UNMOVED}))["b"] == not_judged(
        "its update was not measured"
    )


def still(**changed):
    """A measurement in which nothing moves."""
    return measured(
        1, **dict.fromkeys(("update_natural", "update_ratio", "contribution"), dict.fromkeys(LAYERS, 0.0)), **changed
    )


def test_where_every_learning_rate_is_0_nothing_is_judged():
    found = states(still(lr=dict.fromkeys(LAYERS, 0.0)))
    assert set(found.values()) == {not_judged("every learning rate is 0")}


def test_where_no_optimizer_holds_anything_nothing_is_judged():
    found = states(still(lr=nothing(*LAYERS)))
    assert set(found.values()) == {not_judged("no optimizer holds its parameters")}


def test_where_everything_is_frozen_nothing_is_judged():
    found = states(still(), settings=set_by("Adam", frozen=True))
    assert set(found.values()) == {not_judged("every layer is frozen")}


def test_a_judge_that_was_told_no_settings_does_not_say_that_no_optimizer_holds_them():
    found = states(measured(1, only=["update_natural", "update_ratio"]))
    assert found["a"] == LayerState(GOOD)


def test_layers_wait_for_one_that_began_at_zero():
    growing = measured(
        1, weight_natural={"head": 0.0}, reasons={"update_ratio/head": ZERO}, update_ratio=nothing("head")
    )
    found = states(growing)
    assert found["a"] == found["head"] == not_judged("waits until head has grown from zero")
    assert found["tok"] == LayerState(GOOD), "an embedding is compared with nothing"


def test_an_only_layer_has_nothing_to_be_compared_with():
    layers = {"a": LAYERS["a"]}
    found = states(measured(1, layers=layers, only=["update_natural", "lr"]))
    assert found == {"a": not_judged("no other layer to compare it with")}
    found = states(measured(1, layers=layers, only=["update_natural", "update_ratio", "lr"]))
    assert found == {"a": LayerState(GOOD)}, "its steps were held against its own size"


def test_tied_layers_have_one_state():
    """A matrix that is embedding and readout at once is judged as readout; three that share one are one."""
    adam = set_by("Adam")
    found = states(measured(1, update_natural={"head": 999.0}), tied={"head": "tok"}, settings=adam)
    assert found["head"] == found["tok"] == LayerState(OFF, "unknown")
    layers = LAYERS | {"tok2": replace(LAYERS["tok"], name="tok2")}
    fast = measured(1, layers=layers, update_natural={"head": 999.0})
    found = states(fast, tied={"head": "tok", "tok2": "tok"}, settings=adam)
    assert found["head"] == found["tok"] == found["tok2"] == LayerState(OFF, "unknown")
    assert states(measured(1), tied={"head": "a"})["head"] == LayerState(GOOD)


def test_each_pair_of_tied_layers_has_its_own():
    layers = {"z": replace(LAYERS["tok"], name="z")} | LAYERS
    tied = {"b": "z", "head": "tok"}
    found = states(
        measured(1, layers=layers, update_natural={"head": 999.0}), tied=tied, settings=set_by(layers=layers)
    )
    assert found["tok"] == found["head"] == LayerState(OFF, "unknown")
    assert found["z"] == found["b"] == LayerState(GOOD)


def test_a_state_stands_while_optimizers_take_turns():
    """As many measurements as there are optimizers; layers that none holds are no further one."""
    settings = {name: replace(its, owner=0) for name, its in set_by("Adam").items()}
    settings |= {"head": replace(settings["head"], owner=1), "c": replace(settings["c"], owner=-1)}
    waiting = {key: nothing("head") for key in UNMOVED}
    judge, found = Judge(SpectralCondition()), []
    for step in range(1, 6):
        waits = {"reasons": {"update_natural/head": NOT_STEPPED}, **waiting} if step > 1 else {}
        judge.judge(measured(step, **waits), settings)
        found.append(judge.states["head"])
    assert found == [LayerState(GOOD)] * 3 + [not_judged(NOT_STEPPED)] * 2
