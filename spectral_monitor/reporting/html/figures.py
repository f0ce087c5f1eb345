"""The figures of a report, as plain dicts that plotly draws.

Colours that begin with ``@`` are names of the page's colours, which are light or dark. ``x`` is a key of the steps,
which the page has once, not a list. Names of layers are escaped, because plotly interprets HTML tags.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spectral_monitor.condition.verdict import short
from spectral_monitor.functional.norms import balance_ratios
from spectral_monitor.measurement import DENSE, NODE, Measurement
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting.content.history import MAX_COLUMNS, Thinned
from spectral_monitor.reporting.content.labels import labelled, quantity_title, rows_with_names
from spectral_monitor.reporting.content.panels import pictured
from spectral_monitor.reporting.content.tally import off
from spectral_monitor.reporting.content.typical import VS_TYPICAL, powers_of_two
from spectral_monitor.reporting.text.lines import printable
from spectral_monitor.reporting.text.table import number

MAX_CELLS = 40_000
"""The most values of a quantity that are drawn: very deep networks have fewer steps."""
MAX_CELLS_OF_PAGE = 850_000
"""The most values of all quantities together, so that a browser can open the page."""
ROW, ROWS_LOW, ROWS_HIGH = 26, 170, 580
"""Pixels of a row, and of all rows at least and at most."""
LINE = 15
"""Pixels of a name's height."""
TOP = 75
"""Pixels above the pictures, for plotly's toolbar and titles of two lines."""
MAX_REACH = 12.0
"""Powers of two on either side of 1; values beyond have the last colour."""
Figure = dict[str, Any]


def line(x: str | Sequence[Any], y: Sequence[Any], **style: Any) -> Figure:
    """Return a trace that joins points; ``x`` may be a key of the steps."""
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, **style}


