"""A measured step sends as many messages for 40 layers as for 4, and no weight is among them."""

from collections import Counter

import pytest

from tests.distributed.jobs import task

WAYS = ("ddp", "fsdp2", "tp")


def of(way, network, watcher="monitor", count=2):
    return task("counting.count", count, way=way, network=network, watcher=watcher)


def monitors(result):
    return [one for one in result["sent"] if one["by"] == "monitor"]


def gathered(result):
    """What of the monitor's own messages can hold a weight."""
    kinds = ("gather", "scatter", "alltoall", "all_to_all", "broadcast")
    smallest = result["smallest_matrix"]
    return [
        one for one in monitors(result) if any(kind in one["name"] for kind in kinds) and 2 * one["size"] >= smallest
    ]


def pairs(watcher):
    return [pytest.param([of(way, "deep 4", watcher), of(way, "deep 40", watcher)], id=way) for way in WAYS]


@pytest.mark.few(1)
@pytest.mark.parametrize("pair", pairs("monitor"))
def test_the_number_does_not_depend_on_depth(outcomes, pair):
    """It is that of the longest Lanczos iteration, whatever else goes on beside it, and a few."""
    few, many = (outcomes[one].get() for one in pair)
    for shallow, deep in zip(few, many, strict=True):
        assert shallow["measured"] == deep["measured"] == 2
        rest = []
        for result in (shallow, deep):
            names = Counter(one["name"] for one in monitors(result))
            assert set(names) == {"allreduce_"}
            assert names["allreduce_"] <= 2 * result["steps"] + 4
            rest.append(names["allreduce_"] - result["sums"])
        assert rest[0] == rest[1] <= 5
        assert abs(shallow["steps"] - deep["steps"]) <= 3  # ten times as many matrices, the hardest of which counts


ALIKE = [
    task("counting.count", 2, way="fsdp2", network=f"alike {depth}", batch=0, quantities=("weight_natural",))
    for depth in (4, 40)
]


@pytest.mark.parametrize("pair", [ALIKE], ids=["fsdp2"])
def test_where_no_layer_is_harder_than_the_others_it_is_the_very_same(outcomes, pair):
    """Weights before the first step, which all layers have in common."""
    few, many = (outcomes[one].get() for one in pair)
    for shallow, deep in zip(few, many, strict=True):
        assert shallow["steps"] == deep["steps"] > 4
        assert [one["name"] for one in monitors(shallow)] == [one["name"] for one in monitors(deep)]


@pytest.mark.few(1)
@pytest.mark.parametrize("pair", pairs("monitor"))
def test_no_weight_is_gathered(outcomes, pair):
    for one in pair:
        for result in outcomes[one].get():
            assert not gathered(result)
            assert "monitor" not in result["full_tensor"]


@pytest.mark.few(1)
@pytest.mark.parametrize("pair", pairs("monitor"))
def test_processes_send_the_same_in_the_same_order(outcomes, pair):
    for one in pair:
        first, *others = [[(m["name"], m["by"]) for m in result["sent"]] for result in outcomes[one].get()]
        assert all(other == first for other in others)


@pytest.mark.slow
@pytest.mark.parametrize(
    "one", [of(way, "deep 4", count=4) for way in ("ddp", "fsdp2", "tp", "hsdp", "fsdp2_tp")], ids=str
)
def test_nor_on_four_processes(outcomes, one):
    for result in outcomes[one].get():
        assert not gathered(result)
        assert "monitor" not in result["full_tensor"]


@pytest.mark.few(1)
@pytest.mark.parametrize("pair", pairs("gathers"))
def test_a_monitor_that_gathers_is_found_out(outcomes, pair):
    few, many = ([len(monitors(result)) for result in outcomes[one].get()] for one in pair)
    assert all(a < b for a, b in zip(few, many, strict=True))
    for one in pair:
        for result in outcomes[one].get():
            assert gathered(result)
            assert any(m["name"].startswith(("allreduce", "all_reduce")) for m in monitors(result))
            assert ("monitor" in result["full_tensor"]) == (dict(one.arguments)["way"] != "ddp")


@pytest.mark.parametrize("one", [of(way, "deep 4", "") for way in WAYS], ids=str)
def test_without_a_monitor_nothing_is_taken_for_its(outcomes, one):
    for result in outcomes[one].get():
        assert result["sent"]
        assert not monitors(result)
