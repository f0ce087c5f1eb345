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