def drawable(measurements: Sequence[Measurement], quantity: str) -> Thinned | None:
    """Return the measurements at which any layer has a value, thinned out if they are too many; else ``None``."""
    layers = max(1, len(measurements[-1].layers))
    cells = layers * max(1, len(measurements[-1].values))
    history = Thinned(max(8, min(MAX_COLUMNS, MAX_CELLS // layers, MAX_CELLS_OF_PAGE // cells)))
    for measurement in measurements:
        if quantity in measurement.values and measurement.values[quantity].isfinite().any():
            history.add(measurement)
    return history if len(history) else None


def overview(measurements: Sequence[Measurement], current: Measurement) -> tuple[Figure | None, dict[str, list[int]]]:
    """Draw every layer at one measurement, and pictures of layer by step; rows are layers throughout.

    Returns:
        the figure, ``None`` without values, and the steps of each quantity in it.
    """
    rows = [i for i, info in enumerate(current.layers) if info.is_matrix]
    histories = {key: history for key in pictured() if (history := drawable(measurements, key)) is not None}
    heatmaps = (part for key, history in histories.items() for part in _heatmap(key, history, rows, current))
    parts = [*_now(current, rows), *heatmaps]
    if not parts:
        return None, {}
    height = max(ROWS_LOW, min(ROWS_HIGH, ROW * len(rows)))
    off_layers = set(off(current))
    names = [current.layers[i].name for i in rows]
    ticks, short = rows_with_names([name in off_layers for name in names], height // LINE), labels(current)
    layout: Figure = {
        "height": height + TOP + 78,
        "margin": {"l": 10, "r": 10, "t": TOP, "b": 78},
        "showlegend": False,
        "annotations": [],
        "shapes": [],
        "yaxis": {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [_row(name) for name in names],
            "range": [len(rows) - 0.5, -0.5],
            "tickvals": [_row(names[k]) for k in ticks],
            "ticktext": [_tick(short[names[k]], names[k] in off_layers) for k in ticks],
            "automargin": True,
            "ticks": "",
            "showgrid": False,
        },
    }
    data = []
    width = 1 / len(parts)
    for index, (title, traces, axis) in enumerate(parts):
        suffix = "" if index == 0 else str(index + 1)
        left, right = index * width, (index + 1) * width - 0.025
        layout[f"xaxis{suffix}"] = {"domain": [left, right], "anchor": "y", **axis}
        layout["annotations"].append(title_of(title, suffix, "y"))
        for trace in traces:
            data.append({**trace, "xaxis": f"x{suffix}", "yaxis": "y"})
            if trace["type"] == "heatmap":
                position = {"x": (left + right) / 2, "len": right - left, "y": -52 / height}
                data[-1]["colorbar"] = position | trace["colorbar"]
                layout["shapes"].append(_background(suffix))
    return {"data": data, "layout": layout}, {key: history.steps for key, history in histories.items()}


Part = tuple[str, list[Figure], Figure]
"""Title, traces and x axis of a subplot."""


def _now(current: Measurement, rows: Sequence[int]) -> list[Part]:
    """Draw a dot for each layer: its value over its reference, on its band."""
    keys = [key for key in ("update_natural", "weight_natural") if key in current.values and key in current.bands]
    key = next((key for key in keys if current.bands[key][rows, 2].isfinite().any()), None)
    if key is None:
        return []
    off_layers = set(off(current))
    names, values, ratios = [], [], []
    for i, value, (low, high, reference) in zip(
        rows, current.values[key][rows].tolist(), current.bands[key][rows].tolist(), strict=True
    ):
        if reference > 0 and value >= 0:
            names.append(current.layers[i].name)
            values.append(value)
            ratios.append([x / reference for x in (value, low, high)])
    logs = [abs(math.log2(x)) for triple in ratios for x in triple if 0 < x < math.inf]
    reach = min(max([4.0, *(log + 0.7 for log in logs)]), MAX_REACH)
    clamped = [[min(max(x, 2**-reach), 2**reach) for x in triple] for triple in ratios]
    thickness = max(1, min(16, 480 // len(rows)))
    band = line(
        [x for _, low, high in clamped for x in (*digits([low, high]), None)],
        [y for name in names for y in (_row(name), _row(name), None)],
        line={"color": "@band", "width": thickness},
        hoverinfo="skip",
    )
    dots = {
        "type": "scatter",
        "mode": "markers",
        "x": digits([ratio for ratio, _, _ in clamped]),
        "y": list(map(_row, names)),
        "customdata": [
            [_row(name), number(ratio), number(value)]
            for name, (ratio, _, _), value in zip(names, ratios, values, strict=True)
        ],
        "marker": {
            "size": [11 if name in off_layers else max(5, min(9, thickness)) for name in names],
            "color": ["@danger" if name in off_layers else "@accent" for name in names],
            "opacity": 1,
            "line": {"color": "@card", "width": 1 if thickness > 2 else 0},
        },
        "hovertemplate": "<b>%{customdata[0]}</b><br>"
        f"{quantity_title(key)} %{{customdata[2]}}, %{{customdata[1]}} {VS_TYPICAL}<extra></extra>",
        "meta": key,
        "cliponaxis": False,
    }
    exponents, texts = powers_of_two(reach)
    end = reach * math.log10(2)
    axis = {"type": "log", "range": [-end, end], "tickvals": [2.0**k for k in exponents], "zeroline": False}
    axis |= {"tickfont": {"size": 10}, "tickangle": 0}
    axis |= {"ticktext": texts, "title": {"text": VS_TYPICAL, "standoff": 4}}
    return [(titled(f"At step {current.step}", "green: the band"), [band, dots], axis)]


def _heatmap(key: str, history: Thinned, rows: Sequence[int], current: Measurement) -> list[Part]:
    values = history.values(key)[rows]
    if key == "update_natural":
        ratios, unit = _ratios(values, history.bands(key)[rows][..., 2], [current.layers[i].role for i in rows])
        picture, colours, ticks = _around_one(ratios)
    elif key == "bfa_cos":
        unit, picture, ticks = "cosine, 1 is downhill", values.clamp(-1, 1), {"tickvals": [-1, -0.5, 0, 0.5, 1]}
        colours = {"zmin": -1, "zmax": 1, "colorscale": "@diverging-reversed"}
    else:
        unit = "as a share"
        picture, colours, ticks = _logarithmic(values)
    if not picture.isfinite().any():
        return []
    colorbar = {**ticks, "orientation": "h", "thickness": 10, "outlinewidth": 0, "yanchor": "top", "ypad": 0, "xpad": 0}
    colorbar |= {"tickfont": {"size": 10}, "tickangle": 0}
    trace = {
        "type": "heatmap",
        "x": key,
        "y": [_row(current.layers[i].name) for i in rows],
        "z": [digits(row) for row in picture.tolist()],
        "meta": [escaped(current.layers[i].name) for i in rows],
        "customdata": [[number(value) for value in row] for row in values.tolist()],
        **colours,
        "ygap": 1 if len(rows) <= 40 else 0,
        "hoverongaps": False,
        "hovertemplate": f"<b>%{{customdata[0]}}</b><br>step %{{x}}<br>{quantity_title(key)} "
        "%{customdata[1]}<extra></extra>",
        "colorbar": colorbar,
    }
    axis = {"title": {"text": "step", "standoff": 4}, "showgrid": False}
    return [(titled(QUANTITIES[key].picture, unit), [trace], axis)]


def _ratios(values: Tensor, references: Tensor, roles: Sequence[str]) -> tuple[Tensor, str]:
    """Return values over their references, else over the median of operators and readouts; and the ratios' name."""
    if references.isfinite().any():
        return values / references, VS_TYPICAL
    ratios = torch.full_like(values, math.nan)
    compared = [k for k, role in enumerate(roles) if role in DENSE]
    for step in range(values.shape[1]):
        ratios[compared, step] = balance_ratios(values[compared, step])
    return ratios, f"{VS_TYPICAL}: over the median"


def _around_one(ratios: Tensor) -> tuple[Tensor, Figure, Figure]:
    """Return the picture, its range of colours and the ticks beside it.

    Colours follow the logarithm to base 2: white is 1, and 0 has the colour of the smallest ratio.
    """
    logs = ratios.log2()
    finite = logs[logs.isfinite()]
    reach = min(max(4.0, finite.abs().max().item() if len(finite) else 0.0), MAX_REACH)
    exponents, texts = powers_of_two(reach)
    colours = {"zmin": -reach, "zmax": reach, "colorscale": "@diverging"}
    return logs.clamp(-reach, reach), colours, {"tickvals": exponents, "ticktext": texts}


def _logarithmic(values: Tensor) -> tuple[Tensor, Figure, Figure]:
    """Return the same with colours that follow the logarithm to base 10, over six powers at most."""
    logs = values.abs().log10()
    finite = logs[logs.isfinite()]
    high = finite.max().item() if len(finite) else 0.0
    low = max(finite.min().item(), high - 6) if len(finite) else -1.0
    ticks = [math.log10(x) for x in _round_numbers(10**low, 10**high)]
    colours = {"colorscale": "@sequential", "zmin": low, "zmax": max(high, low + 0.1)}
    return logs.clamp(low, high), colours, {"tickvals": ticks, "ticktext": [short(10**tick) for tick in ticks]}


def _round_numbers(low: float, high: float) -> list[float]:
    """Return ticks of a log scale: powers of ten if there are two of them, else their multiples by 2 and 5 too.

    Example:
        >>> _round_numbers(0.003, 0.2), _round_numbers(0.003, 0.02)
        ([0.01, 0.1], [0.005, 0.01, 0.02])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 2, 5)):
        ticks = [float(f"{factor}e{power}") for power in powers for factor in factors]
        ticks = [tick for tick in ticks if low <= tick * (1 + 1e-6) and tick <= high * (1 + 1e-6)]
        if len(ticks) > 1:
            return ticks
    return [low, high]


def titled(title: str, *lines: str) -> str:
    """Return a title, and smaller lines below it."""
    return f"<b>{title}</b>" + "".join(f"<br><span style='font-size:11px'>{line}</span>" for line in lines)


def title_of(text: str, suffix: str, yaxis: str) -> Figure:
    """Return a title above a subplot, from its left edge."""
    position = {"xref": f"x{suffix} domain", "yref": f"{yaxis} domain", "x": 0, "y": 1, "yshift": 6}
    anchors = {"xanchor": "left", "yanchor": "bottom", "align": "left", "showarrow": False}
    return {"text": text, **position, **anchors, "font": {"size": 13, "color": "@ink"}}


def _background(suffix: str) -> Figure:
    """Return a rectangle behind a picture, visible where it has no values."""
    box = {"x0": 0, "x1": 1, "y0": 0, "y1": 1, "xref": f"x{suffix} domain", "yref": "y domain"}
    return {"type": "rect", **box, "fillcolor": "@nothing", "line": {"width": 0}, "layer": "below"}


RED = "#e0443c"
"""Red on light and on dark pages: within a text plotly does not know the page's colours."""


def _row(name: str) -> str:
    """Return the key of a row: an invisible character and its name, for plotly fails on names that JavaScript uses."""
    return f"\u200b{escaped(name)}"


def _tick(label: str, is_off: bool) -> str:
    return f"<b style='color:{RED}'>{label}</b>" if is_off else label


def labels(current: Measurement) -> dict[str, str]:
    """Return the label of every matrix and node beside pictures and in legends, escaped."""
    names = tuple(info.name for info in current.layers if info.is_matrix or info.role == NODE)
    return {name: escaped(short) for name, short in labelled(names).items()}


def digits(values: Sequence[float], count: int = 4) -> list[float | None]:
    """Round values to some digits; NaN and inf, which cannot be drawn, become ``None``."""
    return [float(f"{value:.{count}g}") if math.isfinite(value) else None for value in values]


def escaped(text: str) -> str:
    """Escape a text for HTML and for plotly, in which ``$`` begins formulas and ``%`` placeholders."""
    return html.escape(printable(text), quote=False).replace("$", "&#36;").replace("%", "&#37;")
