"""Weighted neurons against numbers of the specification, wide networks and the exact linear limit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spectral_monitor.limits import WeightedNeurons, infinite_width

from .perceptron import losses
from .test_populations import outputs_of_batches, wide_steps

XS, YS = [1.0] * 6, [1.0, 1.0, -1.0, 1.0, -1.0, 1.0]


def limit(phi, lr, ys=YS, **settings):
    neurons, found = WeightedNeurons(1, 1, phi, lr=lr, **settings), []
    for x, y in zip(XS, ys, strict=True):
        f = neurons.step(torch.tensor([[x]]), lambda f, y=y: f - y).item()
        found.append((f - y) ** 2 / 2)
    return np.array(found)


def test_tanh():
    """No random number: the specification's digits, and those of any other number of nodes."""
    found = limit(torch.tanh, 0.5)
    np.testing.assert_allclose(found, [0.5, 0.1794, 1.303, 0.4203, 0.899, 0.515], atol=1e-3)
    np.testing.assert_allclose(limit(torch.tanh, 0.5, nodes=90), found, atol=4e-4)


def test_wide_networks_come_close():
    runs = np.array([losses(4096, 1, torch.tanh, 0.5, XS, YS, seed) for seed in range(50)])
    error = runs.std(0, ddof=1) / 50**0.5
    assert (np.abs(runs.mean(0) - limit(torch.tanh, 0.5)) < 3 * error + 1e-3).all()


@pytest.mark.parametrize(("phi", "rates"), [(torch.tanh, (5.0, 4.0)), (torch.relu, (1.5, 1.0))])
def test_many_dimensions(phi, rates):
    seeds, n = 60, 2048
    runs = torch.stack([outputs_of_batches(wide_steps(n, 1, phi, rates, seed)) for seed in range(seeds)])
    mean, error = runs.mean(0), runs.std(0) / seeds**0.5
    found = outputs_of_batches(WeightedNeurons(3, 2, phi, lr=rates).step)
    assert found[0].abs().max() < 1e-12
    assert found.abs().max() > 0.3
    assert ((mean - found).abs() < 4 * error + 1 / n).all()


def test_without_activation_it_is_the_linear_limit():
    """Degree 2 is integrated exactly by few nodes."""
    net = infinite_width(2, 1, su=0.7, sv=1.2, dtype=torch.float64)
    neurons = WeightedNeurons(2, 1, lambda z: z, lr=(0.2, 0.3), su=0.7, sv=1.2, nodes=5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        x, y = (torch.randn(4, size, generator=generator, dtype=torch.float64) for size in (2, 1))
        chi = (net(x) - y) / 4
        torch.testing.assert_close(neurons.step(x, lambda f, chi=chi: chi), net(x), rtol=0, atol=1e-10)
        net = net.step(x, chi, (0.2, 0.3))
        # Means over neurons of products of features are inner products of coefficients.
        torch.testing.assert_close(neurons.feature_kernel(x, x), x @ net.U.T @ net.U @ x.T, rtol=0, atol=1e-10)
    assert net.V[0, 0].abs() > 0.05  # the readout has learnt


def test_polynomials_leave_finite_networks_behind():
    """The warning of the documentation: the sixth loss of the limit is that of neurons which no network has."""
    ys = [1.0, -1.0, -1.0, 1.0, 1.0, -1.0]
    found = limit(torch.square, 0.1, ys=ys)
    np.testing.assert_allclose(found[:5], [0.5, 1.4655, 0.2286, 1.272, 0.4858], atol=1e-4)
    wide = np.array([losses(4096, 1, torch.square, 0.1, XS, ys, seed) for seed in range(20)]).mean(0)
    np.testing.assert_allclose(wide[:5], found[:5], atol=0.02)
    assert wide[5] < 5 < 1e5 < found[5]


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        WeightedNeurons(1, 0, torch.tanh, lr=1.0)
    with pytest.raises(ValueError, match=r"x must be \(batch, 2\), got \(1, 3\)"):
        WeightedNeurons(2, 1, torch.tanh, lr=1.0)(torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"loss_derivative must return \(1, 1\)"):
        WeightedNeurons(2, 1, torch.tanh, lr=1.0).step(torch.ones(1, 2), lambda f: f[0])
