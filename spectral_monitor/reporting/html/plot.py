"""One quantity of every layer against steps, as a figure for a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from spectral_monitor.layers.naming import check_patterns, matches
from spectral_monitor.measurement import Measurement
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting.content.panels import Panel
from spectral_monitor.reporting.files.runs import settle
from spectral_monitor.reporting.html.curves import curves
from spectral_monitor.reporting.html.page import need_plotly
from spectral_monitor.suggestions import unknown

LIGHT = {
    "danger": "#d1242f",
    "soft": "#626b76",
    "line": "#dfe2e7",
    "ink": "#1b1f24",
    "card": "#ffffff",
    "band": "rgba(46, 160, 87, .20)",
    "limit": "rgba(46, 140, 80, .75)",
}
"""Colours of the page on white."""


def figure(measurements: Sequence[Measurement], quantity: str, layers: str | Sequence[str] | None = None) -> Any:
    """Return the ``plotly.graph_objects.Figure`` of :meth:`~spectral_monitor.reporting.run.MeasuredRun.plot`."""
    need_plotly("plot")
    import plotly.graph_objects as go  # type: ignore[import-untyped]

    run, _ = settle(measurements)
    if not run:
        raise ValueError("there is nothing to plot: nothing has been measured yet")
    measured = dict.fromkeys(key for measurement in run for key in measurement.values)
    if quantity not in measured:
        if quantity in QUANTITIES:
            raise ValueError(f"{quantity!r} was not measured; measured: {', '.join(measured)}")
        raise ValueError(unknown("quantity", quantity, measured))
    if layers is not None:
        patterns = [layers] if isinstance(layers, str) else list(layers)
        check_patterns("layers", patterns, [info.name for info in run[-1].layers if info.is_matrix])
        indices = [i for i, info in enumerate(run[-1].layers) if info.is_matrix and matches(patterns, info.name)]
        run = tuple(_with_layers(measurement, indices) for measurement in run)
    chart, steps = curves(Panel(quantity, quantity, "", only=(quantity,)), run, run[-1])
    if chart is None:
        reasons = (m.why(quantity, info.name) for m in run if quantity in m.values for info in m.layers)
        reason = next(filter(None, reasons), "")
        raise ValueError(f"{quantity!r} is NaN in every requested layer{(f': {reason}' if reason else '')}")
    layout = _filled(chart["layout"], "", steps)
    grid = {"gridcolor": LIGHT["line"], "linecolor": LIGHT["line"], "zeroline": False}
    layout |= {axis: {**grid, **layout[axis]} for axis in ("xaxis", "yaxis")}
    layout |= {"paper_bgcolor": LIGHT["card"], "plot_bgcolor": LIGHT["card"], "font": {"color": LIGHT["ink"]}}
    return go.Figure(data=[_filled(trace, "", steps) for trace in chart["data"]], layout=layout)


def _with_layers(measurement: Measurement, indices: list[int]) -> Measurement:
    """Return the measurement of some layers."""
    return replace(
        measurement,
        layers=tuple(measurement.layers[i] for i in indices),
        values={key: column[indices] for key, column in measurement.values.items()},
        bands={key: rows[indices] for key, rows in measurement.bands.items()},
    )


def _filled(value: Any, key: str, steps: Mapping[str, Sequence[int]]) -> Any:
    """Return a part of a figure with its colours and steps, which on a page the script fills in."""
    if isinstance(value, str):
        if value.startswith("@"):
            return LIGHT[value[1:]]
        return list(steps[value]) if key == "x" and value in steps else value
    if isinstance(value, Mapping):
        return {name: _filled(item, name, steps) for name, item in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return [_filled(item, "", steps) for item in value]
    return value
