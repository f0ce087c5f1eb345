"""Sums over Adam's state, against loops over single entries in float64."""

from __future__ import annotations

import math

import pytest
import torch

from spectral_monitor.functional import adam
from spectral_monitor.functional.adam import adam_sums, dead_row_share


def state(*shape, dtype=torch.float64):
    """Return g, m and v of very different sizes, some of them 0."""
    generator = torch.Generator().manual_seed(0)
    g, m, v = (torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(3))
    v = v.mul(4).exp() * 1e-4
    v.view(-1)[0] = 0.0
    return g.to(dtype), m.to(dtype), v.to(dtype)


def naive(g, m, v, eps):
    """Return the six sums, one entry after the other."""
    total = [0.0] * 6
    for a, b, c in zip(*(x.double().flatten().tolist() for x in (g, m, v)), strict=True):
        root = math.sqrt(c)
        terms = [1.0, (a / max(root, eps)) ** 2, float(root < eps), b * a, b * b, a * a]
        total = [so_far + term for so_far, term in zip(total, terms, strict=True)]
    return total


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("eps", [1e-8, 1e-3, 0.5, 2.0])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 18])
def test_sums_are_those_of_single_entries(monkeypatch, chunk, eps, dtype):
    monkeypatch.setattr(adam, "CHUNK", chunk)
    given = state(5, 8, dtype=dtype)
    found = adam_sums(*given, eps)
    assert found.dtype == torch.float64
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert found.tolist() == pytest.approx(naive(*given, eps), rel=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_without_eps_only_the_smallest_number_is_divided_by(dtype):
    """An entry that never had a gradient adds nothing, and none is small against an eps of 0."""
    g, m, v = (torch.tensor(some, dtype=dtype) for some in ([0.0, 3.0, 1e-3], [0.0, 1.0, 2.0], [0.0, 4.0, 1e-6]))
    expected = [3, 9 / 4 + 1, 0, 3 + 2e-3, 5, 9 + 1e-6]
    assert adam_sums(g, m, v, 0.0).tolist() == pytest.approx(expected, rel=1e-5)


def test_rows_are_dead_far_below_the_median():
    second = torch.tensor([1.0, 2.0, 3.0, 0.0, 1.9e-3, 2.1e-3, 5.0, 6.0, 7.0]).double()
    assert dead_row_share(second).item() == pytest.approx(2 / 9)
    assert dead_row_share(torch.ones(4)).item() == 0
    assert dead_row_share(torch.tensor([0.0, 0.0, 1.0])).isnan()
