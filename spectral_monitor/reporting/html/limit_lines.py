"""The limit of infinite width on a page: dashed lines, and the distance of the run from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from spectral_monitor.measurement import Measurement
from spectral_monitor.reporting.content.labels import quantity_title
from spectral_monitor.reporting.html.figures import Figure, digits, drawable, line

NAME = "infinite width"
COLOUR = "@soft"
MAX_WIDENING = 5.0
"""Factor by which a dashed line may widen the range of an axis."""


def limit_sentences(run: Sequence[Measurement], limit: Sequence[Measurement]) -> list[str]:
    """Return a sentence for each quantity: how far the run is from its limit at the last step where both have values.

    Example:
        >>> import torch
        >>> from spectral_monitor.measurement import LayerInfo
        >>> layers = (LayerInfo("0", "operator", 512, 8, (512, 8)),)
        >>> def at(value):
        ...     return [Measurement(5, layers, {"feature_change": torch.tensor([value])}, {})]
        >>> limit_sentences(at(0.96), at(1.0))
        ['At step 5 the change of the outputs by a step is within 4 % of its limit of infinite width.']
    """
    at_infinity = {measurement.step: measurement for measurement in limit}
    pairs = [(measurement, at_infinity[measurement.step]) for measurement in run if measurement.step in at_infinity]
    sentences = []
    for key in dict.fromkeys(key for _, infinite in pairs for key in infinite.values):
        for measurement, infinite in reversed(pairs):
            distances = list(_distances(measurement, infinite, key))
            if distances:
                percent = math.ceil(100 * max(distances) - 1e-3)
                what = f"At step {measurement.step} the {quantity_title(key)}"
                sentences.append(f"{what} is within {percent} % of its limit of infinite width.")
                break
    return sentences


def _distances(measurement: Measurement, infinite: Measurement, key: str) -> Iterator[float]:
    """Yield the relative distance of every layer that has both values."""
    if key not in measurement.values or key not in infinite.values:
        return
    names = {info.name for info in measurement.layers}
    for name in (info.name for info in infinite.layers if info.name in names):
        value, limit = measurement.value(key, name), infinite.value(key, name)
        if math.isfinite(value) and math.isfinite(limit) and limit:
            yield abs(value / limit - 1)


def limit_traces(limit: Sequence[Measurement], key: str, names: Sequence[str]) -> list[Figure]:
    """Return a dashed grey line for each of these layers whose limit of infinite width is known."""
    history = drawable(limit, key) if limit else None
    if history is None:
        return []
    traces: list[Figure] = []
    for info, values in zip(history.layers, history.values(key).tolist(), strict=True):
        points = [(step, value) for step, value in zip(history.steps, values, strict=True) if math.isfinite(value)]
        if info.name in names and points:
            traces.append(
                line(
                    [step for step, _ in points],
                    digits([value for _, value in points]),
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
    """Return the range of an axis, widened for dashed lines that are not far from its curves.

    Example:
        >>> widened(1.0, 2.0, [{"y": [3.0, 4.0]}, {"y": [1e6]}], log=True)
        (1.0, 4.4)
    """
    values = [value for trace in traces for value in trace["y"]]
    if log:
        nearby = [value for value in values if low / MAX_WIDENING < value < high * MAX_WIDENING]
        return min([low, *(value / 1.1 for value in nearby)]), max([high, *(1.1 * value for value in nearby)])
    reach = MAX_WIDENING * (high - low)
    nearby = [value for value in values if low - reach < value < high + reach]
    return min([low, *nearby]), max([high, *nearby])
