"""Extreme Ritz values against eigenvalues of matrices written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spectral_monitor.linalg import extreme_ritz_values


def symmetric(n, seed=0):
    A = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return A + A.T


def start(n):
    return torch.randn(n, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def test_as_many_steps_as_rows_find_both_ends():
    A = symmetric(12)
    values = np.linalg.eigvalsh(A.numpy())
    found = extreme_ritz_values(lambda x: A @ x, start(12), 12)
    np.testing.assert_allclose(found, values[[0, -1]], rtol=1e-10)
    np.testing.assert_allclose(extreme_ritz_values(lambda x: A @ x, start(12), 99), found, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_is_the_projection_on_the_krylov_space(dtype):
    """Orthonormalized by QR in float64: for all steps, and inside the eigenvalues from the first to the last."""
    A, x = symmetric(40), start(40)
    ends = np.linalg.eigvalsh(A.numpy())[[0, -1]]
    powers = [x / x.norm()]
    for steps in range(1, 7):
        Q = torch.linalg.qr(torch.stack(powers, 1)).Q
        expected = np.linalg.eigvalsh((Q.T @ A @ Q).numpy())[[0, -1]]
        found = extreme_ritz_values(lambda v: A.to(dtype) @ v, x.to(dtype), steps).numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-8 if dtype == torch.float64 else 1e-4)
        assert ends[0] < found[0] <= found[1] < ends[1]
        powers.append(A @ powers[-1])
        powers[-1] = powers[-1] / powers[-1].norm()


def test_it_stops_where_the_space_ends():
    calls = []

    def multiply(x):
        calls.append(1)
        return torch.cat([3 * x[:4], 7 * x[4:]])  # two eigenvalues: a space of two dimensions

    found = extreme_ritz_values(multiply, start(10), 8)
    np.testing.assert_allclose(found, [3, 7], rtol=1e-12)
    assert len(calls) == 2
    np.testing.assert_array_equal(extreme_ritz_values(lambda x: 0 * x, start(5), 3), [0, 0])
