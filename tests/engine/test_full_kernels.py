"""Extreme eigenvalues of kernels in real steps, against kernels written out in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from test_full import LAYERS, fresh, outputs_of, rates, step
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.engine.features import kernels as full
from spectral_monitor.functional.kernels import signs
from spectral_monitor.quantities import TIERS

EXTREMES = ["bfk_ratio", "bfk_peak", "bfk_guarantee"]


def kernel(model, x, y, layer):
    """The kernel of a layer's outputs as a matrix, at the weights as they are, with each group's rate."""
    trained = [(p, group["lr"]) for group in rates(model) for p in group["params"]]
    outs, _ = outputs_of(model, x, y)
    rows = [
        torch.autograd.grad(h, [p for p, _ in trained], retain_graph=True, allow_unused=True)
        for h in outs[layer].flatten()
    ]
    K = 0
    for k, (p, rate) in enumerate(trained):
        J = torch.stack([torch.zeros_like(p) if row[k] is None else row[k] for row in rows]).flatten(1)
        K = K + rate * J @ J.T
    return K.numpy()


def first_probe(shape):
    return signs(shape, torch.Generator().manual_seed(full.SEED)).flatten().double().numpy()


@pytest.fixture(scope="module")
def taken():
    model, optimizer = fresh()
    measurement, _, (x, y) = step(model, optimizer, quantities=[*EXTREMES, "bfa_cos"])
    return measurement, model, x, y


@pytest.mark.parametrize("layer", LAYERS)
def test_extremes_by_the_matrix_written_out(taken, layer):
    """By the projection on the Krylov space that is said, in numpy; and on the right side of the exact ends."""
    measurement, model, x, y = taken
    K = kernel(model, x, y, layer)
    values = np.linalg.eigvalsh(K)
    outs, _ = outputs_of(model, x, y)
    powers = [first_probe(outs[layer].shape)]
    for _ in range(full.LANCZOS_STEPS - 1):
        Q = np.linalg.qr(np.stack(powers, 1))[0]
        powers.append(K @ Q[:, -1])
    Q = np.linalg.qr(np.stack(powers, 1))[0]
    low, high = np.linalg.eigvalsh(Q.T @ K @ Q)[[0, -1]]
    guarantee = measurement.value("bfk_guarantee", layer)
    assert guarantee == pytest.approx(max(low, 0) / high, rel=1e-6, abs=1e-9)
    assert guarantee >= values[0] / values[-1] - 1e-9
    generator = torch.Generator().manual_seed(full.SEED)
    Z = torch.stack([signs(outs[layer].shape, generator).flatten() for _ in range(full.PROBES)]).double().numpy()
    mean = np.mean(np.sum((Z @ K) * Z, 1)) / len(K)
    assert measurement.value("bfk_peak", layer) == pytest.approx(high / mean, rel=1e-6)
    assert 0.9 * values[-1] < high <= values[-1] * (1 + 1e-9)


def test_either_one_alone_is_the_same(taken):
    for key in EXTREMES[1:]:
        measurement, _, _ = step(*fresh(), quantities=[key])
        torch.testing.assert_close(measurement.values[key], taken[0].values[key], rtol=0, atol=0, equal_nan=True)


def test_no_tier_has_them():
    measurement, _, _ = step(*fresh())
    assert "bfk_ratio" in measurement.values
    assert not {"bfk_peak", "bfk_guarantee"} & set(measurement.values)
    assert [name for name in measurement.summary if name.startswith("property")]


def test_a_tier_and_more_has_the_properties_too():
    measurement, _, _ = step(*fresh(), quantities=[*TIERS["full"], "bfk_peak"])
    assert math.isfinite(measurement.summary["property_rfl"])
    assert math.isfinite(measurement.value("bfk_peak", "first"))


def test_reasons():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    for p in model[0].parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, quantities=EXTREMES)
    with probe.step(accumulated=2):
        (model(torch.randn(6, 4)).square().mean() / 2).backward()
        optimizer.step()
    assert {probe.latest.why(key, "2") for key in EXTREMES} == {full.ACCUMULATED}
    with probe.step():
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
    assert {probe.latest.why(key, "0") for key in EXTREMES} == {full.NO_GRAPH}
    assert all(math.isfinite(probe.latest.value(key, "2")) for key in EXTREMES)
