"""Rows of tensors that pass through a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from spectral_monitor.state.dtensor import local_part


def first_rows(x: Tensor, first: int, count: int) -> Tensor:
    """Return the part of ``x`` that holds the first of its ``count`` rows."""
    return x.narrow(0, 0, len(x) * first // count)


def is_table(x: Tensor) -> bool:
    """Return whether a tensor is dense, and not a list of others, so that it has rows."""
    return x.layout == torch.strided and not x.is_nested


def table_rows(gradient: Tensor | None, tokens: Tensor | None) -> Tensor | None:
    """Return the gradient of what a table of embeddings gave for these tokens, a row for each; ``None`` if unknown.

    The gradient of a row of the table is the sum over all places that looked it up: of one, if no token comes twice.
    """
    if gradient is None or tokens is None or gradient.is_sparse or tokens.is_floating_point():
        return None
    tokens = local_part(tokens).reshape(-1)
    return gradient[tokens] if len(tokens.unique()) == len(tokens) else None
