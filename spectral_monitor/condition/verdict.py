"""A verdict: one layer, how far it is from where it should be, and what it likely is."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """A layer that violates the spectral condition; plain data.

    Attributes:
        layer: its name.
        quantity: what gave it away, a key of the measurement.
        value: of that quantity.
        band: where the value should be, in its own units; 0 and inf where there is no limit, and 0 itself is outside.
        ratio: value over the reference.
        steps: optimizer steps since it was first seen outside.
        measurements: how many it was seen outside since.
        cause: short code, one of :data:`~spectral_monitor.condition.causes.CAUSES`.
        sentence: what it likely is and what to do.

    Example:
        >>> verdict = Verdict("head", "update_natural", 0.1, (2.5e-4, 0.016), 50.0, 120, 7, "unknown", "who knows")
        >>> print(verdict)
        head: update_natural 0.1, should be 0.00025 .. 0.016, for 120 steps: who knows
    """

    layer: str
    quantity: str
    value: float
    band: tuple[float, float]
    ratio: float
    steps: int
    measurements: int
    cause: str
    sentence: str

    def to_row(self) -> dict[str, Any]:
        """As a plain dict: ``band`` becomes ``low`` and ``high``, ``None`` where there is no limit."""
        row = asdict(self)
        low, high = row.pop("band")
        return row | {"low": low or None, "high": None if math.isinf(high) else high}

    @property
    def should_be(self) -> str:
        """The band in words."""
        low, high = self.band
        if math.isinf(high):
            return f"above {short(low)}"
        return f"below {short(high)}" if low == 0 else f"{short(low)} .. {short(high)}"

    def __str__(self) -> str:
        seen = f"{self.quantity} {short(self.value)}, should be {self.should_be}"
        return f"{self.layer}: {seen}, for {self.steps} steps: {self.sentence}"


def short(value: float) -> str:
    """Two digits.

    Example:
        >>> short(0.0123), short(46.7), short(12345.0), short(0.0)
        ('0.012', '47', '12000', '0')
    """
    return f"{float(f'{value:.2g}'):.0f}" if 10 <= abs(value) < 1e6 else f"{value:.2g}"
