"""Standard errors of statistics that are computed from part of the samples."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from spectral_monitor.linalg import to_device

GROUPS = 16
"""Groups of samples that are left out in turn: more groups hardly improve the errors."""
STUDENT = (21.22, 3.31, 1.95, 1.54, 1.35, 1.24, 1.17, 1.12, 1.09, 1.06, 1.04, 1.02, 1.01)
"""A third of Student's quantile at 99.5 %, for 1, 2, ... degrees of freedom; 1 for more."""


def standard_error(sums: Tensor, statistic: Callable[[Tensor], Tensor]) -> Tensor:
    """Return standard errors of statistics of sums over rows, by the jackknife over groups of samples.

    They are widened if groups are few, so that three of them always hold 99 %.

    Args:
        sums: (..., G, K) of each group; the first of the K is its number of rows, and empty groups are left out.
        statistic: turns sums (..., K) into statistics (..., Q).

    Returns:
        (..., Q); NaN with fewer than two groups.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap", 11.5: the delete-one jackknife.

    Example:
        >>> rows = torch.tensor([[1.0, 2.0], [1.0, 4.0], [1.0, 9.0], [1.0, 5.0]])  # four groups of one row
        >>> standard_error(rows, lambda sums: sums[..., 1:] / sums[..., :1])  # their deviation / 2, widened by 1.95
        tensor([2.8703])
    """
    nonempty = sums[..., :1] > 0  # (..., G, 1)
    G = nonempty.sum(-2)  # (..., 1)
    without_one = statistic(sums.sum(-2, keepdim=True) - sums)  # (..., G, Q), each without one group
    without_one = torch.where(nonempty, without_one, 0.0)
    mean = without_one.sum(-2, keepdim=True) / G[..., None]
    squares = torch.where(nonempty, (without_one - mean).square(), 0.0).sum(-2)  # (..., Q)
    factors = to_device(torch.tensor([math.nan, math.nan, *STUDENT, 1.0], dtype=sums.dtype, device="cpu"), sums.device)
    return (squares * (G - 1) / G).sqrt() * factors[G.clamp(max=len(factors) - 1)]
