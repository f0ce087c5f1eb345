"""Charts of a run for Weights & Biases: lines, pictures of layer by step, a table of verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from spectral_monitor.measurement import Measurement
from spectral_monitor.quantities import QUANTITIES, questions
from spectral_monitor.reporting.content.families import families_of
from spectral_monitor.reporting.content.history import History
from spectral_monitor.reporting.content.labels import quantity_title
from spectral_monitor.reporting.content.panels import PANELS, pictured, shown
from spectral_monitor.reporting.content.tally import followers, named_by, off
from spectral_monitor.reporting.content.typical import VS_TYPICAL
from spectral_monitor.reporting.heatmap import heatmap

CHARTS, PICTURES, VERDICTS = "spectral/charts", "spectral/heatmaps", "spectral/verdicts"
MAX_LINES = 16
"""The most lines in a chart; if there are more layers, families have the lines."""
DIGITS = 6
"""Significant digits of a point."""
COLUMNS = (
    *("step", "layer", "quantity", "value", "low", "high", VS_TYPICAL, "for steps", "cause", "what to do"),
    *("same cause", "disturbs"),
)


def charts(history: History, requested: Sequence[str] = ()) -> dict[str, Any]:
    """Return key -> a chart of lines over steps, one for each question with an answer and each requested quantity."""
    import wandb

    line_charts = {}
    for panel in PANELS:
        rows = shown(panel, history.layers)
        answered = panel.question == questions.CORRECTION and not _corrected(history)
        for quantity in panel.quantities:
            points_of = {} if answered and quantity not in requested else lines(history, quantity, rows)
            answered = answered or bool(points_of)
            linear = QUANTITIES[quantity].signed or QUANTITIES[quantity].unit == "share"
            if not linear:  # the axes of W&B's charts are linear: a layer at 100 would flatten all others
                points_of = _logarithms(points_of)
            if points_of:
                line_charts[f"{CHARTS}/{quantity}"] = wandb.plot.line_series(
                    xs=[[step for step, _ in points] for points in points_of.values()],
                    ys=[[value for _, value in points] for points in points_of.values()],
                    keys=list(points_of),
                    title=f"{panel.question} ({_described(quantity, linear)})",
                    xname="optimizer step",
                )
    return line_charts


def _described(quantity: str, linear: bool) -> str:
    """Return the title of a quantity with its unit, its scale and its band; the chart itself is named by the key."""
    entry = QUANTITIES[quantity]
    details = ["" if entry.unit == "ratio" else entry.unit, "" if linear else "log10"]
    details.append(f"healthy {entry.limits}" if entry.limits else "")
    return ", ".join(filter(None, (quantity_title(quantity), *details)))


def pictures(history: History) -> dict[str, Any]:
    """Return key -> a picture of layer by step; empty without matplotlib."""
    import wandb

    readings = {quantity: panel.reading for panel in PANELS for quantity in panel.quantities}
    return {
        f"{PICTURES}/{quantity}": wandb.Image(pixels, caption=readings[quantity])
        for quantity in pictured()
        if (pixels := heatmap(history, quantity)) is not None
    }


def verdict_table(measurement: Measurement) -> Any:
    """Return a row for each root verdict, the worst first; no rows if there is none.

    The last two columns count the layers of the same cause and those that follow from it.
    """
    import wandb

    table = wandb.Table(columns=list(COLUMNS))
    for root in measurement.roots:
        row = root.to_row() | {"step": measurement.step, "for steps": root.steps, "what to do": root.sentence}
        row |= {"quantity": quantity_title(root.quantity), VS_TYPICAL: root.ratio, "same cause": len(named_by(root))}
        row |= {"disturbs": len(followers(root, measurement))}
        cells = (row[column] for column in COLUMNS)
        table.add_data(*(None if isinstance(cell, float) and math.isnan(cell) else cell for cell in cells))
    return table


def _corrected(history: History) -> bool:
    factors = history.of("lr_multiplier").values("lr_multiplier")
    return bool((factors[factors.isfinite()] != 1).any())


def lines(history: History, quantity: str, rows: Sequence[int]) -> dict[str, list[tuple[int, float]]]:
    """Return the lines of a quantity for some layers, given by their indices: name -> points, as (step, value).

    Few layers have a line each. Of many layers each family has a line: the geometric mean of its members, or the mean
    if the quantity can be negative. Each layer that a root verdict names now has a line too, the worst first.

    Example:
        >>> import torch
        >>> from spectral_monitor import LayerInfo, Measurement
        >>> layers = tuple(LayerInfo(f"net.{i}", "operator", 8, 8, (8, 8)) for i in range(20))
        >>> history = History()
        >>> history.add(Measurement(50, layers, {"update_natural": torch.tensor([0.1, 0.4] * 10)}, {}))
        >>> lines(history, "update_natural", range(2))
        {'net.0': [(50, 0.1)], 'net.1': [(50, 0.4)]}
        >>> lines(history, "update_natural", range(20))
        {'net.* (mean of 20)': [(50, 0.2)]}
    """
    thinned = history.of(quantity)
    values, names = thinned.values(quantity), [info.name for info in history.layers]
    measured = [i for i in rows if values[i].isfinite().any()]
    singles = measured
    columns = {}
    if len(measured) > MAX_LINES:
        off_layers = off(history.measurements[-1])
        singles = sorted((i for i in measured if names[i] in off_layers), key=lambda i: off_layers.index(names[i]))
        for family, members in list(families_of([names[i] for i in measured]).items())[:MAX_LINES]:
            rows_of_family = values[[measured[k] for k in members]]
            mean = rows_of_family.nanmean(0) if QUANTITIES[quantity].signed else rows_of_family.log().nanmean(0).exp()
            columns[f"{family} (mean of {len(members)})"] = mean
    columns |= {names[i]: values[i] for i in singles[:MAX_LINES]}
    points_of = {name: _points(thinned.steps, column) for name, column in columns.items()}
    return {name: points for name, points in points_of.items() if points}


def _logarithms(points_of: dict[str, list[tuple[int, float]]]) -> dict[str, list[tuple[int, float]]]:
    """Return the lines with logarithms to base 10 of their positive values."""
    logs_of = {
        name: [(step, float(f"{math.log10(value):.{DIGITS}g}")) for step, value in points if value > 0]
        for name, points in points_of.items()
    }
    return {name: points for name, points in logs_of.items() if points}


def _points(steps: Sequence[int], values: Tensor) -> list[tuple[int, float]]:
    pairs = zip(steps, values.tolist(), strict=True)
    return [(step, float(f"{value:.{DIGITS}g}")) for step, value in pairs if math.isfinite(value)]
