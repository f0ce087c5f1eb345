"""Outputs whose squares leave the range of float32."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from tests.one_step import training_step

PROPORTIONAL = {"feature_rms"}
INVERSE = {"backward_rms"}


def measured(exponent: int, quantities: str, dtype: torch.dtype = torch.float32):
    """Return the second of two steps on a batch of ``2 ** exponent`` times the size, whose weights are always alike."""
    torch.manual_seed(1)
    scale = 2.0**exponent
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False)).to(dtype)
    x = scale * torch.randn(64, 8, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=quantities, mode="observe")
    for _ in range(2):
        before = model[0](x).detach().double()
        with training_step(probe, optimizer):
            (model(x) / scale).square().mean().backward()
    after = model[0](x).detach().double()
    return probe.latest, before, after


@pytest.mark.parametrize("exponent", [-110, -83, -60, 60, 73, 110])
def test_features_are_measured_as_those_of_usual_size(exponent):
    m, before, after = measured(exponent, "standard")
    assert m.value("feature_rms", "0") == pytest.approx(float(before.square().mean().sqrt()), rel=1e-5)
    change = (after - before).norm(dim=1) / before.norm(dim=1)
    assert m.value("feature_change", "0") == pytest.approx(float(change.mean()), rel=1e-3)


@pytest.mark.parametrize("exponent", [-110, -83, -60, 60, 73, 110])
@pytest.mark.parametrize("quantities", ["standard", "full"])
def test_no_quantity_but_their_size_depends_on_their_size(exponent, quantities):
    """But for what says why it is not known, and ``log_z``, which is of the outputs as they are."""
    m, usual = measured(exponent, quantities)[0], measured(0, quantities)[0]
    for key in usual.values.keys() - {"log_z"}:
        power = (key in PROPORTIONAL) - (key in INVERSE) + (key == "sensitivity")
        for layer in usual.layers:
            value, expected = m.value(key, layer.name), usual.value(key, layer.name)
            if key == "bfk_ratio" and math.isnan(value):
                assert m.why(key, layer.name)
            else:
                right = pytest.approx(expected * 2.0 ** (power * exponent), rel=1e-3, abs=1e-45, nan_ok=True)
                assert value == right, key


@pytest.mark.parametrize("exponent", [-300, 300])
def test_what_does_not_fit_a_measurement_is_said_to_be_out_of_its_range(exponent):
    m, before, after = measured(exponent, "standard", torch.float64)
    assert math.isnan(m.value("feature_rms", "0"))
    assert m.why("feature_rms", "0") == "too small or too large for a 32-bit number"
    change = (after - before).norm(dim=1) / before.norm(dim=1)
    assert m.value("feature_change", "0") == pytest.approx(float(change.mean()), rel=1e-3)
