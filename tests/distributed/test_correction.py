"""Corrected learning rates on several processes: the same everywhere, and those of one process."""

from functools import cache

import pytest
import torch

from spectral_monitor.correction.smoothing import LONGEST
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
    for way, settings in (
        ("ddp", {"policy": "fsc", "polyak": 0.0}),
        ("fsdp2", {"policy": "target", "size": LONG}),
        ("ddp", {"policy": "target", "accumulate": 2}),
        ("fsdp2", {"policy": "target", "accumulate": 2}),
    ):
        one = task("correcting.train", 2, way=way, network="transformer", **settings)
        yield pytest.param(one, id=str(one), marks=pytest.mark.slow)


LONG = 4.0
"""A size of steps that go too far, and are shortened."""


@cache
def alone(network, policy, **settings):
    return train("", network, policy, **settings)


@pytest.mark.parametrize("one", list(cases()))
def test_multipliers_are_those_of_one_process(outcomes, one):
    arguments = dict(one.arguments)
    expected = alone(**{key: value for key, value in arguments.items() if key != "way"})
    results = outcomes[one].get()
    assert all(result["multipliers"] == results[0]["multipliers"] for result in results), "bit for bit"
    assert results[0]["multipliers"] == pytest.approx(expected["multipliers"], rel=2e-2)
    assert set(expected["multipliers"].values()) != {1.0}
    if arguments["policy"] == "target":
        assert expected["edges"][0] is not None
        assert all(result["edges"] == results[0]["edges"] for result in results), "bit for bit"
        assert results[0]["edges"] == pytest.approx(expected["edges"], rel=2e-2)
        assert (max(expected["edges"][:3]) > LONGEST) == (arguments.get("size") == LONG)
    for result in results:
        assert result["groups"] == 1
        for name, weight in expected["weights"].items():
            if weight.ndim == 2:  # a bias of keys has no gradient but rounding, of which Adam makes whole steps
                off = torch.linalg.norm(result["weights"][name] - weight) / torch.linalg.norm(weight)
                assert off < 1e-3, name
