"""Figures over width as the paper draws them: log axes, envelopes of one standard deviation, slope triangles."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from spectral_monitor.fitting.power_law import Fit, fit_slope

COLORS = {"muP": "#c44e52", "NTP": "#4c72b0"}
STYLES = ("-", "--", ":")
FROM = 64
"""Slopes are those of widths from here on."""

Row = dict[str, Any]


def by_trial(rows: Sequence[Row], key: str, **only: Any) -> tuple[list[int], np.ndarray]:
    """Widths, and a table of trials by widths of the rows that are so; NaN where a width has fewer trials."""
    rows = [row for row in rows if all(row[name] == value for name, value in only.items())]
    widths, trials = (sorted({row[name] for row in rows}) for name in ("width", "trial"))
    found = {(row["trial"], row["width"]): float(row[key]) for row in rows}
    return widths, np.array([[found.get((trial, width), np.nan) for width in widths] for trial in trials])


def slope_of(rows: Sequence[Row], key: str, **only: Any) -> Fit:
    """Against width, with its interval over trials."""
    widths, values = by_trial([row for row in rows if row["width"] >= FROM], key, **only)
    return fit_slope(widths, values.tolist())


def tell(what: str, fit: Fit, expected: float, within: float) -> bool:
    """Print a slope beside what is expected, and say whether it is that."""
    right = abs(fit.slope - expected) <= within
    print(
        f"{what:<42} slope {fit.slope:+.3f} [{fit.low:+.3f}, {fit.high:+.3f}], "
        f"expected {expected:+.1f} within {within}: {'yes' if right else 'NO'}"
    )
    return right


def curve(axes: Axes, rows: Sequence[Row], key: str, label: str, color: str, style: str = "-", **only: Any) -> None:
    """Means over trials, with one standard deviation on either side."""
    widths, values = by_trial(rows, key, **only)
    mean = np.nanmean(values, 0)
    deviation = np.nanstd(values, 0, ddof=1) if len(values) > 1 else np.zeros(len(widths))
    axes.plot(widths, mean, style, color=color, marker="o", ms=3.5, lw=1.8, label=label)
    axes.fill_between(widths, np.maximum(mean - deviation, 0.02 * mean), mean + deviation, color=color, alpha=0.2, lw=0)


def width_axis(axes: Axes, widths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    every = sorted(set(widths))
    axes.set_xticks(every[:: 1 + len(every) // 8], minor=False)  # more labels would touch
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.set_xlabel("width d")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def level(axes: Axes, y: float, text: str) -> None:
    """A value to compare with; its name is written beside the axes."""
    axes.axhline(y, color="0.4", ls="--", lw=0.9)
    axes.text(1.01, y, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8, color="0.3")


def triangle(axes: Axes, x: float, y: float, exponent: str, factor: float = 3.0) -> None:
    """A falling slope to compare with, from ``(x, y)`` on; ``exponent`` as it is to be written."""
    low = y * factor ** float(Fraction(exponent))
    axes.plot([x, factor * x, x, x], [y, low, low, y], color="0.3", lw=0.9)
    place = {"xytext": (-3, 0), "textcoords": "offset points", "ha": "right", "va": "center", "fontsize": 8}
    axes.annotate(exponent.replace("-", "−"), (x, (y * low) ** 0.5), color="0.3", **place)
