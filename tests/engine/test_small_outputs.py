"""Outputs whose squares are below the range of float32."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe

CHANGE = ("feature_change", "feature_drift", "bfa", "bfa_cos", "sensitivity")


def measured(scale: float, dtype: torch.dtype):
    """One step that changes the outputs of the first layer by a thousandth."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 1, bias=False)).to(dtype)
    x = scale * torch.randn(6, 8, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3 / scale)
    probe = SpectralProbe(model, optimizer)
    before = model[0](x).detach().double()
    with probe.step():
        model(x).mean().backward()
        optimizer.step()
    after = model[0](x).detach().double()
    return probe.latest, float(((after - before).norm(dim=1) / before.norm(dim=1)).mean())


@pytest.mark.parametrize(
    ("scale", "dtype"), [(1.0, torch.float32), (1e-12, torch.float32), (1e-21, torch.float64)], ids=str
)
def test_their_change_is_measured_while_it_can_be(scale, dtype):
    m, naive = measured(scale, dtype)
    assert naive > 0
    assert m.value("feature_change", "0") == pytest.approx(naive, rel=1e-3)


def test_below_that_it_is_said():
    m, _ = measured(1e-21, torch.float32)
    for key in CHANGE:
        assert math.isnan(m.value(key, "0"))
        assert m.why(key, "0") == "its outputs are so small that the squares of their change leave float32's range"
