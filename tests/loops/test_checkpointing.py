"""Activation checkpointing of both kinds: everything is what it is without, and counted once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from spectral_monitor import SpectralProbe
from spectral_monitor.quantities import QUANTITIES


class Net(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(6, 80)
        self.block = nn.Sequential(nn.Linear(80, 96), nn.GELU(), nn.Linear(96, 80))
        self.head = nn.Linear(80, 3)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        part = self.block(h) if self.reentrant is None else checkpoint(self.block, h, use_reentrant=self.reentrant)
        return self.head(h + part)


def measured(reentrant):
    torch.manual_seed(0)
    model, x = Net(reentrant), torch.randn(2, 12, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer)
    for _ in range(3):
        with probe.step():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return probe


@pytest.mark.parametrize("reentrant", [True, False])
def test_all_is_as_without(reentrant):
    plain, again = measured(None), measured(reentrant)
    for one, other in zip(plain.measurements, again.measurements, strict=True):
        for info in one.layers:
            for key in QUANTITIES:
                a, b = one.value(key, info.name), other.value(key, info.name)
                assert (math.isnan(a) and math.isnan(b)) or a == pytest.approx(b, rel=1e-4, abs=1e-7), (key, info.name)
        assert math.isfinite(one.value("bfa", "block.0"))
        assert math.isfinite(one.value("backward_stable_rank", "block.2"))
