"""Formulas of feature rows: size, change, alignment with weights, outliers, underflow in 8 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spectral_monitor.functional.norms import as_stack, ratio, same_shape, spectral_norm
from spectral_monitor.functional.standard_errors import standard_error
from spectral_monitor.functional.vector_norms import common_dtype, largest, lengths, whole_length
from spectral_monitor.linalg import compute_dtype

CHUNK = 1 << 22
"""Entries that are cast at a time."""


def as_rows(x: Tensor, name: str) -> Tensor:
    """Return ``x`` (rows, features) in its dtype for computing."""
    if x.ndim != 2 or not x.is_floating_point():
        raise ValueError(f"{name} must be real floating-point (rows, features), got {x.dtype} {tuple(x.shape)}")
    return x.to(compute_dtype(x.dtype))


def ratio_sum(numerator: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over rows (last) of ``numerator / denominator`` where the denominator is not 0, and their number.

    Unlike means, sums and counts add up over batches and processes. NaN and inf are never left out.
    """
    ratios, counted = row_ratios(numerator, denominator)
    return ratios.sum(-1), counted.sum(-1)


def row_ratios(numerator: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``numerator / denominator``, or 0 where the denominator is 0, and where it is not 0."""
    counted = denominator != 0
    left_out = (denominator == 0) & numerator.isfinite()
    return torch.where(left_out, 0.0, numerator / torch.where(counted, denominator, 1.0)), counted


def mean_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the mean over rows of ``numerator / denominator`` where that is defined; NaN if it is nowhere."""
    return ratio(*ratio_sum(numerator, denominator))


@torch.no_grad()
def feature_rms(h: Tensor) -> Tensor:
    r"""RMS of the entries of ``h``.

    Args:
        h: any shape, real floating point; half precisions are summed in float32.

    Returns:
        A scalar; NaN for an empty tensor.

    Raises:
        ValueError: ``h`` is not real floating point.

    Source: "A Spectral Condition for Feature Learning", Desideratum 1 (entries of order 1).

    Example:
        >>> import torch
        >>> feature_rms(torch.tensor([[3.0, 4.0]])) ** 2
        tensor(12.5000)
    """
    if not h.is_floating_point():
        raise ValueError(f"h must be real floating-point, got {h.dtype} {tuple(h.shape)}")
    root = math.sqrt(h.numel()) or math.nan
    return (whole_length(h) / root).to(compute_dtype(h.dtype))


@torch.no_grad()
def change_sum(h_before: Tensor, h_after: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum (float64) and number of the rows' relative changes, for the mean of :func:`relative_change`."""
    before, after = as_rows(h_before, "h_before"), as_rows(h_after, "h_after")
    same_shape(h_before=before, h_after=after)
    return ratio_sum(lengths(after - before), lengths(before))


@torch.no_grad()
def relative_change(h_before: Tensor, h_after: Tensor) -> Tensor:
    r"""Mean over rows of :math:`\|h_{after} - h_{before}\| / \|h_{before}\|`.

    Args:
        h_before: (rows, m) features before the step.
        h_after: (rows, m) features of the same inputs after it.

    Returns:
        A scalar >= 0. Rows of zero norm are left out; NaN if that leaves none.

    Raises:
        ValueError: not (rows, features), or shapes differ.

    Source: "A Spectral Condition for Feature Learning", Desideratum 1; with features at the start for
    ``h_before``, its Eq. 23.

    Example:
        >>> import torch
        >>> relative_change(torch.ones(5, 3), 1.5 * torch.ones(5, 3))
        tensor(0.5000)
    """
    return ratio(*change_sum(h_before, h_after)).to(common_dtype(h_before, h_after))


def scaled_stretch_sum(products: Tensor, lengths: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    r"""Sum over rows of :math:`\|A x\| / (\|A\|_* \|x\|)` and the number of rows; both 0 if ``A`` is 0.

    Args as :func:`mean_alignment`.
    """
    stretch = torch.where(lengths == 0, 0.0, products / lengths)
    # No row is stretched by more than the norm: a row that is corrects a norm that was estimated too low.
    norm = torch.maximum(norm, stretch.amax(-1)) if stretch.shape[-1] else norm
    total, rows = ratio_sum(products, lengths)
    return torch.where(norm == 0, 0.0, total / norm), rows * (norm != 0)


def mean_alignment(products: Tensor, lengths: Tensor, norm: Tensor) -> Tensor:
    r"""Return the mean over rows of :math:`\|A x\| / (\|A\|_* \|x\|)` from lengths and the norm.

    Args:
        products: (..., rows) the lengths of the rows ``A x``.
        lengths: (..., rows) the lengths of the rows ``x``.
        norm: (...), the spectral norm of ``A``.

    Returns:
        A scalar in [0, 1]; NaN if ``A`` or every row is 0.
    """
    return ratio(*scaled_stretch_sum(products, lengths, norm))


def mean_alignment_error(products: Tensor, lengths: Tensor, norm: Tensor, groups: Tensor | None = None) -> Tensor:
    """Return the standard error of :func:`mean_alignment` if the rows are a random sample; NaN for one row.

    ``groups``: as for :func:`standard_error_of_mean`.
    """
    ratios, counted = row_ratios(products, lengths)
    return standard_error_of_mean(ratios, counted, groups) / torch.where(norm == 0, torch.nan, norm)


def standard_error_of_mean(values: Tensor, counted: Tensor, groups: Tensor | None = None) -> Tensor:
    """Return the standard error of the mean of the counted values (..., rows); NaN of less than two.

    ``groups`` (..., rows): the sample, or group of samples, that each row belongs to, if rows are not independent
    because they are all those of a few samples.
    """
    if groups is not None:
        table = torch.stack([counted.to(values), torch.where(counted, values, 0.0)], -1)  # (..., rows, 2)
        sums = table.new_zeros(*table.shape[:-2], int(groups.max()) + 1, 2)
        sums.scatter_add_(-2, groups[..., None].expand_as(table), table)
        return standard_error(sums, lambda totals: totals[..., 1:] / totals[..., :1]).squeeze(-1)
    n = counted.sum(-1)
    mean = torch.where(counted, values, 0.0).sum(-1) / n
    squares = torch.where(counted, values - mean[..., None], 0.0).square().sum(-1)
    return (squares / (n - 1) / n).sqrt()


@torch.no_grad()
def alignment_sum(A: Tensor, x: Tensor, *, tol: float = 0.01, exact: bool = False) -> tuple[Tensor, Tensor]:
    """Return the sum (float64) and number of the rows' alignments, for the mean of :func:`alignment`."""
    rows = as_rows(x, "x")
    if A.ndim != 2 or A.shape[1] != rows.shape[1]:
        raise ValueError(f"A must be (m, {rows.shape[1]}) to act on x {tuple(x.shape)}, got {tuple(A.shape)}")
    matrix = as_stack(A).squeeze(0).to(compute_dtype(A.dtype))
    # Alignment does not depend on the size of either.
    matrix, rows = matrix / largest(matrix), rows / largest(rows, -1)
    norm = spectral_norm(matrix, tol=tol, exact=exact).double()
    dtype = common_dtype(A, x)
    with torch.autocast(x.device.type, enabled=False):
        products = rows.to(dtype) @ matrix.to(dtype).T
    return scaled_stretch_sum(lengths(products), lengths(rows), norm)


@torch.no_grad()
def alignment(A: Tensor, x: Tensor, *, tol: float = 0.01, exact: bool = False) -> Tensor:
    r"""Mean over rows of :math:`\|A x\| / (\|A\|_* \|x\|)`: how close inputs are to the direction A stretches most.

    Args:
        A: (m, n) a weight (alignment) or an update (update alignment).
        x: (rows, n) the layer's inputs.
        tol, exact: as in :func:`spectral_monitor.functional.spectral_norm`.

    Returns:
        A scalar in [0, 1]. Rows of zero norm are left out; NaN if that leaves none or A is zero.

    Raises:
        ValueError: ``A`` is not a matrix, ``x`` not (rows, n) with A's n.

    Source: "A Spectral Condition for Feature Learning", Eq. 24, 25 and Fig. 1.

    Example:
        >>> import torch
        >>> alignment(torch.diag(torch.tensor([2.0, 1.0])), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        tensor(0.7500)
    """
    return ratio(*alignment_sum(A, x, tol=tol, exact=exact)).to(common_dtype(A, x))


@torch.no_grad()
def channel_sizes(h: Tensor) -> Tensor:
    """Return the sum of squares and the largest size of each channel's entries, (2, m) float64, from rows (rows, m)."""
    peaks = h.abs().amax(0) if len(h) else h.new_zeros(h.shape[1])
    return torch.stack([lengths(h.T).square(), peaks.double()])


@torch.no_grad()
def feature_kurtosis(squares: Tensor) -> Tensor:
    """Return the kurtosis of the channels' root mean squares, from sums of squares (m,).

    Returns:
        A scalar in [1, m]: 1 if all channels are equal, m if all but one are 0; NaN if all are 0.

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
        parts: one or more parts of a tensor, of any shapes (..., n).
        format: such as ``torch.float8_e4m3fn``.

    Returns:
        A scalar in [0, 1]; 0 if all entries are 0.

    Example:
        >>> underflow_share([torch.tensor([0.0, 1.0, 1e-9, 1.0, -1.0])], torch.float8_e4m3fn)
        tensor(0.2500)
    """
    size = torch.stack([largest(part).to(compute_dtype(part.dtype)) for part in parts]).amax()
    lost = nonzero = torch.zeros((), dtype=torch.float64, device=size.device)
    rows = [part.reshape(-1, part.shape[-1]) for part in parts]
    for chunk in (x for part in rows for x in part.split(max(1, CHUNK // max(part.shape[1], 1)))):
        scaled = chunk.to(size) / size * torch.finfo(format).max
        nonzero = nonzero + (chunk != 0).sum()
        lost = lost + ((chunk != 0) & (scaled.to(format).to(scaled) == 0)).sum()
    return (lost / nonzero.clamp(min=1)).to(size)
