"""Power laws on log-log axes: a slope from several seeds, with an interval, or a reason why there is none."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
FEWEST = 3
"""Sizes that a slope needs; two points always lie on a line."""


@dataclass(frozen=True)
class Fit:
    """A slope on log-log axes.

    Attributes:
        slope: mean over seeds of the least-squares slope of each; NaN where there is none.
        low, high: the 95 % interval around it.
        seeds: indices of the rows of values that were used.
        how: the source of the interval: ``"seeds"``, or with one seed ``"residuals"``.
        reason: why there is no slope; empty if there is one.
    """

    slope: float = math.nan
    low: float = math.nan
    high: float = math.nan
    seeds: tuple[int, ...] = ()
    how: str = ""
    reason: str = ""


def fit_slope(sizes: Sequence[float], values: Sequence[Sequence[float]]) -> Fit:
    r"""Fit the exponent s of ``value ~ size^s``: for each seed by least squares on log-log axes, then the mean.

    The interval is Student's: over k seeds ``mean +- t(k - 1) deviation / sqrt(k)``. With a single seed it is that of
    the regression, from the residuals with ``n - 2`` degrees of freedom, without the scatter between seeds.

    Args:
        sizes: n widths or depths.
        values: a row for each seed, of n values; NaN for missing ones.

    Returns:
        The fit; without a slope, and with a reason, if no seed has positive finite values at three different sizes.
        Seeds with fewer are left out.

    Example:
        >>> fit = fit_slope([64, 128, 256], [[8.0, 16.0, 32.0], [4.0, 8.0, math.nan]])
        >>> fit.slope, fit.seeds, fit.how
        (1.0, (0,), 'residuals')
        >>> fit_slope([64, 128], [[8.0, 16.0]]).reason
        'values at only 2 sizes, a slope needs 3'
    """
    slopes, errors, most_sizes = {}, {}, 0
    for seed, row in enumerate(values):
        pairs = [(math.log(x), math.log(y)) for x, y in zip(sizes, row, strict=True) if 0 < y < math.inf]
        distinct = len({x for x, _ in pairs})
        most_sizes = max(most_sizes, distinct)
        if distinct >= FEWEST:
            slopes[seed], errors[seed] = _line(pairs)
    if not slopes:
        return Fit(reason=f"values at only {most_sizes} sizes, a slope needs {FEWEST}" if most_sizes else "no values")
    mean = statistics.fmean(slopes.values())
    if len(slopes) == 1:
        (seed,) = slopes
        used = len([y for y in values[seed] if 0 < y < math.inf])
        half, how = t_quantile(used - 2) * errors[seed], "residuals"
    else:
        deviation = statistics.stdev(slopes.values(), mean)
        half, how = t_quantile(len(slopes) - 1) * deviation / math.sqrt(len(slopes)), "seeds"
    return Fit(mean, mean - half, mean + half, tuple(slopes), how)


def _line(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the slope by least squares, and its standard error from the residuals."""
    logs = [x for x, _ in pairs]
    slope, offset = statistics.linear_regression(logs, [y for _, y in pairs])
    residual = math.fsum((y - offset - slope * x) ** 2 for x, y in pairs)
    return slope, math.sqrt(residual / (len(logs) - 2) / (statistics.pvariance(logs) * len(logs)))


def t_quantile(freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's t, at 1 degree of freedom or more.

    It uses the finite sums of the distribution for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4).

    Example:
        >>> [round(t_quantile(freedom), 3) for freedom in (1, 2, 10, 1000)]
        [12.706, 4.303, 2.228, 1.962]
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < CONFIDENCE else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _inside(theta: float, freedom: int) -> float:
    """Return the probability of ``|T| <= sqrt(freedom) tan(theta)``."""
    cos, sin = math.cos(theta), math.sin(theta)
    odd = freedom % 2
    term = total = cos if odd else 1.0
    if freedom == 1:
        total = 0.0
    for k in range(2 + odd, freedom - 1, 2):  # 2/3, 4/5, ... or 1/2, 3/4, ...
        term *= cos * cos * (k - 1) / k
        total += term
    return 2 / math.pi * (theta + sin * total) if odd else sin * total
