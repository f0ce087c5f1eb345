"""The gradient of what a table of embeddings gave, from that of the table."""

from __future__ import annotations

import torch
from torch import nn

from spectral_monitor.capture.row_sampling import table_rows


def test_each_token_that_comes_once_has_the_gradient_of_its_row():
    table, tokens = nn.Embedding(9, 4).double(), torch.tensor([[5, 0, 3]])
    out = table(tokens)  # as positions of one sequence, common to a batch of 7
    weights = torch.randn(7, 3, 4, dtype=torch.float64)
    (expected,) = torch.autograd.grad((weights * (out + torch.zeros(7, 3, 4))).sum(), out, retain_graph=True)
    (of_table,) = torch.autograd.grad((weights * out).sum(), table.weight)
    torch.testing.assert_close(table_rows(of_table, tokens), expected[0], rtol=1e-12, atol=0)


def test_of_a_token_that_comes_twice_the_table_knows_only_the_sum():
    gradient = torch.randn(9, 4)
    assert table_rows(gradient, torch.tensor([5, 0, 5])) is None
    assert table_rows(None, torch.tensor([5, 0])) is None
    assert table_rows(gradient, torch.tensor([0.5, 1.5])) is None, "not tokens"
    assert table_rows(gradient.to_sparse(1), torch.tensor([5, 0])) is None
