"""A limit of infinite width beside a run: a run of its own in the folder ``limit``, and dashed lines on the page."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from spectral_monitor.measurement import Measurement
from spectral_monitor.reporting.files.jsonlines import JSONLinesSink, read_measurements
from spectral_monitor.reporting.html.figures import series
from spectral_monitor.reporting.sinks import Sink
from spectral_monitor.reporting.tensorboard_sink.sink import TensorBoardSink

FOLDER = "limit"
FILE = "limit.jsonl"
"""Another name than that of a training's file, which is looked for in all folders."""
NAME = "infinite width"
COLOUR = "@soft"
LARGEST = 5.0
"""Factor beyond the curves' range up to which a dashed line widens it."""


def write_limit(
    measurements: Iterable[Measurement], folder: str | os.PathLike[str], sinks: Sequence[Sink] = ()
) -> Path:
    """Write a limit as a run of its own, beside that of a training.

    In ``folder/limit`` there are then a file of JSON lines, which ``spectral-monitor report folder`` draws as dashed
    lines, and TensorBoard events under the same tags as the training's: TensorBoard shows the run ``limit`` in the same
    charts. A run of W&B takes ``sinks=[WandbSink(wandb.init(group=..., name="limit"))]``, with the group of the
    training.

    Args:
        measurements: at infinite width, such as :func:`spectral_monitor.scaling.reference_line` returns.
        folder: of the training's run.
        sinks: others that are to have them.

    Returns:
        The folder ``folder/limit``.

    Raises:
        ValueError: there are no measurements.
        FileExistsError: there is a limit already.
    """
    from torch.utils.tensorboard import SummaryWriter

    found = list(measurements)
    if not found:
        raise ValueError("there is no limit to write: no measurements")
    target = Path(folder) / FOLDER
    if (target / FILE).exists():
        raise FileExistsError(f"there is a limit in {str(target)!r} already")
    writer: Any = SummaryWriter(str(target))
    every: list[Sink] = [JSONLinesSink(target / FILE), TensorBoardSink(writer, heatmap_every=0), *sinks]
    for sink in every:
        for measurement in found:
            sink.write(measurement)
        sink.close()
    writer.close()
    return target


def read_limit(folder: str | os.PathLike[str]) -> list[Measurement]:
    """Return the limit in the folder of a run, or in that of a run's file; none if there is none."""
    place = Path(folder)
    path = (place.parent if place.is_file() else place) / FOLDER / FILE
    return list(read_measurements(path)) if path.is_file() else []


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


def limit_traces(limit: Sequence[Measurement], key: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return a dashed grey line for each of some layers of which the limit is known.

    Args:
        limit: measurements at infinite width.
        key: the quantity.
        names: of the layers that are drawn.
    """
    found = series(limit, key) if limit else None
    if found is None:
        return []
    traces: list[dict[str, Any]] = []
    for place, info in enumerate(limit[-1].layers):
        values = found.values[place]
        if info.name in names and values.isfinite().any():
            known = [(step, v) for step, v in zip(found.steps, values.tolist(), strict=True) if math.isfinite(v)]
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": [step for step, _ in known],
                    "y": [float(f"{value:.4g}") for _, value in known],
                    "line": {"color": COLOUR, "width": 1.6, "dash": "dash"},
                    "name": NAME,
                    "legendgroup": NAME,
                    "legendrank": 3500,
                    "showlegend": not traces,
                    "hovertemplate": f"{info.name}, {NAME}: %{{y}}<extra></extra>",
                }
            )
    return traces


def widened(low: float, high: float, traces: Sequence[dict[str, Any]], log: bool) -> tuple[float, float]:
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
