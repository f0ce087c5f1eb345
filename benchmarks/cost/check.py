"""Whether a measured step has become dearer than the committed numbers say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.cost.cases import FIXED

SLACK = 1.2
"""Ratios of time, and counts that go with the steps of Lanczos, may be so many times the committed ones."""


@dataclass(frozen=True)
class Line:
    """One number then and now; ``limit`` is the largest that will do."""

    what: str
    committed: float
    now: float
    limit: float

    @property
    def good(self) -> bool:
        """Return whether the number has not grown."""
        return self.now <= self.limit  # NaN is not

    @property
    def word(self) -> str:
        """Return the verdict on the number, in words."""
        if math.isnan(self.now):
            return "FAIL, gone"
        return ("better" if self.now < self.committed else "") if self.good else "FAIL"


def limit(name: str, committed: float) -> float:
    """The largest value of a count that will do."""
    return committed if name in FIXED else max(committed, committed * SLACK)


def compare_counts(
    committed: Mapping[str, Mapping[str, float]], current: Mapping[str, Mapping[str, float]]
) -> list[Line]:
    """Setting by setting; what is new is not compared, what is gone fails."""
    return [
        Line(f"{setting}: {name}", value, current.get(setting, {}).get(name, math.nan), limit(name, value))
        for setting, values in committed.items()
        for name, value in values.items()
    ]


def compare_ratios(committed: Mapping[str, Mapping[str, Any]], current: Mapping[str, Mapping[str, Any]]) -> list[Line]:
    """Measured / plain, setting by setting."""
    return [
        Line(f"{setting}: measured / plain", row["ratio"], measured["ratio"], SLACK * row["ratio"])
        for setting, row in committed.items()
        if (measured := current.get(setting, {"ratio": math.nan}))
    ]


def table(lines: list[Line]) -> str:
    """For people."""
    head = ("", "committed", "now", "limit", "")
    cells = [(line.what, *(f"{x:,.5g}" for x in (line.committed, line.now, line.limit)), line.word) for line in lines]
    widths = [max(len(row[k]) for row in (head, *cells)) for k in range(5)]
    text = []
    for row in (head, *cells):
        pairs = enumerate(zip(row, widths, strict=True))
        padded = [cell.ljust(width) if k in (0, 4) else cell.rjust(width) for k, (cell, width) in pairs]
        text.append("  ".join(padded).rstrip())
    return "\n".join(text)
