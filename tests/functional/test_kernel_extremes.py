"""Extreme eigenvalues of the backward-to-feature kernel, against the kernel written out in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import spectral_monitor.functional as F
from spectral_monitor.functional.kernels import signs
from tests.functional.test_kernels import RATES, case, features, perceptron, split, written_out  # noqa: F401


def begin(outputs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [signs(out.shape, generator) for out in outputs]


def test_as_many_steps_as_outputs_find_both_ends(case):  # noqa: F811
    outputs, weights, K = case
    values = np.linalg.eigvalsh(K)
    assert values[0] > 1e-4 * values[-1], "else zero would pass for it"
    low, high = F.bfk_extremes(outputs, weights, RATES, begin(outputs), len(K))
    assert low.item() == pytest.approx(values[0], rel=1e-8)
    assert high.item() == pytest.approx(values[-1], rel=1e-10)


def test_few_steps_bracket_from_inside_and_the_theorem_holds(case):  # noqa: F811
    """Theorem 3.2 (i) with the exact ends, and the guarantee that few steps give is never below the exact one."""
    outputs, weights, K = case
    values = np.linalg.eigvalsh(K)
    b = np.random.default_rng(0).normal(size=(200, len(K)))
    cosines = np.sum(b * (b @ K), 1) / (np.linalg.norm(b @ K, axis=1) * np.linalg.norm(b, axis=1))
    assert values[0] / values[-1] <= cosines.min()
    ends = np.linalg.eigh(K)[1][:, [0, -1]]
    worst = ends @ np.sqrt(values[[-1, 0]])  # Kantorovich: of all vectors the one with the smallest cosine
    smallest = worst @ K @ worst / (np.linalg.norm(K @ worst) * np.linalg.norm(worst))
    assert values[0] / values[-1] <= smallest <= cosines.min()
    for steps in (1, 2, 4, 8):
        low, high = (value.item() for value in F.bfk_extremes(outputs, weights, RATES, begin(outputs), steps))
        assert values[0] * (1 - 1e-9) <= low <= high <= values[-1] * (1 + 1e-9)
        assert low / high >= values[0] / values[-1]
    assert high > 0.9 * values[-1]


@pytest.mark.parametrize(("depth", "seed"), [(d, s) for d in (2, 4, 8) for s in range(3)])
def test_eight_steps_are_within_a_tenth_of_the_largest(depth, seed):
    """In perceptrons of some depth, whose largest eigenvalue is far from the mean."""
    weights = perceptron([20] + [60] * depth, seed=seed)
    x = torch.randn(2, 20, dtype=torch.float64)

    def outputs(*W):
        h = x
        for one in W[:-1]:
            h = (h @ one.T).relu()
        return (h @ W[-1].T,)

    rates = [1.0] * depth
    values = np.linalg.eigvalsh(written_out(outputs, weights, rates))
    out = outputs(*weights)
    _, high = F.bfk_extremes(out, weights, rates, begin(out, seed), 8)
    assert 0.9 * values[-1] < high.item() <= values[-1] * (1 + 1e-9)


def test_of_a_singular_kernel_nothing_is_guaranteed():
    """Three weights cannot move eight outputs in all directions."""
    w = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    A = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    low, high = F.bfk_extremes([A @ w], [w], [2.0], begin([A @ w]), 8)
    assert 0 <= low.item() < 1e-12 * high.item()
    assert high.item() == pytest.approx(2 * np.linalg.norm(A.numpy(), 2) ** 2, rel=1e-10)


class Silent(torch.autograd.Function):
    """Its backward pass cannot be differentiated, and does not say so."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 0 * g + 2 * g.detach()


def test_what_drops_out_of_the_second_pass_is_seen():
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    out = Silent.apply(w)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        F.bfk_extremes([out], [w], [1.0], begin([out]), 3)


def test_half_precision_is_measured_in_float32():
    W, x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.ones(4)
    whole, half = W.clone().requires_grad_(), W.bfloat16().requires_grad_()
    exact = F.bfk_extremes([(whole @ x).tanh()], [whole], [1.0], begin([whole[:, 0]]), 6)
    found = F.bfk_extremes([(half @ x.bfloat16()).tanh()], [half], [1.0], begin([whole[:, 0]]), 6)
    assert found[1].item() == pytest.approx(exact[1].item(), rel=0.05)


def test_misuse(case):  # noqa: F811
    outputs, weights, _ = case
    with pytest.raises(ValueError, match="probes must be like the outputs"):
        F.bfk_extremes(outputs, weights, RATES, [torch.ones(2)], 3)
    with pytest.raises(ValueError, match="must have a graph"):
        F.bfk_extremes([out.detach() for out in outputs], weights, RATES, begin(outputs), 3)
