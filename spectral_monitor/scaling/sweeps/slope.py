"""The slope of one quantity of one layer over the width or depth, and its meaning."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from spectral_monitor.fitting.power_law import Fit

TOLERANCE = 0.1
"""Slopes this close count as equal. Over 16 times the width that is 30 %, as much as small widths deviate anyway."""


@dataclass(frozen=True)
class Slope:
    """The slope of one quantity of one layer over the width, or the depth.

    Attributes:
        layer: its name; in a sweep over depths, layers of a family are ``"blocks.*.mlp (first)"``, ``(middle)``,
            ``(last)``.
        quantity: a key of the registry.
        axis: ``"width"`` or ``"depth"``.
        beside: the depth (or width) of all its networks; ``None`` without ``depths=``.
        sizes: n widths or depths.
        values: n geometric means over the seeds; NaN where there is none.
        least, most: n values each, the smallest and the largest in size over the seeds.
        fit: the slope on log-log axes and its interval, or the reason why there is none.
        predicted: the slope that theory predicts; NaN where it predicts none.
        excluded: values left out, with the reason.
        note: a remark, such as that the layer's shape does not change.
    """

    layer: str
    quantity: str
    axis: str
    beside: int | None
    sizes: tuple[int, ...]
    values: tuple[float, ...]
    least: tuple[float, ...]
    most: tuple[float, ...]
    fit: Fit
    predicted: float
    excluded: tuple[str, ...] = ()
    note: str = ""

    @property
    def verdict(self) -> str:
        """``"as predicted"`` or ``"not as predicted"``; without a prediction ``"flat"``, ``"grows"`` or ``"vanishes"``.

        ``"unclear"`` where the interval lies both inside and outside the tolerance; ``"no slope"`` without a slope.
        """
        if self.fit.reason:
            return "no slope"
        above, below = self.fit.low - self._expected, self.fit.high - self._expected
        if above >= -TOLERANCE and below <= TOLERANCE:
            return "flat" if math.isnan(self.predicted) else "as predicted"
        if above <= TOLERANCE and below >= -TOLERANCE:
            return "unclear"
        if not math.isnan(self.predicted):
            return "not as predicted"
        return "grows" if above > 0 else "vanishes"

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        if self.verdict == "no slope":
            return f"no slope: {self.fit.reason}"
        if self.verdict == "not as predicted":
            return f"not as predicted: {self.behaviour}"
        if self.verdict == "unclear":
            inside = self.fit.low <= self._expected <= self.fit.high
            guess = "it may be flat" if math.isnan(self.predicted) else "it fits the prediction"
            hint = "seeds" if self.fit.how == "seeds" else "seeds or sizes"
            return f"unclear{f', but {guess}' if inside else ''}: try more {hint}"
        return self.verdict if self.verdict in ("as predicted", "flat") else self.behaviour

    @property
    def behaviour(self) -> str:
        """The behaviour in words: flat, growing or vanishing, and how fast."""
        if abs(self.fit.slope) <= TOLERANCE:
            return "flat"
        verb = "grows" if self.fit.slope > 0 else "vanishes"
        return f"{verb} like {self.axis}^{exponent(self.fit.slope)}"

    @property
    def distance(self) -> float:
        """The distance from the predicted slope; without a prediction from 0."""
        return abs(self.fit.slope - self._expected)

    @property
    def _expected(self) -> float:
        """The predicted slope; 0 (flat) without a prediction."""
        return 0.0 if math.isnan(self.predicted) else self.predicted

    def to_row(self) -> dict[str, Any]:
        """Return a dict of plain values."""
        return {
            "layer": self.layer,
            "quantity": self.quantity,
            **({} if self.beside is None else {"depth" if self.axis == "width" else "width": self.beside}),
            **{f"{self.axis}_{size}": value for size, value in zip(self.sizes, self.values, strict=True)},
            "slope": self.fit.slope,
            "low": self.fit.low,
            "high": self.fit.high,
            "interval": self.fit.how,
            "predicted": self.predicted,
            "verdict": self.verdict,
            "sentence": self.sentence,
            "excluded": "; ".join(self.excluded),
            "note": self.note,
        }


def exponent(value: float) -> str:
    """Return an exponent with two decimals; never -0.

    Example:
        >>> exponent(-0.001), exponent(0.98)
        ('0.00', '0.98')
    """
    return f"{round(value, 2) + 0.0:.2f}"
