"""The state of optimizers like Adam: gradients compared with their moments."""

from __future__ import annotations

import torch
from torch import Tensor

from spectral_monitor.functional.vector_norms import common_dtype

CHUNK = 1 << 18
"""Entries that are computed at a time: all quotients at once would take as much memory as the parameter."""

DEAD = 1e-3
"""Rows are dead if their second moments are below this part of the median row's."""


@torch.no_grad()
def adam_sums(gradient: Tensor, first: Tensor, second: Tensor, eps: float) -> Tensor:
    """Return sums over the entries of a parameter's gradient g and Adam's moments m and v of it, as float64 (6,).

    Args:
        gradient: g, as the optimizer used it.
        first: m, of the same shape.
        second: v, with its bias corrected.
        eps: of the optimizer.

    Returns:
        The number of entries; the sum of ``g^2 / max(v, eps^2)``; the number of entries with ``sqrt(v) < eps``; the
        sums of ``m g``, ``m^2`` and ``g^2``. Sums of parts add up.
    """
    total = torch.zeros(6, dtype=torch.float64, device=gradient.device)
    dtype = common_dtype(gradient, second)
    for g, m, v in zip(*(x.reshape(-1).split(CHUNK) for x in (gradient, first, second)), strict=True):
        g, m, root = g.to(dtype), m.to(dtype), v.to(dtype).sqrt()
        floor = torch.finfo(dtype).tiny if eps == 0 else eps
        ratio = g / root.clamp(min=floor)
        parts = [ratio.square(), (root < eps).to(dtype), m * g, m.square(), g.square()]
        sums = [part.sum(dtype=torch.float64) for part in parts]
        total += torch.stack([torch.full_like(sums[0], g.numel()), *sums])
    return total


@torch.no_grad()
def dead_row_share(second: Tensor) -> Tensor:
    """Return the share of rows that hardly get a gradient, from the sums (rows,) of their second moments.

    NaN if the median row gets none.
    """
    median = second.median()
    return torch.where(median > 0, (second < DEAD * median).double().mean(), torch.nan)
