"""Medians and maxima of plain numbers, without torch, for commands that read files of measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable


def geometric_median(values: Iterable[float]) -> float:
    """Return the geometric median of the positive finite values; NaN if there are none.

    Example:
        >>> geometric_median([0.1, 0.2, 0.8]), geometric_median([1.0, 4.0, 0.0])
        (0.2, 2.0)
    """
    logs = [math.log(value) for value in values if 0 < value < math.inf]
    return math.exp(statistics.median(logs)) if logs else math.nan


def nanmax(values: Iterable[float], default: float = math.nan) -> float:
    """Return the largest value that is not NaN; ``default`` if there is none.

    Example:
        >>> nanmax([1.0, math.nan]), nanmax([math.nan])
        (1.0, nan)
    """
    return max((value for value in values if not math.isnan(value)), default=default)
