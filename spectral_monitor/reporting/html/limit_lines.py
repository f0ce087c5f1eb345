"""The limit of infinite width on a page: dashed lines, and how far the run is from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from spectral_monitor.measurement import Measurement
from spectral_monitor.reporting.html.figures import Figure, digits, drawable, line

NAME = "infinite width"
COLOUR = "@soft"
LARGEST = 5.0
"""Factor beyond the curves' range up to which a dashed line widens it."""


def limit_sentences(run: Sequence[Measurement], limit: Sequence[Measurement]) -> list[str]:
    """Return how far a run is from its limit at the last step where both have values: one sentence for each quantity.

    Example:
        >>> import torch
        >>> from spectral_monitor.measurement import LayerInfo
        >>> layers = (LayerInfo("0", "operator", 512, 8, (512, 8)),)
        >>> def at(value):
        ...     return [Measurement(5, layers, {"feature_change": torch.tensor([value])}, {})]
        >>> limit_sentences(at(0.96), at(1.0))
        ['At step 5 feature_change is within 4 % of its limit of infinite width.']
    """
    steps = {measurement.step: measurement for measurement in limit}
    both = [(measurement, steps[measurement.step]) for measurement in run if measurement.step in steps]
    said = []
    for key in dict.fromkeys(key for _, there in both for key in there.values):
        for now, there in reversed(both):
            apart = list(_distances(now, there, key))
            if apart:
                percent = math.ceil(100 * max(apart) - 1e-3)
                said.append(f"At step {now.step} {key} is within {percent} % of its limit of infinite width.")
                break
    return said


def _distances(now: Measurement, there: Measurement, key: str) -> Iterator[float]:
    """Yield the relative distance of every layer that has both values."""
    if key not in now.values or key not in there.values:
        return
    known = {info.name for info in now.layers}
    for info in there.layers:
        if info.name in known:
            value, goal = now.value(key, info.name), there.value(key, info.name)
            if math.isfinite(value) and math.isfinite(goal) and goal:
                yield abs(value / goal - 1)


def limit_traces(limit: Sequence[Measurement], key: str, names: Sequence[str]) -> list[Figure]:
    """Return a dashed grey line for each of these layers whose limit of infinite width is known."""
    found = drawable(limit, key) if limit else None
    if found is None:
        return []
    traces: list[Figure] = []
    for info, values in zip(found.layers, found.values(key).tolist(), strict=True):
        known = [(step, value) for step, value in zip(found.steps, values, strict=True) if math.isfinite(value)]
        if info.name in names and known:
            traces.append(
                line(
                    [step for step, _ in known],
                    digits([value for _, value in known]),
                    line={"color": COLOUR, "width": 1.6, "dash": "dash"},
                    name=NAME,
                    legendgroup=NAME,
                    legendrank=3500,
                    showlegend=not traces,
                    hovertemplate=f"{info.name}, {NAME}: %{{y}}<extra></extra>",
                )
            )
    return traces


def widened(low: float, high: float, traces: Sequence[Figure], log: bool) -> tuple[float, float]:
    """Return the range of an axis with room for dashed lines that are not far from its curves.

    Example:
        >>> widened(1.0, 2.0, [{"y": [3.0, 4.0]}, {"y": [1e6]}], log=True)
        (1.0, 4.4)
    """
    values = [value for trace in traces for value in trace["y"]]
    if log:
        near = [value for value in values if low / LARGEST < value < high * LARGEST]
        return min([low, *(value / 1.1 for value in near)]), max([high, *(1.1 * value for value in near)])
    reach = LARGEST * (high - low)
    near = [value for value in values if low - reach < value < high + reach]
    return min([low, *near]), max([high, *near])
