"""A number that drifts and is seen through noise, now and then."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

MEMORY = 0.3
"""Weight of the newest error among those that set the pace."""
SLOWEST = 0.2
"""Least part of an error that is made up for."""


@dataclass
class Tracker:
    """Exponential smoothing that is as fast as its errors agree (Trigg and Leach, 1967).

    Errors that all go one way are drift, and made up for in full; errors that cancel out are noise, and mostly left.

    Attributes:
        level: where the number is; NaN before it was seen.
        bias: mean error, signs counted.
        spread: mean size of errors.

    Example:
        >>> drift, noise = Tracker(), Tracker()
        >>> levels = [(drift.see(float(step)), noise.see((-1.0) ** step)) for step in range(40)]
        >>> drift.level > 38, abs(noise.level) < 0.3
        (True, True)
    """

    level: float = math.nan
    bias: float = 0.0
    spread: float = 0.0

    def see(self, value: float) -> float:
        """Take in the next value and return the level."""
        if math.isnan(self.level):
            self.level = value
            return value
        error = value - self.level
        self.bias += MEMORY * (error - self.bias)
        self.spread += MEMORY * (abs(error) - self.spread)
        pace = abs(self.bias) / self.spread if self.spread > 0 else 1.0
        self.level += max(SLOWEST, pace) * error
        return self.level

    def state(self) -> list[float]:
        """Return plain numbers."""
        return list(astuple(self))
