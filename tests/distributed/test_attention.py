"""Attention on several processes: the same on all of them, and what is spread has a reason."""

import pytest

from tests.distributed import attending
from tests.distributed.jobs import task

WEIGHTS = {"qk_gain", "qk_update"}
WAYS = {"ddp": set(), "fsdp2": WEIGHTS, "fsdp1": WEIGHTS, "fsdp1_nested": WEIGHTS, "tp": set(attending.KEYS) - WEIGHTS}
"""Way -> what is missing."""


@pytest.mark.few(1)
@pytest.mark.parametrize("one", [task("attending.measure", 2, way=way) for way in WAYS], ids=str)
def test_all_processes_say_the_same(outcomes, one):
    way = dict(one.arguments)["way"]
    expected = attending.measure("")["values"]
    first, second = outcomes[one].get()
    assert first["why"].keys() == second["why"].keys() == WAYS[way]
    assert all(first["why"].values())
    for key in set(attending.KEYS) - WAYS[way]:
        assert first["values"][key] == second["values"][key]
        if key in WEIGHTS:
            assert first["values"][key] == pytest.approx(expected[key], rel=1e-4)
        else:  # of samples of other sequences
            assert first["values"][key] == pytest.approx(expected[key], rel=0.5)
