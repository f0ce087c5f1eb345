"""Populations against wide perceptrons trained by autograd, and against numbers of the specification."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spectral_monitor.limits import Populations

from .perceptron import losses

ONES, ALTERNATING = [1.0] * 5, [1.0, -1.0, 1.0, -1.0, 1.0]
SIGNS, TARGETS = [1.0, -1.0, 1.0, 1.0, -1.0], [1.0, -1.0, -1.0, 1.0, 1.0]
TANH_TWO = [0.500, 1.858, 2.140, 9.14, 19.8]


def limit(depth, phi, lr, xs, ys, **settings):
    populations, found = Populations(1, depth, phi, lr=lr, **settings), []
    for x, y in zip(xs, ys, strict=True):
        f = populations.step(torch.tensor([x]), lambda f, y=y: f - y)
        found.append((f - y) ** 2 / 2)
    return np.array(found)


def wide(seeds, *args):
    """Mean and standard error over seeds."""
    found = np.array([losses(*args, seed) for seed in range(seeds)])
    return found.mean(0), found.std(0, ddof=1) / seeds**0.5


def identity(z):
    return z


def test_one_hidden_layer_tanh():
    found = limit(1, torch.tanh, 0.5, [1.0] * 6, [1.0, 1.0, -1.0, 1.0, -1.0, 1.0], n=1_000_000)
    np.testing.assert_allclose(found, [0.5, 0.1794, 1.303, 0.4203, 0.899, 0.515], atol=0.005)


def test_one_hidden_layer_tanh_is_what_wide_networks_do():
    xs, ys = [1.0] * 6, [1.0, 1.0, -1.0, 1.0, -1.0, 1.0]
    mean, error = wide(50, 4096, 1, torch.tanh, 0.5, xs, ys)
    assert (np.abs(mean - limit(1, torch.tanh, 0.5, xs, ys, n=1_000_000)) < 3 * error + 1e-3).all()


def test_two_hidden_layers_tanh():
    np.testing.assert_allclose(limit(2, torch.tanh, 3.0, ONES, ALTERNATING, n=1_000_000), TANH_TWO, rtol=0.02)


def test_without_the_term_of_the_same_step_it_is_wrong(monkeypatch):
    """Theorem 6.4 as it is printed: the backward correction over r < t only."""
    whole = Populations._derivatives

    def as_printed(self, value, leaves):
        found = whole(self, value, leaves)
        return [*found[:-1], 0.0] if leaves is self._layers[1].below.values else found

    monkeypatch.setattr(Populations, "_derivatives", as_printed)
    found = limit(2, torch.tanh, 3.0, ONES, ALTERNATING, n=1_000_000)
    np.testing.assert_allclose(found, [0.5, 1.858, 1.975, 8.21, 12.2], rtol=0.02)
    assert not np.allclose(found, TANH_TWO, rtol=0.02)


@pytest.mark.parametrize(
    ("decoupled", "wanted"), [(False, [0.5, 0.125, 0.9833, 0.6197, 0.5476]), (True, [0.5, 0, 2.0, 0.435, 1.20])]
)
def test_two_hidden_layers_linear(decoupled, wanted):
    found = limit(2, identity, 0.5, SIGNS, TARGETS, n=400_000, decoupled=decoupled)
    np.testing.assert_allclose(found, wanted, atol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "lr", "n", "seeds"), [(2, 3.0, 1500, 16), (3, 1.0, 2048, 12)])
def test_deep_limits_are_what_wide_networks_do(depth, lr, n, seeds):
    mean, error = wide(seeds, n, depth, torch.tanh, lr, ONES, ALTERNATING)
    found = limit(depth, torch.tanh, lr, ONES, ALTERNATING, n=400_000)
    print("limit", found, "width", n, mean, "standard error", error)
    assert (np.abs(mean - found) < 3 * error).all()


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        Populations(1, 0, torch.tanh, lr=1.0)
    with pytest.raises(ValueError, match="even number of particles >= 2, got 3"):
        Populations(1, 1, torch.tanh, lr=1.0, n=3)
    with pytest.raises(ValueError, match=r"x must be \(2,\), got \(1,\)"):
        Populations(2, 1, torch.tanh, lr=1.0, n=4).step(torch.ones(1), float)
