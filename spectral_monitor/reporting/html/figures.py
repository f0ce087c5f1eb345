"""The figures of a report, as plain dicts that plotly draws.

Colours that start with ``@`` are those of the page, which has light and dark ones. ``x`` is a key of the steps that
are handed over once, not a list. Names of layers are escaped, for plotly takes what looks like tags for tags.
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
from spectral_monitor.reporting.content.labels import labelled, named
from spectral_monitor.reporting.content.panels import pictured
from spectral_monitor.reporting.content.tally import off
from spectral_monitor.reporting.content.typical import VS_TYPICAL, powers_of_two
from spectral_monitor.reporting.text.lines import printable
from spectral_monitor.reporting.text.table import number

MAX_CELLS = 40_000
"""Values of a quantity that are drawn, at most: of very deep networks fewer steps."""
MAX_CELLS_OF_PAGE = 850_000
"""Values of all quantities together, at most, for a page that still opens."""
ROW, ROOM = 26, (170, 580)
"""Height of a layer while there is room, and of all of them at least and at most, in pixels."""
LINE = 15
"""Room for a name."""
TOP = 75
"""Room above the pictures: for plotly's toolbar, and below it for titles of two lines."""
REACH = 12.0
"""Powers of two around 1 that are told apart."""
Figure = dict[str, Any]


def line(x: str | Sequence[Any], y: Sequence[Any], **look: Any) -> Figure:
    """Return a trace that joins points; ``x`` may be a key of the steps."""
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, **look}


