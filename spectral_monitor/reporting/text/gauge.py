"""A gauge of characters: the position of layers between far too small and far too large."""

from __future__ import annotations

import math
from collections.abc import Sequence

from spectral_monitor.reporting.content.typical import log2_within

WIDTH = 23
"""Characters of the scale."""
REACH = 7.0
"""Powers of two on either side of 1; ratios beyond are drawn at the end."""
POINT, RANGE, LIMIT = "o", "=", "|"
"""One layer, several layers from the lowest to the highest, and the limits."""
SYMBOLS: dict[int, str] = str.maketrans({POINT: "●", RANGE: "━"})
"""The same in characters for terminals that have them."""


def scale(limits: tuple[float, float]) -> str:
    """Return the scale above the gauges: its ends, 1, and brackets at the limits that are known.

    Example:
        >>> scale((1 / 16, 8.0)), scale((math.nan, math.nan))
        ('1/128[     1    ]   128', '1/128      1        128')
    """
    line = list(" " * WIDTH)
    for text, start in (("1/128", 0), ("1", WIDTH // 2), ("128", WIDTH - 3)):
        line[start : start + len(text)] = text
    for limit, bracket in zip(limits, "[]", strict=True):
        if limit > 0 and line[_position(limit)] == " ":
            line[_position(limit)] = bracket
    return "".join(line)


def gauge(ratios: Sequence[float], limits: tuple[float, float]) -> str:
    """Return the ratios as a line of the scale; empty if all are NaN.

    Example:
        >>> gauge([85.0], (1 / 16, 8.0))
        '     |          |    o'
        >>> gauge([0.65, 1.6], (1 / 16, 8.0))
        '     |    ===   |'
    """
    positions = [_position(ratio) for ratio in ratios if not math.isnan(ratio)]
    if not positions:
        return ""
    line = list(" " * WIDTH)
    for limit in limits:
        if limit > 0:
            line[_position(limit)] = LIMIT
    first, last = min(positions), max(positions)
    line[first : last + 1] = (POINT if len(positions) == 1 else RANGE) * (last + 1 - first)
    return "".join(line).rstrip()


def _position(ratio: float) -> int:
    """Return the index of the character at which a ratio is drawn."""
    return round((log2_within(ratio, REACH) + REACH) / (2 * REACH) * (WIDTH - 1))
