"""Weights that FSDP has gathered, and freed or spread again."""

from functools import cache

import pytest

from tests.distributed import gathered
from tests.distributed.jobs import task
from tests.distributed.numbers import differences


@cache
def alone():
    return gathered.measure("")


@pytest.mark.few(1)
@pytest.mark.parametrize("one", [task("gathered.measure", 2, way=way) for way in ("fsdp2", "fsdp1")], ids=str)
def test_who_holds_gathered_weights_is_measured_as_alone(outcomes, one):
    expected = alone()
    queries = [layer["name"] for layer in expected[0]["layers"]].index("net.queries")
    assert len([m for m in expected if m["values"]["alignment"][queries] > 0]) == 3, "what a parameter went into"
    for result in outcomes[one].get():
        assert not differences(expected, result)


@pytest.mark.parametrize("one", [task("gathered.refusals", 2)], ids=str)
def test_all_processes_refuse_to_rescale_what_is_spread(outcomes, one):
    """Though the first one has all of the first matrix, and nothing of the last."""
    words = "is sharded over processes: rescale the weights before the module is sharded"
    results = outcomes[one].get()
    assert results[0] == results[1]
    for name, sentence in zip(("up", "net.up"), results[0], strict=True):
        assert sentence == f"{name!r} {words}"
