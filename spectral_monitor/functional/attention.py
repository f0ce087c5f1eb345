"""Attention: norms of the bilinear form of queries and keys, and statistics of the softmax over keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_RIDGE = 1e-13
"""Relative increase of a Gram matrix's diagonal, so that dependent vectors have a Cholesky factor."""

_TINY = 1e-290


def bilinear_norm(query: Tensor, key: Tensor) -> Tensor:
    """Return the spectral norm of ``query^T key`` (n_q x n_k) of each head, from two d x d matrices.

    ``|Q^T K|*^2`` is the largest eigenvalue of ``(Q Q^T)(K K^T)``, computed in float64.

    Args:
        query: (..., heads, d, n_q).
        key: (..., heads, d, n_k).

    Returns:
        (..., heads), NaN for heads with entries that are not finite.

    Example:
        >>> query, key = torch.randn(4, 3, 16), torch.randn(4, 3, 16)
        >>> written_out = torch.linalg.matrix_norm(query.mT @ key, 2)
        >>> bool(torch.allclose(bilinear_norm(query, key).float(), written_out))
        True
    """
    return _norm(_gram(query), _gram(key))


def bilinear_change_norm(query: Tensor, key: Tensor, new_query: Tensor, new_key: Tensor) -> Tensor:
    """Return the spectral norm of ``new_query^T new_key - query^T key`` of each head; shapes as above.

    The difference is a product again, ``[Q' - Q; Q]^T [K'; K' - K]``.
    """
    query, key, new_query, new_key = (x.double() for x in (query, key, new_query, new_key))
    left = torch.cat([new_query - query, query], dim=-2)
    right = torch.cat([new_key, new_key - key], dim=-2)
    return _norm(_gram(left), _gram(right))


def product_bound(query: Tensor, key: Tensor) -> Tensor:
    """Return ``|query|* |key|*`` of each head, a bound for any rotation between them; shapes as above."""
    return (_largest(_gram(query)) * _largest(_gram(key))).sqrt()


class AttentionNumbers(NamedTuple):
    """Numbers of attention on some rows of queries."""

    logit_max: Tensor  # largest logit of an allowed key
    entropy: Tensor  # mean over rows and heads of the entropy over the log of the number of allowed keys
    lowest: Tensor  # the lowest entropy of a head
    sink: Tensor  # mean weight of the first key


def attention_numbers(logits: Tensor, allowed: Tensor, weights: Tensor) -> AttentionNumbers:
    """Return the largest logit, the entropies and the weight of the first key in some rows.

    Rows with a single key have no entropy and are left out of its means; rows without any key are left out everywhere.

    Args:
        logits: (sequences, heads, rows, keys).
        allowed: the same shape, or one that broadcasts to it: whether a row may attend to a key.
        weights: softmax of the logits of allowed keys, 0 elsewhere.

    Example:
        >>> uniform = torch.full((1, 1, 1, 4), 0.25)
        >>> numbers = attention_numbers(torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 1, 4, dtype=torch.bool), uniform)
        >>> round(float(numbers.entropy), 6), float(numbers.sink)
        (1.0, 0.25)
    """
    allowed = allowed.expand_as(logits)
    count = allowed.sum(-1)
    entropy = torch.special.entr(weights).sum(-1) / count.clamp(min=2).log()
    has_choice, has_key = count > 1, count.bool()
    by_head = (entropy * has_choice).sum((0, 2)) / has_choice.sum((0, 2))
    return AttentionNumbers(
        logits.masked_fill(~allowed, -torch.inf).amax(),
        (entropy * has_choice).sum() / has_choice.sum(),
        by_head.nan_to_num(torch.inf).amin(),
        (weights[..., 0] * has_key).sum() / has_key.sum(),
    )


def _gram(x: Tensor) -> Tensor:
    x = x.double()
    return x @ x.mT


def _trace(x: Tensor) -> Tensor:
    return x.diagonal(dim1=-2, dim2=-1).sum(-1)


def _norm(left: Tensor, right: Tensor) -> Tensor:
    """Return the root of the largest eigenvalue of a product of Gram matrices."""
    trace = _trace(left)
    finite = (trace + _trace(right)).isfinite()
    is_zero = trace == 0  # before the ridge
    left, right = (torch.where(finite[..., None, None], gram, 0.0) for gram in (left, right))
    ridge = _RIDGE * left.diagonal(dim1=-2, dim2=-1) + _TINY
    root, _ = torch.linalg.cholesky_ex(left + torch.diag_embed(ridge))
    square = torch.linalg.eigvalsh(root.mT @ right @ root)[..., -1].clamp(min=0)
    is_zero |= square <= 2 * _TINY * _trace(right)  # which the ridge alone gives
    return torch.where(finite, square.sqrt().masked_fill(is_zero, 0.0), torch.nan)


def _largest(gram: Tensor) -> Tensor:
    """Return the largest eigenvalue of Gram matrices; NaN where they are not finite."""
    finite = _trace(gram).isfinite()
    eigenvalue = torch.linalg.eigvalsh(torch.where(finite[..., None, None], gram, 0.0))[..., -1]
    return torch.where(finite, eigenvalue.clamp(min=0), torch.nan)
