"""Sizes of gradients, outliers and formats where two processes share out features: numbers of one, or a reason."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from spectral_monitor import SpectralProbe
from tests.gloo import on_processes

SAME = ["gradient_natural", "backward_rms", "readout_row", "feature_kurtosis", "outlier_ratio", "log_z"]
OWN = ["underflow_inputs", "underflow_weights", "underflow_backward"]
LAYERS = ("0", "2", "4")


def job(way):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 4))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel()}
    if way:
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keys, divided = [*SAME, *OWN, "noise_scale"], {"data_parallel_rank": 0} if way else {}
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=keys, tol=1e-6, **divided)
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    with probe.step():
        (model(x).square().sum() / 64).backward()  # each process has its part of the outputs
        optimizer.step()
    m = probe.latest
    values = {(key, name): m.value(key, name) for key in keys for name in LAYERS}
    whys = {(key, name): m.why(key, name) for key, name in values}
    return values, whys, m.why("noise_scale", "summary"), m.summary["skipped_updates"]


@pytest.mark.slow
def test_two_processes_have_the_numbers_of_one_or_a_reason(tmp_path):
    alone, _, _, _ = job("")
    for values, whys, summary, skipped in on_processes(job, tmp_path, 2, "tp"):
        for key in SAME:
            for name in LAYERS:
                if (key, name) == ("log_z", "4"):
                    assert whys[key, name] == "its outputs are sharded over processes"
                else:
                    assert values[key, name] == pytest.approx(alone[key, name], rel=1e-4, nan_ok=True), (key, name)
        assert all(0 <= values[key, name] <= 1 for key in OWN for name in LAYERS)
        assert all(whys["noise_scale", name] == "the features of a batch are sharded over processes" for name in LAYERS)
        assert summary == "the features of a batch are sharded over processes"
        assert skipped == 0
        assert not math.isnan(alone["noise_scale", "0"])
