"""Points that several processes train together, started as torchrun does."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from spectral_monitor.scaling.batches import SweepError
from spectral_monitor.scaling.sweeps.point import RunKey, SweepConfig
from spectral_monitor.scaling.sweeps.sweep import sweep
from spectral_monitor.scaling.sweeps.workers import PointFailure, PointJob
from spectral_monitor.sharding import mean_over_processes
from tests.gloo import on_processes
from tests.scaling.sweeping import INPUTS

WIDTHS = (8, 16, 32)


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.read, self.hidden, self.head = nn.Linear(INPUTS, width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, x, y):
        return (self.head(self.hidden(self.read(x).relu()).relu()) - y).square().mean()


def copied(width):
    return DistributedDataParallel(Net(width))


def sharded(width):
    network = Net(width)
    fully_shard(network)
    return network


def share(seed):
    """The batch of this process: every other sample where there are two."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(12, INPUTS, generator=generator), torch.randn(12, 1, generator=generator)
    rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return x[rank::count], y[rank::count]


def descent(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def diverges_in_one(seed):
    x, y = share(seed)
    return x, y * (float("nan") if dist.is_initialized() and dist.get_rank() == 1 else 1.0)


def fails_in_one(width):
    if os.environ["RANK"] == "1":
        raise OSError("no room on this card")
    return copied(width)


def dies_at_16(width):
    if width == 16 and os.environ["RANK"] == "1":
        os._exit(9)
    return copied(width)


def recipe(make_module=copied, data=share, **settings):
    settings = {"steps": 3, "quantities": ["update_natural", "feature_change", "alignment"], **settings}
    return SweepConfig(make_module, data, optimizer=descent, **settings)


@pytest.fixture(autouse=True)
def _loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # without a network the host's own name may not resolve


def assert_alike(points, alone):
    for point, one in zip(points, alone, strict=True):
        assert point.key == one.key
        assert [info.name for info in point.layers] == [info.name for info in one.layers]
        assert point.losses == pytest.approx(one.losses, rel=1e-6)
        for found, expected in zip(point.measurements, one.measurements, strict=True):
            for key, column in expected.values.items():
                torch.testing.assert_close(found.values[key], column, rtol=1e-4, atol=1e-6, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("make_module", [copied, pytest.param(sharded, marks=pytest.mark.exhaustive)])
def test_two_processes_find_what_one_does(make_module):
    key = RunKey(16, None, 0)
    point = PointJob(recipe(make_module, processes_per_point=2), key, 2)()
    assert_alike([point], [recipe(Net).train(key)])


@pytest.mark.slow
def test_a_process_that_fails_ends_the_others_and_says_why():
    outcome = PointJob(recipe(fails_in_one, processes_per_point=2), RunKey(16, None, 0), 2)()
    assert isinstance(outcome, PointFailure)
    assert outcome.message == "width 16, seed 0: OSError: no room on this card"


@pytest.mark.exhaustive
def test_points_whose_processes_die_are_named_and_the_others_kept(tmp_path):
    settings = {"widths": WIDTHS, "seeds": 1, "steps": 2, "optimizer": descent, "progress": False}
    with pytest.raises(RuntimeError, match=r"1 of 3 points did not come back .*width 16, seed 0.*a process died"):
        sweep(dies_at_16, share, processes_per_point=2, path=tmp_path / "sweep.jsonl", **settings)
    assert len((tmp_path / "sweep.jsonl").read_text().splitlines()) >= 2


def mean_of_a_loss():
    loss = torch.tensor(1.0 + dist.get_rank(), dtype=torch.float64)
    return mean_over_processes(loss), loss.item()


@pytest.mark.slow
def test_a_mean_over_processes_leaves_the_loss_as_it_is(tmp_path):
    assert on_processes(mean_of_a_loss, tmp_path) == [(1.5, 1.0), (1.5, 2.0)]


@pytest.mark.slow
def test_all_stop_where_the_loss_of_one_is_nan():
    point = PointJob(recipe(data=diverges_in_one, processes_per_point=2), RunKey(16, None, 0), 2)()
    assert point.failure == "the loss is nan at step 1"


@pytest.mark.slow
def test_a_sweep_of_them_wherever_points_run(tmp_path):
    settings = {"widths": WIDTHS, "seeds": 1, "steps": 3, "optimizer": descent, "progress": False}
    alone = sweep(Net, share, **settings)
    path = tmp_path / "sweep.jsonl"
    result = sweep(copied, share, processes_per_point=2, path=path, **settings)
    assert_alike(result.points, alone.points)
    again = sweep(copied, share, processes_per_point=2, path=path, **settings)
    assert again.table() == result.table(), "nothing is trained twice"
    with pytest.raises(SweepError, match="processes_per_point"):
        sweep(copied, share, path=path, **settings)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        sent = sweep(copied, share, processes_per_point=2, executor=pool, **settings)
    assert sent.table() == result.table()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"processes_per_point": 0}, "processes_per_point must be an integer >= 1, got 0"),
        ({"processes_per_point": 2, "make_module": lambda width: copied(width)}, "make_module cannot be sent"),
        (
            {"processes_per_point": 2, "optimizer": None, "parametrization": "muP", "limit": "exact"},
            "processes_per_point= is more than 1",
        ),
    ],
)
def test_refusals(settings, message):
    from spectral_monitor.scaling import MUP

    settings = {"make_module": copied, "optimizer": descent, "progress": False, "widths": WIDTHS, **settings}
    if "parametrization" in settings:
        settings |= {"parametrization": MUP, "lr": 0.1}
    with pytest.raises(SweepError, match=message):
        sweep(settings.pop("make_module"), share, **settings)
