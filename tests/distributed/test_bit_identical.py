"""With the monitor or without it, every process trains the same, bit for bit, after every batch."""

import pytest

from tests.distributed.jobs import task
from tests.distributed.ways import WAYS, marks, networks

MORE = (
    {"way": "ddp", "network": "normalized", "accumulate": 2},
    {"way": "ddp", "network": "transformer, dropout", "precision": "bf16-mixed", "accumulate": 2},
    {"way": "ddp", "network": "normalized", "precision": "bf16-mixed", "optimizer": "sgd"},
    {"way": "ddp_find_unused", "network": "normalized"},
    {"way": "ddp_static_graph", "network": "transformer, dropout"},
    {"way": "fsdp2", "network": "transformer, dropout", "accumulate": 2},
    {"way": "fsdp2", "network": "perceptron, dropout", "precision": "bf16-true"},
    {"way": "fsdp2_root", "network": "transformer, dropout", "optimizer": "sgd"},
    {"way": "tp", "network": "transformer, dropout", "accumulate": 2},
    {"way": "fsdp1", "network": "transformer, dropout", "accumulate": 2},
    {"way": "fsdp1", "network": "perceptron, dropout", "precision": "bf16-mixed"},
    {"way": "fsdp1_nested", "network": "transformer, dropout", "accumulate": 2},
)
CORE = (
    {"way": "ddp", "network": "normalized"},
    {"way": "fsdp2", "network": "transformer, dropout"},
    {"way": "tp", "network": "perceptron, dropout"},
)


def of(count, arguments, core=False, exhaustive=False):
    one = task("bits.compare", count, **arguments)
    usual = pytest.mark.exhaustive if exhaustive else marks(arguments["way"], count, arguments["network"])
    return pytest.param(one, id=str(one), marks=() if core else usual)


def cases():
    yield from (of(2, arguments, core=True) for arguments in CORE)
    for arguments in MORE:
        yield of(WAYS[arguments["way"]].processes[0], arguments)
    for way, spec in WAYS.items():
        for network in networks(way):
            yield of(spec.processes[0], {"way": way, "network": network}, exhaustive=network != "transformer")
    for way in ("ddp", "fsdp2", "tp", "fsdp1"):
        yield of(4, {"way": way, "network": "transformer"})


@pytest.mark.few(2)
@pytest.mark.parametrize("one", list(cases()))
def test_training_is_not_changed(outcomes, one):
    for rank, result in enumerate(outcomes[one].get()):
        assert not result["differences"], f"process {rank}"
        assert result["measured"] == 4


def controls(watcher):
    core = ("ddp", "fsdp2")
    for way in WAYS:
        network = "perceptron, dropout" if way in core else "transformer, dropout"
        count = WAYS[way].processes[0]
        arguments = {"way": way, "network": network, "watcher": watcher}
        yield of(count, arguments, way in core and watcher == "naive", exhaustive=way not in core and not watcher)


@pytest.mark.few(1)
@pytest.mark.parametrize("one", list(controls("naive")))
def test_a_naive_monitor_is_found_out(outcomes, one):
    for result in outcomes[one].get():
        assert result["differences"]


@pytest.mark.parametrize("one", list(controls("")))
def test_two_runs_without_a_monitor_are_the_same(outcomes, one):
    """Else nothing could be said of one with it; and there is something to compare."""
    for result in outcomes[one].get():
        assert not result["differences"]
        assert all(result["compared"][kind] > 50 for kind in ("parameter", "grad", "optimizer", "random"))
