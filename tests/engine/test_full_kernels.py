"""Extreme eigenvalues of kernels in real steps, against kernels written out in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.engine.features import kernels as full
from spectral_monitor.functional.kernels import signs
from spectral_monitor.quantities import TIERS
from tests.engine.test_full import LAYERS, Homogeneous, fresh, outputs_of, rates, step
from tests.one_step import after_one_step

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
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=EXTREMES)
    with probe.step(accumulated=2):
        (model(torch.randn(6, 4)).square().mean() / 2).backward()
        optimizer.step()
    assert {probe.latest.why(key, "2") for key in EXTREMES} == {full.ACCUMULATED}
    with probe.step():
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
    assert {probe.latest.why(key, "0") for key in EXTREMES} == {full.NO_GRAPH}
    assert all(math.isfinite(probe.latest.value(key, "2")) for key in EXTREMES)


BEHIND = {"first": ["second", "third", "head"], "second": ["third", "head"], "third": ["head"]}


def dual_kernel(model, x, y, layer):
    """The sum of lr B B^T over trained weights behind a layer, B row by row from the graph of b."""
    outs, loss = outputs_of(model, x, y)
    (b,) = torch.autograd.grad(loss, outs[layer], create_graph=True)
    names = {id(p): name for name, p in model.named_parameters()}
    trained = [(p, group["lr"]) for group in rates(model) for p in group["params"]]
    trained = [(p, rate) for p, rate in trained if names[id(p)].partition(".")[0] in BEHIND[layer]]
    rows = [torch.autograd.grad(e, [p for p, _ in trained], retain_graph=True, allow_unused=True) for e in b.flatten()]
    K = 0
    for k, (p, rate) in enumerate(trained):
        B = torch.stack([torch.zeros_like(p) if row[k] is None else row[k] for row in rows]).flatten(1)
        K = K + rate * B @ B.T
    return K.numpy()


@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("layer", list(BEHIND))
def test_dual_kernel_by_the_matrix_written_out(layer, factor):
    """At the weights after the step, under its dropout, with the probes that are said, whatever factor the loss has."""
    model, optimizer = fresh()
    measurement, _, (x, y) = step(model, optimizer, quantities=["dual_bfk_ratio"], factor=factor)
    K = dual_kernel(model, x, y, layer)
    generator = torch.Generator().manual_seed(full.SEED)
    shape = outputs_of(model, x, y)[0][layer].shape
    Z = torch.stack([signs(shape, generator).flatten() for _ in range(full.PROBES)]).double().numpy()
    expected = np.mean(np.sum((Z @ K) * Z, 1)) / math.sqrt(np.mean(np.sum((Z @ K) ** 2, 1)) * len(K))
    assert measurement.value("dual_bfk_ratio", layer) == pytest.approx(expected, rel=1e-6)


def test_of_the_output_of_a_linear_loss_there_is_no_dual_kernel():
    torch.manual_seed(2)
    model = Homogeneous().double()
    x, y = torch.randn(1, 6, dtype=torch.float64), torch.randn(1, 3, dtype=torch.float64)
    probe = after_one_step(model, lambda: model(x, y), lr=1e-6, quantities=["dual_bfk_ratio", "dual_bfa_cos"])
    assert probe.latest.why("dual_bfk_ratio", "layers.3").startswith("undefined")
    assert all(0 < probe.latest.value("dual_bfk_ratio", f"layers.{k}") <= 1 for k in range(3))


def test_reasons_of_the_dual_kernel():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=["dual_bfk_ratio"])
    for accumulated, reason in ((2, full.ACCUMULATED), (1, full.NO_LOSS)):
        with probe.step(accumulated=accumulated):
            (model(torch.randn(6, 4)).square().mean() / accumulated).backward()
            optimizer.step()
        assert probe.latest.why("dual_bfk_ratio", "0") == reason
