"""Numbers and columns as plain text, without what the large tables need."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    """Return rows as lines, columns two spaces apart.

    Args:
        rows: the first has the titles.
        right: places of the columns that go to the right, as numbers do.

    Example:
        >>> columns([("layer", "x"), ("head", "10")], [1])
        ['layer   x', 'head   10']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if k in right else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def short(value: float) -> str:
    """Return three digits of a number, a dash for NaN.

    Example:
        >>> short(0.012345), short(12345.0), short(math.nan)
        ('0.0123', '1.23e+04', '-')
    """
    return "-" if math.isnan(value) else f"{value:.3g}"


def printable(text: str) -> str:
    r"""Return text with escapes for what would break a line or steer a terminal.

    Example:
        >>> print(printable("red\x1b[31m"))
        red\x1b[31m
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(text: str) -> None:
    """Say something on stderr in one line, so that what is printed can go to a file."""
    print(f"spectral-monitor: {printable(text)}", file=sys.stderr)
