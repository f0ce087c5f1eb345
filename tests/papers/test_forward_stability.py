"""(FS) of "The Feature Speed Formula": features change alike at every width under muP, however small outputs begin."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.scaling import MUP

WIDTHS = (64, 256, 1024, 4096)
SEEDS = range(3)
INPUTS, LR = 16, 0.1


def step(width: int, seed: int) -> tuple[float, float, float]:
    """Return property_fs of one step on one sample, the same by autograd alone, and the change of the outputs."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(INPUTS, width, bias=False), nn.ReLU(), nn.Linear(width, width, bias=False))
    net.extend([nn.ReLU(), nn.Linear(width, 1, bias=False)])
    MUP.init_(net, scale=math.sqrt(2))
    optimizer = torch.optim.SGD(MUP.param_groups(net, LR))
    x = torch.randn(1, INPUTS)
    probe = SpectralProbe(net, optimizer, every_n_steps=1, quantities="full")
    with torch.no_grad():
        before = [net[: i + 1](x) for i in (0, 2, 4)]
    with probe.step():
        (net(x) - 1).square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        changes = [((net[: i + 1](x) - h).norm() / h.norm()).item() for i, h in zip((0, 2, 4), before, strict=True)]
    return probe.latest.summary["property_fs"], max(changes[:2]), changes[2]


@pytest.mark.slow
def test_forward_stability_is_flat_in_width():
    steps = np.array([[step(width, seed) for seed in SEEDS] for width in WIDTHS])
    measured, expected, outputs = np.moveaxis(steps, 2, 0)
    np.testing.assert_allclose(measured, expected, rtol=1e-3)
    assert np.polyfit(np.log(WIDTHS), np.log(measured).mean(1), 1)[0] == pytest.approx(0, abs=0.1)
    assert outputs.max() > 10 * measured.max(), "else it would not matter that outputs are left out"
