"""Bilinear forms of queries and keys where there is nothing to measure."""

from __future__ import annotations

import pytest
import torch

from spectral_monitor.functional.attention import bilinear_change_norm, bilinear_norm, product_bound


@pytest.mark.parametrize("zero", ["query", "key"])
def test_the_form_of_zero_queries_or_keys_is_zero(zero):
    """Queries are often initialized with 0."""
    query, key = torch.zeros(2, 3, 8), torch.ones(2, 3, 8)
    query, key = (query, key) if zero == "query" else (key, query)
    assert bilinear_norm(query, key).tolist() == [0, 0]
    assert bilinear_change_norm(query, key, query, key).tolist() == [0, 0]
    assert product_bound(query, key).tolist() == [0, 0]
    nan = bilinear_norm(query, key * torch.nan)
    assert bool(nan.isnan().all())


def test_forms_of_queries_and_keys_that_have_nothing_in_common_are_nearly_zero():
    """Rounding leaves a product that is not quite zero, of either sign; never a NaN."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.linalg.qr(torch.randn(400, 6, 2, generator=generator, dtype=torch.float64)).Q
    left, right = (torch.randn(400, 6, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    query, key = left @ directions[..., :1].mT, right @ directions[..., 1:].mT
    for a, b in ((query, key), (query.mT.contiguous(), key.mT.contiguous())):
        found = bilinear_norm(a, b)
        exact = torch.linalg.matrix_norm(a.mT @ b, 2)
        size = torch.linalg.matrix_norm(a, 2) * torch.linalg.matrix_norm(b, 2)
        assert bool((found >= 0).all())
        assert bool(((found - exact).abs() <= 1e-6 * size).all())
