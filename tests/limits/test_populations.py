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
        f = populations.step(torch.tensor([[x]]), lambda f, y=y: f - y).item()
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

    def as_printed(self, value, by, count):
        found = whole(self, value, by, count)
        return [*found[:-1], 0.0] if by is self._layers[1].below else found

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


def outputs_of_batches(limit, *, k=2):
    """Outputs (steps, B, k) over steps on fixed batches of logistic regression."""
    generator, found = torch.Generator().manual_seed(5), []
    for _ in range(3):
        x = torch.randn(4, 3, generator=generator)
        y = torch.nn.functional.one_hot(torch.randint(k, (4,), generator=generator), k)
        found.append(limit(x, lambda f, y=y: (f.softmax(1) - y) / 4))
    return torch.stack([f.double() for f in found])


def wide_steps(n, depth, phi, rates, seed, k=2):
    """A perceptron of 3 inputs as applied, trained by autograd, in the signature of a limit's ``step``."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [torch.randn(n, 3, generator=generator)]
    sizes += [torch.randn(n, n, generator=generator) / n**0.5 for _ in range(depth - 1)]
    sizes += [torch.randn(k, n, generator=generator) / n]
    weights = [W.requires_grad_() for W in sizes]
    powers = [n, *[1] * (depth - 1), 1 / n]

    def step(x, derivative):
        h = x
        for W in weights[:-1]:
            h = phi(h @ W.T)
        f = h @ weights[-1].T
        chi = derivative(f.detach().double()).to(f.dtype)
        grads = torch.autograd.grad(f, weights, grad_outputs=chi)
        for W, rate, power, g in zip(weights, rates, powers, grads, strict=True):
            W.data -= rate * power * g
        return f.detach()

    return step


TANH_RATES, RELU_RATES = (5.0, 6.0, 4.0), (1.5, 2.0, 1.0)


@pytest.mark.parametrize(
    ("phi", "rates", "derivatives"),
    [(torch.tanh, TANH_RATES, "autograd"), (torch.tanh, TANH_RATES, "stein"), (torch.relu, RELU_RATES, "stein")],
)
def test_batches_and_several_outputs(phi, rates, derivatives):
    """Against wide networks, with a rate for each matrix; means over seeds within four standard errors."""
    n, seeds = 512, 40
    runs = torch.stack([outputs_of_batches(wide_steps(n, 2, phi, rates, seed)) for seed in range(seeds)])
    mean, error = runs.mean(0), runs.std(0) / seeds**0.5
    limit = Populations(3, 2, phi, lr=rates, k=2, n=200_000, derivatives=derivatives)
    found = outputs_of_batches(limit.step)
    assert found.abs().max() > 0.3
    assert ((mean - found).abs() < 4 * error + 2 / n).all()


def test_without_stein_relu_is_refused_and_would_be_wrong(monkeypatch):
    with pytest.raises(ValueError, match=r"piecewise linear, .* derivatives='stein'"):
        Populations(1, 2, torch.relu, lr=1.0)
    Populations(1, 1, torch.relu, lr=1.0, n=4)  # without a matrix between hidden layers nothing is derived
    wanted = limit(2, torch.relu, 1.0, ONES, ALTERNATING, n=200_000, derivatives="stein")
    monkeypatch.setattr("spectral_monitor.limits.populations._jumps", lambda phi: False)
    found = limit(2, torch.relu, 1.0, ONES, ALTERNATING, n=200_000)
    assert not np.allclose(found, wanted, rtol=0.05)


def test_stein_is_autograd_for_smooth_activations():
    found = limit(2, torch.tanh, 3.0, ONES, ALTERNATING, n=1_000_000, derivatives="stein")
    np.testing.assert_allclose(found, TANH_TWO, rtol=0.02)


def test_prediction_leaves_the_run_as_it_is():
    x, y = torch.tensor([[1.0], [-0.5]]), torch.tensor([[1.0], [2.0]]).double()
    ours, other = (Populations(1, 2, torch.tanh, lr=1.0, n=20_000) for _ in range(2))
    for _ in range(3):
        found = ours.step(x, lambda f: (f - y) / 2)
        torch.testing.assert_close(found, other.step(x, lambda f: (f - y) / 2), rtol=0, atol=0)
        predicted = ours.predict(torch.cat([x, torch.zeros(1, 1)]))
        assert predicted[2].abs() < 1e-12
    # What is predicted is what the next step begins with.
    torch.testing.assert_close(predicted[:2], ours.step(x, lambda f: f), rtol=0, atol=0.02)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        Populations(1, 0, torch.tanh, lr=1.0)
    with pytest.raises(ValueError, match="n must be a multiple of 4, got 6 particles"):
        Populations(1, 1, torch.tanh, lr=1.0, n=6)
    with pytest.raises(ValueError, match=r"lr must be a number or 3 of them, one for each matrix, got 2"):
        Populations(1, 2, torch.tanh, lr=(1.0, 1.0), n=4)
    with pytest.raises(ValueError, match=r"derivatives must be 'autograd' or 'stein', got 'finite'"):
        Populations(1, 2, torch.tanh, lr=1.0, n=4, derivatives="finite")
    populations = Populations(2, 1, torch.tanh, lr=1.0, n=4)
    with pytest.raises(ValueError, match=r"x must be \(batch, 2\), got \(1,\)"):
        populations.step(torch.ones(1), float)
    with pytest.raises(ValueError, match=r"loss_derivative must return \(1, 1\), as the outputs are, got \(1,\)"):
        populations.step(torch.ones(1, 2), lambda f: f[0])
