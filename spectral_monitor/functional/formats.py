"""Outliers among features, and entries that formats of 8 bits lose."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spectral_monitor.functional.norms import ratio
from spectral_monitor.functional.vector_norms import largest
from spectral_monitor.linalg import compute_dtype


@torch.no_grad()
def channel_sizes(h: Tensor) -> Tensor:
    """Return the sum of squares and the largest size of each channel's entries, (2, m), from rows (rows, m)."""
    h = h.to(compute_dtype(h.dtype))
    peaks = h.abs().amax(0) if len(h) else h.new_zeros(h.shape[1])
    return torch.stack([h.square().sum(0), peaks])


@torch.no_grad()
def feature_kurtosis(squares: Tensor) -> Tensor:
    """Return the kurtosis of the channels' root mean squares, from sums of squares (m,).

    Returns:
        A scalar in [1, m]: 1 where all channels are alike, m where a single one has everything; NaN if all are 0.

    Source: He et al. 2024, "Understanding and Minimising Outlier Features in Transformer Training", Eq. 1.

    Example:
        >>> feature_kurtosis(torch.tensor([1.0, 1.0, 1.0, 5.0]))
        tensor(1.7500)
    """
    shares = squares / largest(squares)
    return ratio(shares.square().mean(), shares.mean().square())


@torch.no_grad()
def outlier_ratio(peaks: Tensor) -> Tensor:
    """Return the largest of the channels' peaks (m,) over the median one; NaN if that is 0.

    Example:
        >>> outlier_ratio(torch.tensor([1.0, 2.0, 30.0]))
        tensor(15.)
    """
    return ratio(peaks.amax(), peaks.median())


@torch.no_grad()
def underflow_share(parts: Sequence[Tensor], format: torch.dtype) -> Tensor:
    """Return the share of entries other than 0 that become 0 in a format of 8 bits.

    The tensor is scaled first so that its largest entry is the largest number of the format.

    Args:
        parts: of one tensor, of any shapes; at least one.
        format: such as ``torch.float8_e4m3fn``.

    Returns:
        A scalar in [0, 1]; 0 where all entries are.

    Example:
        >>> underflow_share([torch.tensor([0.0, 1.0, 1e-9, 1.0, -1.0])], torch.float8_e4m3fn)
        tensor(0.2500)
    """
    size = torch.stack([largest(part).to(compute_dtype(part.dtype)) for part in parts]).amax()
    lost = there = torch.zeros((), dtype=torch.float64, device=size.device)
    for part in parts:
        some = part != 0
        scaled = part.to(size) / size * torch.finfo(format).max
        there = there + some.sum()
        lost = lost + (some & (scaled.to(format).to(scaled) == 0)).sum()
    return (lost / there.clamp(min=1)).to(size)
