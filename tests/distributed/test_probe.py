"""The probe of a plain loop on several processes: the numbers of one process, the same training, resuming."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.distributed import probing
from tests.distributed.fitting import plain
from tests.distributed.jobs import task
from tests.distributed.numbers import differences
from tests.distributed.probing import Loop

CORE = {("ddp", "perceptron"), ("fsdp2", "transformer")}
CASES = [
    *((way, "perceptron", 2) for way in ("ddp", "ddp_static_graph", "fsdp1", "fsdp2", "tp")),
    *((way, "transformer", 2) for way in ("ddp", "fsdp1", "fsdp2", "tp")),
    ("ddp_find_unused", "mixture", 2),
    ("fsdp2", "transformer, tied", 2),
    ("hsdp", "transformer", 4),
    ("fsdp2_tp", "transformer", 4),
]


def cases(function, **arguments):
    for way, network, count in CASES:
        one = task(f"probing.{function}", count, way=way, network=network, **arguments)
        yield pytest.param(one, id=str(one), marks=() if (way, network) in CORE else pytest.mark.slow)


@cache
def alone(network, accumulate=1, **more):
    return probing.measure("", network, accumulate, **more)["measurements"]


def check_numbers(one, outcomes):
    arguments, results = dict(one.arguments), outcomes[one].get()
    expected = alone(**{key: value for key, value in arguments.items() if key != "way"})
    for result in results:
        found = differences(expected, result["measurements"])
        assert not found, f"{len(found)} differences:\n" + "\n".join(found[:40])
    assert len({repr(result["measurements"]) for result in results}) == 1, "the same in all processes"


@pytest.mark.parametrize("one", list(cases("measure")))
def test_numbers_are_those_of_one_process(outcomes, one):
    check_numbers(one, outcomes)


@pytest.mark.parametrize(
    "one",
    [
        task("probing.measure", 2, way="ddp", network="perceptron", accumulate=2),
        pytest.param(
            task("probing.measure", 2, way="fsdp2", network="transformer", accumulate=2), marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_numbers_with_accumulated_gradients(outcomes, one):
    check_numbers(one, outcomes)


CLIP = 0.02
CLIPPED = [
    ("ddp", "perceptron", 2, {}),
    ("fsdp2", "transformer", 2, {}),
    ("ddp", "perceptron", 2, {"accumulate": 2}),
    ("ddp", "deep 4, checkpoints", 2, {"quantities": "light"}),
    ("ddp_find_unused", "mixture", 2, {}),
    ("fsdp1", "perceptron", 2, {}),
    ("fsdp2", "deep 4, checkpoints", 2, {"quantities": "light"}),
    ("fsdp2_compiled", "deep 4", 2, {"quantities": "light"}),
    ("hsdp", "perceptron", 4, {}),
    ("tp", "transformer", 2, {}),
    ("fsdp2_tp", "transformer", 4, {}),
]


def clipped():
    for way, network, count, more in CLIPPED:
        one = task("probing.measure", count, way=way, network=network, largest=CLIP, **more)
        core = (way, network) in CORE and not more
        yield pytest.param(one, id=str(one), marks=() if core else pytest.mark.slow)


@pytest.mark.parametrize("one", list(clipped()))
def test_numbers_of_gradients_that_are_clipped(outcomes, one):
    """In a single process they are of the gradients before that: tests/engine/test_clipped_gradients.py."""
    check_numbers(one, outcomes)
    arguments = dict(one.arguments)
    free = alone(**{key: value for key, value in arguments.items() if key not in ("way", "largest")})[0]["values"]
    found = outcomes[one].get()[0]["measurements"][0]["values"]
    factor = found["update_norm"][0] / free["update_norm"][0]
    assert factor < 0.9, "it was clipped"
    # Contributions are <g, lr factor g>: proportional to the factor, not to its square.
    assert found["contribution"][0] == pytest.approx(factor * free["contribution"][0], rel=1e-4)


def test_there_are_verdicts_and_values_to_compare():
    for m in alone("perceptron"):
        assert m["verdicts"]
        assert m["values"]["feature_change"][0] > 0


def test_the_rows_of_one_process_would_give_other_numbers(monkeypatch):
    """So the comparison tells."""
    expected = alone("perceptron")
    monkeypatch.setattr(probing, "part", lambda way: (0, 2))
    found = differences(expected, probing.measure("", "perceptron")["measurements"])
    kinds = {text.split(": ")[1].partition("/")[0] for text in found if text.startswith("step 1")}
    assert {"update_norm", "contribution", "feature_rms", "feature_change", "alignment"} <= kinds


BITS = [
    ("ddp", "transformer, dropout", {}),
    ("fsdp2", "perceptron, dropout", {}),
    ("ddp", "perceptron, dropout", {"accumulate": 2}),
]
MORE_BITS = [
    ("ddp", "normalized", {}),
    ("ddp_static_graph", "transformer, dropout", {}),
    ("fsdp1", "transformer, dropout", {}),
    ("fsdp2", "transformer, dropout", {"accumulate": 2}),
    ("tp", "perceptron, dropout", {}),
]


def bits(cases, **more):
    for way, network, arguments in cases:
        one = task("probing.compare", 2, way=way, network=network, **arguments, **more)
        yield pytest.param(one, id=str(one), marks=() if (way, network, arguments) in BITS else pytest.mark.slow)


@pytest.mark.few(1)
@pytest.mark.parametrize("one", list(bits([*BITS, *MORE_BITS])))
def test_training_is_not_changed(outcomes, one):
    for rank, result in enumerate(outcomes[one].get()):
        assert not result["differences"], f"process {rank}"
        assert result["measured"] == 3
        assert all(result["compared"][kind] > 5 for kind in ("parameter", "optimizer", "random"))


@pytest.mark.few(1)
@pytest.mark.parametrize("one", list(bits(BITS[:2], watch="naive")))
def test_a_naive_probe_is_found_out(outcomes, one):
    for result in outcomes[one].get():
        assert result["differences"]


RESUMED = [("ddp", "perceptron", "own"), ("fsdp2", "transformer", "own"), ("ddp", "transformer", "all")]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "one", [task("probing.resume", 2, way=way, network=net, states=states) for way, net, states in RESUMED], ids=str
)
def test_goes_on_as_if_it_had_not_been_stopped(outcomes, one):
    for result in outcomes[one].get():
        assert not result["said"]
        assert len(result["resumed"]) == 3
        assert repr(result["resumed"]) == repr(result["through"][3:])


FIRST = task("probing.resume", 2, way="ddp", network="perceptron", states="first")


@pytest.mark.parametrize("one", [FIRST], ids=str)
def test_the_state_of_the_first_process_is_not_enough_for_all_which_is_said(outcomes, one):
    results = outcomes[one].get()
    said = [text for result in results for text in result["said"]]
    assert len(said) == 1
    assert "resumed at step 3: drift is counted from here (no starting weights of " in said[0]
    assert len({repr(result["resumed"]) for result in results}) == 1


@pytest.mark.parametrize("one", [task("probing.save", 2, way="ddp", network="perceptron")], ids=str)
def test_on_another_number_of_processes_the_weights_at_the_start_are_kept(outcomes, one):
    saved = outcomes[one].get()
    through = Loop("", "perceptron")
    whole = through.probe(drift_every=1, replay_samples=None, tol=1e-6)
    list(through.train(range(6), whole))
    loop = Loop("", "perceptron", shift=0.5)
    probe = loop.probe(drift_every=1, replay_samples=None, tol=1e-6)
    loop.net.load_state_dict(saved[0]["model"])
    loop.optimizer.load_state_dict(saved[0]["optimizer"])
    with pytest.warns(UserWarning, match="feature_drift is counted from here"):
        probe.load_state_dict([result["probe"] for result in saved])
    list(loop.train(range(3, 6), probe))
    expected, found = ([plain(m) for m in some] for some in (list(whole.measurements)[3:], probe.measurements))
    for m in [*expected, *found]:
        m["values"].pop("feature_drift")
    assert not differences(expected, found)
    with pytest.raises(ValueError, match="an empty list of states"):
        probe.load_state_dict([])


@pytest.mark.parametrize("one", [task("probing.speaks", 2)], ids=str)
def test_the_first_process_speaks_for_all(outcomes, one):
    first, second = outcomes[one].get()
    assert (first["steps"], first["closed"]) == ([1, 2], 1)
    assert first["told"] > 0
    assert first["said"]
    assert (second["steps"], second["closed"], second["told"], second["said"]) == ([], 0, 0, [])
    assert first["stop"]
    assert second["stop"]


REFUSED = {
    "tp without a number": (2, r"up\.weight is sharded by more than FSDP, .* set data_parallel_rank, .*get_local_rank"),
    "fsdp2_tp without a number": (4, "is sharded by more than FSDP"),
    "a number out of range": (2, "data_parallel_rank must be an integer from 0 to 1, got 2"),
    "other weights": (2, r"process 1 holds other weights of up, .* make the probe when the model is wrapped"),
    "other layers": (2, r"differ|\(8, 4\)"),
    "another state": (2, "the saved state belongs to other layers"),
}


@pytest.mark.parametrize(
    ("one", "sentence"),
    [
        pytest.param(task("probing.refused", count, what=what), sentence, id=what, marks=() if count == 2 else slow)
        for slow in [pytest.mark.slow]
        for what, (count, sentence) in REFUSED.items()
    ],
)
def test_what_does_not_fit_is_refused_in_all_processes(outcomes, one, sentence):
    for said in outcomes[one].get():
        assert re.search(sentence, said), said


@pytest.mark.parametrize("one", [task("probing.told", 2, rank=1, key="every_n_steps", value=5)], ids=str)
def test_options_that_differ_are_refused_in_all_processes(outcomes, one):
    for said in outcomes[one].get():
        assert said.startswith("every_n_steps is 5 in process 1 and 1 in process 0")
