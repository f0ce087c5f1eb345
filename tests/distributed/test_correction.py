"""Corrected learning rates on several processes: the same everywhere, and those of one process."""

from functools import cache

import pytest
import torch

from tests.distributed.correcting import train
from tests.distributed.jobs import task
from tests.distributed.ways import marks


def cases():
    for way, count, network in (
        ("ddp", 2, "transformer"),
        ("fsdp2", 2, "transformer"),
        ("tp", 2, "perceptron"),
        ("hsdp", 4, "transformer, tied"),
        ("fsdp2_tp", 4, "perceptron"),
        ("fsdp1", 2, "perceptron"),
    ):
        for policy in ("target", "fsc"):
            one = task("correcting.train", count, way=way, network=network, policy=policy)
            core = (way, policy) == ("fsdp2", "target")
            yield pytest.param(one, id=str(one), marks=() if core else marks(way, count, network))
    one = task("correcting.train", 2, way="ddp", network="transformer", policy="fsc", polyak=0.0)
    yield pytest.param(one, id=str(one), marks=pytest.mark.slow)


@cache
def alone(network, policy, polyak=None):
    return train("", network, policy, polyak)


@pytest.mark.parametrize("one", list(cases()))
def test_multipliers_are_those_of_one_process(outcomes, one):
    arguments = dict(one.arguments)
    expected = alone(arguments["network"], arguments["policy"], arguments.get("polyak"))
    results = outcomes[one].get()
    assert all(result["multipliers"] == results[0]["multipliers"] for result in results), "bit for bit"
    assert results[0]["multipliers"] == pytest.approx(expected["multipliers"], rel=2e-2)
    assert set(expected["multipliers"].values()) != {1.0}
    for result in results:
        assert result["groups"] == 1
        for name, weight in expected["weights"].items():
            if weight.ndim == 2:  # a bias of keys has no gradient but rounding, of which Adam makes whole steps
                off = torch.linalg.norm(result["weights"][name] - weight) / torch.linalg.norm(weight)
                assert off < 1e-3, name
