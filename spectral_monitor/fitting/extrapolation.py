"""The limit of a quantity that was measured at several widths, by ``q(n) = q_inf + c / n``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectral_monitor.fitting.power_law import FEWEST, t_quantile


@dataclass(frozen=True)
class Extrapolation:
    """The limit of a quantity as the width grows.

    Attributes:
        value: at infinite width; NaN where there is none.
        low, high: the 95 % interval around it.
        slope: c in ``q_inf + c / n``.
        widths: those of the fit.
        reason: why there is no value; empty if there is one.
    """

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    slope: float = math.nan
    widths: tuple[int, ...] = ()
    reason: str = ""

    def distance(self, value: float) -> float:
        """Return the relative distance of a value from the limit.

        Example:
            >>> round(Extrapolation(2.0, 1.9, 2.1, 5.0, (64, 128, 256)).distance(2.1), 3)
            0.05
        """
        return abs(value - self.value) / abs(self.value) if self.value else math.nan

    def __str__(self) -> str:
        if self.reason:
            return f"no limit: {self.reason}"
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}] at infinite width"


def extrapolate(widths: Sequence[int], values: Sequence[Sequence[float]]) -> Extrapolation:
    r"""Return the limit at infinite width of values measured at several widths and with several seeds.

    For each seed the line ``q_inf + c / n`` is fitted by least squares, with weight n, because deviations of single
    networks are of order ``n^-1/2``. The mean over seeds has Student's 95 % interval. If the fit needs the squares of
    ``1/n`` (the interval of their coefficient excludes 0) the smallest width is left out, as long as three remain.

    Args:
        widths: n widths.
        values: a row for each seed, of n values. Seeds with a value that is not finite are left out.

    Returns:
        The limit; without a value, and with a reason, for fewer than three widths or two seeds.

    Example:
        >>> str(extrapolate([64, 128, 256], [[3.0, 2.5, 2.25], [3.1, 2.55, 2.275]]))
        '2 [2, 2] at infinite width'
    """
    order = sorted(range(len(widths)), key=lambda i: widths[i])
    n = torch.tensor([float(widths[i]) for i in order], dtype=torch.float64)
    rows = [[row[i] for i in order] for row in values]
    q = torch.tensor([row for row in rows if all(map(math.isfinite, row))], dtype=torch.float64)
    if len(set(widths)) < FEWEST:
        return Extrapolation(reason=f"{len(set(widths))} widths, at least {FEWEST} are needed")
    if len(q) < 2:
        return Extrapolation(reason=f"{len(q)} seeds with values at all widths, at least 2 are needed")
    while len(n) > FEWEST:
        _, low, high = _interval(_coefficients(n, q, degree=2)[:, 2])
        if low <= 0 <= high:
            break
        n, q = n[1:], q[:, 1:]
    lines = _coefficients(n, q, degree=1)
    mean, low, high = _interval(lines[:, 0])
    return Extrapolation(mean, low, high, lines[:, 1].mean().item(), tuple(int(width) for width in n))


def _coefficients(n: Tensor, q: Tensor, degree: int) -> Tensor:
    """Return the coefficients (seeds, degree + 1) of polynomials in ``1/n``, by least squares with weight n."""
    powers = torch.stack([n**-k for k in range(degree + 1)], 1)  # (widths, degree + 1)
    scale = torch.linalg.vector_norm(powers, dim=0)
    root = n.sqrt()[:, None]
    solution: Tensor = torch.linalg.lstsq(root * powers / scale, root * q.T).solution
    return torch.div(solution, scale[:, None]).mT


def _interval(values: Tensor) -> tuple[float, float, float]:
    """Return the mean over seeds and Student's interval around it."""
    mean = values.mean().item()
    half = t_quantile(len(values) - 1) * values.std().item() / math.sqrt(len(values))
    return mean, mean - half, mean + half
