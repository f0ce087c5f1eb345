"""What the other tests stand on: every strategy trains as one process with the whole batch does."""

from functools import cache

import pytest
import torch

from tests.distributed.fitting import train
from tests.distributed.jobs import task
from tests.distributed.ways import WAYS, marks, networks

CORE = ("ddp", "fsdp2", "tp")


def cases():
    for way, spec in WAYS.items():
        for count in spec.processes:
            for network in networks(way):
                core = count == 2 and way in CORE and network == "perceptron"
                one = task("fitting.train", count, way=way, network=network, optimizer="adamw" if core else "sgd")
                yield pytest.param(one, id=str(one), marks=() if core else marks(way, count, network))


@cache
def alone(network, optimizer):
    return train("", network, optimizer)


@pytest.mark.few(1)
@pytest.mark.parametrize("one", list(cases()))
def test_every_way_trains_alike(outcomes, one):
    arguments = dict(one.arguments)
    expected = alone(arguments["network"].replace(", empty calls", ""), arguments["optimizer"])
    results = outcomes[one].get()
    for result in results:
        for mine, theirs in zip(result["weights"], expected["weights"], strict=True):
            for name, value in theirs.items():
                torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    losses = torch.tensor([result["losses"] for result in results]).mean(0)
    torch.testing.assert_close(losses, torch.tensor(expected["losses"]), rtol=1e-5, atol=0)


FAULTS = {
    "raises on one": ("fails", {"ranks": (1,)}, False),
    "raises on all": ("fails", {"ranks": (0, 1)}, False),
    "dies": ("dies", {}, False),
    "waits for ever": ("waits", {}, True),
}


def faults():
    for fault, (name, arguments, stuck) in FAULTS.items():
        faulty = task(f"test_harness.{name}", 2, limit=3, **arguments)
        yield pytest.param(faulty, task("test_harness.rank", 2, after=fault), stuck, id=fault)


@pytest.mark.slow
@pytest.mark.parametrize(("faulty", "next_one", "stuck"), list(faults()))
def test_a_task_that_fails_costs_only_itself(outcomes, faulty, next_one, stuck):
    assert outcomes[next_one].get() == [0, 1]
    assert outcomes[faulty].stuck == stuck
    with pytest.raises(AssertionError, match="killed" if stuck else "failed"):
        outcomes[faulty].get()


def rank(after):
    return torch.distributed.get_rank()


def fails(ranks):
    if torch.distributed.get_rank() in ranks:
        raise ValueError("on purpose")
    return True


def dies():
    import os

    if torch.distributed.get_rank() == 1:
        os._exit(3)


def waits():
    import time

    if torch.distributed.get_rank() == 1:
        time.sleep(1000)