def drawable(measurements: Sequence[Measurement], quantity: str) -> Thinned | None:
    """Return the measurements at which any layer has a value, thinned out if they are too many; else ``None``."""
    count = max(1, len(measurements[-1].layers))
    every = count * max(1, len(measurements[-1].values))
    history = Thinned(max(8, min(MAX_COLUMNS, MAX_CELLS // count, MAX_CELLS_OF_PAGE // every)))
    for measurement in measurements:
        if quantity in measurement.values and measurement.values[quantity].isfinite().any():
            history.add(measurement)
    return history if len(history) else None


def overview(measurements: Sequence[Measurement], now: Measurement) -> tuple[Figure | None, dict[str, list[int]]]:
    """Draw every layer at one measurement, and pictures of layer by step; rows are layers throughout.

    Returns:
        the figure and the steps of each quantity in it; ``None`` where nothing is known.
    """
    rows = [i for i, info in enumerate(now.layers) if info.is_matrix]
    known = {key: found for key in pictured() if (found := drawable(measurements, key)) is not None}
    parts = [*_now(now, rows), *(part for key, found in known.items() for part in _heatmap(key, found, rows, now))]
    if not parts:
        return None, {}
    room = max(ROOM[0], min(ROOM[1], ROW * len(rows)))
    outside = set(off(now))
    names = [now.layers[i].name for i in rows]
    ticks, short = named([name in outside for name in names], room // LINE), labels(now)
    layout: Figure = {
        "height": room + TOP + 78,
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
            "ticktext": [_tick(short[names[k]], names[k] in outside) for k in ticks],
            "automargin": True,
            "ticks": "",
            "showgrid": False,
        },
    }
    data = []
    width = 1 / len(parts)
    for place, (title, trace, axis) in enumerate(parts):
        suffix = "" if place == 0 else str(place + 1)
        left, right = place * width, (place + 1) * width - 0.025
        layout[f"xaxis{suffix}"] = {"domain": [left, right], "anchor": "y", **axis}
        layout["annotations"].append(title_of(title, suffix, "y"))
        for one in trace:
            data.append({**one, "xaxis": f"x{suffix}", "yaxis": "y"})
            if one["type"] == "heatmap":
                one_bar = {"x": (left + right) / 2, "len": right - left, "y": -52 / room, **one["colorbar"]}
                data[-1]["colorbar"] = one_bar
                layout["shapes"].append(_nothing(suffix))
    return {"data": data, "layout": layout}, {key: found.steps for key, found in known.items()}


Part = tuple[str, list[Figure], Figure]
"""Title, traces and x axis of a subplot."""


def _now(now: Measurement, rows: Sequence[int]) -> list[Part]:
    """Draw a dot for each layer: its value over its reference, on its band."""
    keys = [key for key in ("update_natural", "weight_natural") if key in now.values and key in now.bands]
    key = next((key for key in keys if now.bands[key][rows, 2].isfinite().any()), None)
    if key is None:
        return []
    outside = set(off(now))
    names, values, ratios = [], [], []
    for i, value, (low, high, reference) in zip(
        rows, now.values[key][rows].tolist(), now.bands[key][rows].tolist(), strict=True
    ):
        if reference > 0 and value >= 0:
            names.append(now.layers[i].name)
            values.append(value)
            ratios.append([x / reference for x in (value, low, high)])
    logs = [abs(math.log2(x)) for of in ratios for x in of if 0 < x < math.inf]
    reach = min(max([4.0, *(log + 0.7 for log in logs)]), REACH)
    within = [[min(max(x, 2**-reach), 2**reach) for x in of] for of in ratios]
    thick = max(1, min(16, 480 // len(rows)))
    band = line(
        [x for _, low, high in within for x in (*digits([low, high]), None)],
        [y for name in names for y in (_row(name), _row(name), None)],
        line={"color": "@band", "width": thick},
        hoverinfo="skip",
    )
    dots = {
        "type": "scatter",
        "mode": "markers",
        "x": digits([ratio for ratio, _, _ in within]),
        "y": list(map(_row, names)),
        "customdata": [[_row(n), number(of[0]), number(x)] for n, of, x in zip(names, ratios, values, strict=True)],
        "marker": {
            "size": [11 if name in outside else max(5, min(9, thick)) for name in names],
            "color": ["@danger" if name in outside else "@accent" for name in names],
            "opacity": 1,
            "line": {"color": "@card", "width": 1 if thick > 2 else 0},
        },
        "hovertemplate": "<b>%{customdata[0]}</b><br>"
        f"{key} %{{customdata[2]}}, %{{customdata[1]}} {VS_TYPICAL}<extra></extra>",
        "cliponaxis": False,
    }
    powers, words = powers_of_two(reach)
    end = reach * math.log10(2)
    axis = {"type": "log", "range": [-end, end], "tickvals": [2.0**k for k in powers], "zeroline": False}
    axis |= {"tickfont": {"size": 10}, "tickangle": 0}
    axis |= {"ticktext": words, "title": {"text": VS_TYPICAL, "standoff": 4}}
    return [(titled(f"At step {now.step}", "on the band"), [band, dots], axis)]


def _heatmap(key: str, drawn: Thinned, rows: Sequence[int], now: Measurement) -> list[Part]:
    values = drawn.values(key)[rows]
    if key == "update_natural":
        shares, unit = _shares(values, drawn.bands(key)[rows][..., 2], [now.layers[i].role for i in rows])
        picture, colours, ticks = _against_share(shares)
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
        "y": [_row(now.layers[i].name) for i in rows],
        "z": [digits(row) for row in picture.tolist()],
        "meta": [escaped(now.layers[i].name) for i in rows],
        "customdata": [[number(value) for value in row] for row in values.tolist()],
        **colours,
        "ygap": 1 if len(rows) <= 40 else 0,
        "hoverongaps": False,
        "hovertemplate": f"<b>%{{customdata[0]}}</b><br>step %{{x}}<br>{key} %{{customdata[1]}}<extra></extra>",
        "colorbar": colorbar,
    }
    return [
        (titled(QUANTITIES[key].picture, unit), [trace], {"title": {"text": "step", "standoff": 4}, "showgrid": False})
    ]


def _shares(values: Tensor, references: Tensor, roles: Sequence[str]) -> tuple[Tensor, str]:
    """Return values over their references; where none is known, over the median of operators and readouts."""
    if references.isfinite().any():
        return values / references, VS_TYPICAL
    ratios = torch.full_like(values, math.nan)
    compared = [k for k, role in enumerate(roles) if role in DENSE]
    for step in range(values.shape[1]):
        ratios[compared, step] = balance_ratios(values[compared, step])
    return ratios, f"{VS_TYPICAL}: over the median"


def _against_share(shares: Tensor) -> tuple[Tensor, Figure, Figure]:
    """Return the picture, its range of colours and the ticks beside it.

    Colours go by the logarithm to base 2; white is 1, and what is 0 has the colour of the smallest.
    """
    logs = shares.log2()
    finite = logs[logs.isfinite()]
    reach = min(max(4.0, finite.abs().max().item() if len(finite) else 0.0), REACH)
    powers, words = powers_of_two(reach)
    colours = {"zmin": -reach, "zmax": reach, "colorscale": "@diverging"}
    return logs.clamp(-reach, reach), colours, {"tickvals": powers, "ticktext": words}


def _logarithmic(values: Tensor) -> tuple[Tensor, Figure, Figure]:
    """Return the same with colours by the logarithm to base 10, of six powers at most."""
    logs = values.abs().log10()
    finite = logs[logs.isfinite()]
    high = finite.max().item() if len(finite) else 0.0
    low = max(finite.min().item(), high - 6) if len(finite) else -1.0
    ticks = [math.log10(x) for x in _round_numbers(10**low, 10**high)]
    colours = {"colorscale": "@sequential", "zmin": low, "zmax": max(high, low + 0.1)}
    return logs.clamp(low, high), colours, {"tickvals": ticks, "ticktext": [short(10**tick) for tick in ticks]}


def _round_numbers(low: float, high: float) -> list[float]:
    """Return ticks of a log scale: powers of ten if there are two, else halves and fifths of them too.

    Example:
        >>> _round_numbers(0.003, 0.2), _round_numbers(0.003, 0.02)
        ([0.01, 0.1], [0.005, 0.01, 0.02])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for among in ((1,), (1, 2, 5)):
        found = [float(f"{k}e{power}") for power in powers for k in among]
        found = [x for x in found if low <= x * (1 + 1e-6) and x <= high * (1 + 1e-6)]
        if len(found) > 1:
            return found
    return [low, high]


def titled(title: str, *lines: str) -> str:
    """Return a title, and smaller lines below it."""
    return f"<b>{title}</b>" + "".join(f"<br><span style='font-size:11px'>{line}</span>" for line in lines)


def title_of(text: str, suffix: str, yaxis: str) -> Figure:
    """Return a title above a subplot, from its left edge."""
    place = {"xref": f"x{suffix} domain", "yref": f"{yaxis} domain", "x": 0, "y": 1, "yshift": 6}
    anchors = {"xanchor": "left", "yanchor": "bottom", "align": "left", "showarrow": False}
    return {"text": text, **place, **anchors, "font": {"size": 13, "color": "@ink"}}


def _nothing(suffix: str) -> Figure:
    """Draw what is seen where a picture has no value."""
    box = {"x0": 0, "x1": 1, "y0": 0, "y1": 1, "xref": f"x{suffix} domain", "yref": "y domain"}
    return {"type": "rect", **box, "fillcolor": "@nothing", "line": {"width": 0}, "layer": "below"}


RED = "#e0443c"
"""On light and on dark; inside a text plotly knows no other colours than these."""


def _row(name: str) -> str:
    """Return the key of a row; not quite its name, because plotly trips over names that JavaScript uses too."""
    return f"\u200b{escaped(name)}"


def _tick(label: str, outside: bool) -> str:
    return f"<b style='color:{RED}'>{label}</b>" if outside else label


def labels(now: Measurement) -> dict[str, str]:
    """Return the label of every matrix and node beside pictures and in legends, escaped."""
    names = tuple(info.name for info in now.layers if info.is_matrix or info.role == NODE)
    return {name: escaped(short) for name, short in labelled(names).items()}


def digits(values: Sequence[float], count: int = 4) -> list[float | None]:
    """Round to some digits; ``None`` for what cannot be drawn."""
    return [float(f"{value:.{count}g}") if math.isfinite(value) else None for value in values]


def escaped(text: str) -> str:
    """Escape for HTML and for plotly, which takes dollars for formulas and per cents for places to be filled."""
    return html.escape(printable(text), quote=False).replace("$", "&#36;").replace("%", "&#37;")
