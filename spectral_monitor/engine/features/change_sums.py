"""Sums over the rows of features that a step changed, by groups of samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from spectral_monitor.capture.replay.feature_change import Change
from spectral_monitor.functional.features import row_ratios

ROWS, RATIOS, COUNTED, INNER, DH, H, B = range(7)
"""Columns of sums: how many rows; |dh| / |h|, and of how many rows that is defined; b dh; |dh|^2, |h|^2 and |b|^2."""


class Found(NamedTuple):
    """Sums over the rows of a layer.

    Attributes:
        sums: (G, 7) of each group of rows.
        size: entries of all of them.
        rows: how many were compared.
        of: how many there are.
        graded: whether their gradients are available.
    """

    sums: Tensor
    size: int
    rows: int
    of: int
    graded: bool


def spread(rows: int, groups: int, device: torch.device) -> Tensor:
    """Return to which group each of some rows belongs; rows in turn, which are of one sample, stay together."""
    return torch.arange(rows, device=device) * groups // max(rows, 1)


def group_sums(changes: Mapping[int, Change], groups: int) -> dict[int, Tensor]:
    """Return sums (groups, 7) over the rows of each layer, in float64; NaN where gradients are not available.

    Layers with the same numbers of rows are summed at once.
    """
    alike: dict[tuple[tuple[int, ...], torch.device, bool], list[int]] = defaultdict(list)
    for i, change in changes.items():
        alike[(change.calls, change.lengths.device, change.inner is None)].append(i)
    found: dict[int, Tensor] = {}
    for (calls, device, blind), some in alike.items():
        dh, h = (torch.stack([getattr(changes[i], name) for i in some]).double() for name in ("lengths", "before"))
        inner = b = torch.full_like(dh, torch.nan)
        if not blind:
            inner, b = (
                torch.stack([getattr(changes[i], name) for i in some]).double() for name in ("inner", "gradient")
            )
        table = torch.stack([torch.ones_like(dh), *row_ratios(dh, h), inner, *map(torch.square, (dh, h, b))], -1)
        index = torch.cat([spread(rows, groups, device) for rows in calls])
        sums = table.new_zeros(len(some), groups, table.shape[-1]).index_add_(1, index, table)  # (L, G, 7)
        found.update(zip(some, sums, strict=True))
    return found


def statistics(sums: Tensor) -> Tensor:
    """Return feature_change, bfa_cos and the sensitivity to what these rows do, (..., 3), from sums (..., 7)."""
    change = sums[..., RATIOS] / sums[..., COUNTED]
    dh, b = sums[..., DH].sqrt(), sums[..., B].sqrt()
    rms = dh / sums[..., ROWS].sqrt()
    return torch.stack([change, -sums[..., INNER] / (dh * b), -rms / sums[..., INNER]], -1)
