"""The noise of gradients over samples, from the rows of a layer's inputs and output gradients."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from spectral_monitor.functional.standard_errors import STUDENT
from spectral_monitor.functional.vector_norms import common_dtype, largest

CHUNK = 1 << 22
"""Entries of products in memory at a time."""
MIN_SAMPLES = 4
"""Samples that an interval of the noise needs."""


@torch.no_grad()
def sample_products(h_in: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared norm of each sample's gradient, and its inner product with the sum of all of them.

    The gradient of a matrix by sample i is ``c_i = sum_t b_it h'_it^T``. Only their sum is ever formed as a whole:
    ``|c_i|^2 = sum_ts <b_it, b_is> <h'_it, h'_is>``, or from ``c_i`` itself, a few at a time, if that is less work.

    Args:
        h_in: (samples, rows, n) inputs of a matrix.
        b: (samples, rows, m) gradients of its outputs.

    Returns:
        Two tensors (samples,) in float64.

    Example:
        >>> sample_products(torch.ones(2, 1, 3), torch.tensor([[[1.0]], [[3.0]]]))
        (tensor([ 3., 27.], dtype=torch.float64), tensor([12., 36.], dtype=torch.float64))
    """
    dtype = common_dtype(h_in, b)
    x, y = h_in.to(dtype), b.to(dtype)
    sizes = largest(x), largest(y)  # squares of small gradients would leave the range of float32
    x, y = x / sizes[0], y / sizes[1]
    (_, T, n), m = x.shape, y.shape[2]
    by_rows = T * (m + n) <= m * n
    step = max(1, CHUNK // max(T * T if by_rows else m * n, T * n, 1))
    with torch.autocast(x.device.type, enabled=False):
        total = y.flatten(0, 1).T @ x.flatten(0, 1)  # (m, n)
        squares, inner_products = [], []
        for inputs, gradients in zip(x.split(step), y.split(step), strict=True):
            if by_rows:
                products = (inputs @ inputs.mT) * (gradients @ gradients.mT)
            else:
                products = (gradients.mT @ inputs).square()
            squares.append(products.sum((1, 2), dtype=torch.float64))
            inner_products.append(((gradients @ total) * inputs).sum((1, 2), dtype=torch.float64))
    factor = (sizes[0].double() * sizes[1].double()).square()
    return torch.cat(squares) * factor, torch.cat(inner_products) * factor


@torch.no_grad()
def noise_moments(squares: Tensor, inner_products: Tensor) -> Tensor:
    """Return estimates of the size of the samples' gradients and of their mean, as float64 (6,).

    Args:
        squares: (samples,) squared norms of the samples' gradients.
        inner_products: (samples,) their inner products with the sum of all gradients.

    Returns:
        The number of samples. The mean squared norm ``A``, which estimates ``|G|^2 + tr Sigma``. Over ``A`` the mean
        inner product ``P`` of two different samples, which estimates ``|G|^2`` without a bias. Over ``A^2`` the
        variance of ``A``, its covariance with ``P``, and the variance of ``P``, by the jackknife over samples. Zeros of
        fewer than 4 samples.
    """
    S = len(squares)
    if S < MIN_SAMPLES:
        return squares.new_zeros(6)
    sum_of_squares, square_of_sum = squares.sum(), inner_products.sum()
    size, product = sum_of_squares / S, (square_of_sum - sum_of_squares) / (S * (S - 1))
    others = sum_of_squares - squares  # without one sample each
    sizes = others / (S - 1)
    products = (square_of_sum - 2 * inner_products + squares - others) / ((S - 1) * (S - 2))
    deviations = torch.stack([sizes - sizes.mean(), products - products.mean()])
    variances = (S - 1) / S * (deviations @ deviations.T)
    scale = torch.where(size > 0, size, 1.0)
    parts = torch.stack([product / scale, variances[0, 0], variances[0, 1], variances[1, 1]])
    parts[1:] /= scale.square()
    return torch.cat([torch.stack([torch.full_like(size, S), size]), parts])


class NoiseScale(NamedTuple):
    """A noise scale with an interval."""

    value: float  # ``tr Sigma / |G|^2``; NaN where the estimate of ``|G|^2`` is not above 0
    low: float  # lower end of an interval that holds it in 95 of 100 cases
    high: float  # upper end; infinite where ``G`` may be 0


def noise_scale(moments: Tensor) -> NoiseScale:
    """Return the noise scale from moments (processes, 6) of different samples.

    The interval is Fieller's: all ratios ``r`` for which ``A - r P`` is within two standard errors of 0, or more if
    samples are few.

    Source: McCandlish et al., "An Empirical Model of Large-Batch Training", Eq. 2.9; Fieller 1954.

    Example:
        >>> gradients = torch.tensor([[4.0, 0.0], [4.0, 1.0], [4.0, -1.0], [4.0, 0.0]], dtype=torch.float64)
        >>> G = gradients.sum(0)
        >>> moments = noise_moments(gradients.square().sum(1), gradients @ G)
        >>> round(noise_scale(moments[None]).value, 4)
        0.042
    """
    rows = [row for row in moments.tolist() if row[1]]  # others have no samples, or no gradient
    if not rows or not math.isfinite(sum(map(sum, rows))):
        return NoiseScale(math.nan, math.nan, math.nan)
    # Pairs are formed within a process, and its moments are relative to its own A.
    samples = sum(row[0] for row in rows)
    pairs = sum(row[0] * (row[0] - 1) for row in rows)
    A = sum(row[0] * row[1] for row in rows) / samples
    P = aa = ap = pp = 0.0
    for count, size, product, *variances in rows:
        sample_share, pair_share, relative = count / samples, count * (count - 1) / pairs, size / A
        P += pair_share * product * relative
        aa += sample_share**2 * variances[0] * relative**2
        ap += sample_share * pair_share * variances[1] * relative**2
        pp += pair_share**2 * variances[2] * relative**2
    free = int(samples) - len(rows)
    z = 2 * (STUDENT[free - 1] if free <= len(STUDENT) else 1.0)
    # (1 - r P)^2 <= z^2 (aa - 2 r ap + r^2 pp), in units of A
    first, second, last = P**2 - z**2 * pp, P - z**2 * ap, 1 - z**2 * aa
    root = math.sqrt(max(second**2 - first * last, 0.0))
    low = max(last / (second + root) - 1, 0.0) if second + root > 0 else 0.0
    high = (second + root) / first if first > 0 and P > 0 else math.inf
    return NoiseScale(1 / P - 1 if P > 0 else math.nan, low, high - 1)
