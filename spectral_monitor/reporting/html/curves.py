"""The curves of a report: a line for each layer, over its band."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import compress
from textwrap import wrap

import numpy as np
import torch
from torch import Tensor

from spectral_monitor.condition.verdict import in_words
from spectral_monitor.measurement import Measurement
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting.content.families import OTHERS, families_of, family_of
from spectral_monitor.reporting.content.history import Thinned
from spectral_monitor.reporting.content.labels import quantity_title, shortened, titles_of, unprefixed
from spectral_monitor.reporting.content.panels import Panel, shown
from spectral_monitor.reporting.content.tally import off
from spectral_monitor.reporting.html.families import colour, family_traces
from spectral_monitor.reporting.html.figures import Figure, digits, drawable, escaped, labels, line, title_of, titled
from spectral_monitor.reporting.html.limit_lines import limit_traces, widened

MAX_LAYERS_IN_LEGEND = 14
"""Layers with an own entry in the legend; if there are more, families have the entries."""
MAX_LINES = 120
"""The most layers that are drawn: more slow a browser down."""
MAX_THICK_LINES = 5
"""The most layers that are off with a thick line and an own entry in the legend."""
MAX_MARKERS = 1500
"""The most points of a quantity's curves that have markers; if there are more, only lines are drawn."""
MAX_DECADES = 9.0
"""Powers of ten below the largest value; smaller values are drawn at the bottom."""
OFF_NOW = "off now"
TITLE_WIDTH, SUBTITLE_WIDTH = 28, 40
"""Characters of a line of a chart's title, and of a line below it."""
MAX_CHARTS_IN_ROW, CHART_HEIGHT = 3, 258
"""Charts in a row; pixels of a chart's height."""
GAP = 0.09
"""Space between two charts for the second one's tick labels, as a share of the width."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_DEPTH = ((59, 111, 216), (128, 90, 213), (200, 80, 150), (232, 112, 60), (205, 155, 20))
"""Colours from the first layer to the last, legible on white and on black."""


def depth_colours(count: int) -> list[str]:
    """Return a colour for each layer, in the order of the network.

    Example:
        >>> depth_colours(2)
        ['rgb(59,111,216)', 'rgb(205,155,20)']
    """
    depths = np.linspace(0, len(_DEPTH) - 1, count)
    channels = [np.interp(depths, range(len(_DEPTH)), channel).round() for channel in zip(*_DEPTH, strict=True)]
    return [f"rgb({red:.0f},{green:.0f},{blue:.0f})" for red, green, blue in zip(*channels, strict=True)]


def sampled(rows: Sequence[int], is_preferred: Sequence[bool]) -> list[int]:
    """Return at most :data:`MAX_LINES` layers: preferred ones, then others; evenly spaced and with both ends.

    Example:
        >>> rows = sampled(range(1000), [i == 77 for i in range(1000)])
        >>> len(rows), rows[0], 77 in rows, rows[-1]
        (120, 0, True, 999)
    """
    sample: list[int] = []
    for candidates in ([i for i in rows if is_preferred[i]], [i for i in rows if not is_preferred[i]]):
        count = min(len(candidates), MAX_LINES - len(sample))
        sample += [candidates[k * (len(candidates) - 1) // max(1, count - 1)] for k in range(count)]
    return sorted(sample)


def curves(
    panel: Panel, measurements: Sequence[Measurement], current: Measurement, limit: Sequence[Measurement] = ()
) -> tuple[Figure | None, dict[str, list[int]]]:
    """Return the figure that answers one question, and the steps of each quantity in it; ``None`` without values.

    Layers that are off at ``current`` are red; ``limit``, measurements of infinite width, is dashed.
    """
    off_layers = set(off(current))
    is_preferred = [info.role == "readout" or info.name in off_layers for info in current.layers]
    all_rows = shown(panel, current.layers)
    rows = sampled(all_rows, is_preferred)
    histories = {key: history for key in panel.quantities if (history := drawable(measurements, key)) is not None}
    finite = {key: history.values(key)[rows].isfinite().any(1) for key, history in histories.items()}
    histories = {key: history for key, history in histories.items() if finite[key].any()}
    if not histories:
        return None, {}
    layout: Figure = {
        "margin": {"l": 60, "r": 10, "t": 56, "b": 46},
        "annotations": [],
        "hovermode": "closest",
        "legend": {"tracegroupgap": 0, "itemsizing": "constant"},
    }
    data: list[Figure] = []
    by_layer = all(int(finite[key].sum()) <= MAX_LAYERS_IN_LEGEND for key in histories)
    titles = {key: wrap(titles_of(key)[0], TITLE_WIDTH) for key in histories}
    subtitles = {key: [*titles_of(key)[1:], *wrap(QUANTITIES[key].meaning, SUBTITLE_WIDTH)] for key in histories}
    for key, lines in subtitles.items():
        lines += [f"healthy: {QUANTITIES[key].limits}"] if QUANTITIES[key].limits else []
    heights = {key: len(titles[key]) - 1 + len(lines) for key, lines in subtitles.items()}
    height = max(heights.values())
    layout["margin"]["t"] += 15 * (height - 1)
    gap = layout["margin"]["t"] + layout["margin"]["b"]
    pixels, domains = _grid(len(histories), gap)
    layout["height"] = pixels + gap
    for index, ((key, history), (x_share, y_share)) in enumerate(zip(histories.items(), domains, strict=True)):
        suffix = "" if index == 0 else str(index + 1)
        chart = _Chart(key, history, rows, all_rows, current, by_layer)
        dashed = limit_traces(limit, key, chart.names)
        chart.low, chart.high = widened(chart.low, chart.high, dashed, chart.log)
        layout[f"xaxis{suffix}"] = {"domain": x_share, "anchor": f"y{suffix}", "title": {"text": "step", "standoff": 4}}
        layout[f"yaxis{suffix}"] = {"domain": y_share, "anchor": f"x{suffix}", **chart.axis()}
        lines = [*map(escaped, subtitles[key]), *["&nbsp;"] * (height - heights[key])]
        title = "<br>".join(map(escaped, titles[key]))
        layout["annotations"].append(title_of(titled(title, *lines), suffix, f"y{suffix}"))
        traces = [*chart.bands(), *chart.family_bands(), *dashed, *chart.lines()]
        traces += chart.groups() if index == 0 else []
        for trace in traces:
            trace["showlegend"] = trace.get("showlegend", False) and index == 0
            data.append({**trace, "xaxis": f"x{suffix}", "yaxis": f"y{suffix}"})
    return {"data": data, "layout": layout}, {key: history.steps for key, history in histories.items()}


def _grid(count: int, gap: int) -> tuple[int, list[tuple[list[float], list[float]]]]:
    """Return the height of charts in rows of equal length, ``gap`` pixels apart, and each chart's share of the width
    and of the height.
    """
    rows = -(-count // MAX_CHARTS_IN_ROW)
    columns = -(-count // rows)
    width = (1 - GAP * (columns - 1)) / columns
    pixels = rows * CHART_HEIGHT + (rows - 1) * gap
    domains = []
    for row, column in (divmod(index, columns) for index in range(count)):
        left, top = column * (width + GAP), 1 - row * (CHART_HEIGHT + gap) / pixels
        domains.append(([left, min(1.0, left + width)], [max(0.0, top - CHART_HEIGHT / pixels), top]))
    return pixels, domains


class _Chart:
    """One quantity of some layers.

    Args:
        rows: indices of the layers that have a curve each.
        all_rows: indices of all layers of the chart, which families are made of.
        current: the measurement that tells which layers are off.
        by_layer: whether each layer has its own colour and name, in this chart and in those beside it.
    """

    def __init__(
        self,
        key: str,
        history: Thinned,
        rows: Sequence[int],
        all_rows: Sequence[int],
        current: Measurement,
        by_layer: bool,
    ) -> None:
        values = history.values(key)
        has_values = values.isfinite().any(1).tolist()
        rows, all_rows = ([i for i in indices if has_values[i]] for indices in (rows, all_rows))
        self.key, self.steps = key, history.steps
        self.names, self.labels = [current.layers[i].name for i in rows], labels(current)
        self.values, self.limits = values[rows], history.bands(key)[rows][..., :2]
        band = QUANTITIES[key].band
        if band is not None and not self.limits.isfinite().any():  # the measurements have no bands
            self.limits = torch.tensor(band, device="cpu").expand_as(self.limits)
        off_layers = set(off(current))
        self.is_off = [name in off_layers for name in self.names]
        self.many_off = sum(self.is_off) > MAX_THICK_LINES
        self.by_layer = by_layer
        self.all_values, self.all_names = values[all_rows], [current.layers[i].name for i in all_rows]
        self.families = {} if by_layer else families_of(self.all_names)
        self.family: dict[str, tuple[int, str]] = {}  # layer -> index and name of its family
        self.healthy: dict[str, list[int]] = {}  # family -> members without a red line
        for index, (family, members) in enumerate(self.families.items()):
            self.family |= {self.all_names[k]: (index, family) for k in members}
            self.healthy[family] = [k for k in members if self.all_names[k] not in off_layers]
        depth = depth_colours(len(current.layers))
        colours = [depth[i] for i in rows] if by_layer else [colour(self.family[name][0]) for name in self.names]
        self.colours = ["@danger" if is_off else tint for is_off, tint in zip(self.is_off, colours, strict=True)]
        finite = self.all_values[self.all_values.isfinite()]
        self.log = not QUANTITIES[key].bounded and bool((finite >= 0).all() and (finite > 0).any())
        self.low, self.high = self._range(finite)

    def _range(self, finite: Tensor) -> tuple[float, float]:
        """Return the range of the axis: all values, and limits that are not far from them."""
        if QUANTITIES[self.key].bounded:
            return (-1.05 if bool((finite < 0).any()) else -0.02), 1.05
        if not QUANTITIES[self.key].signed and not finite.any():
            limits = [x for x in self.limits.flatten().tolist() if 0 < x < math.inf]
            high = 1.2 * max(limits, default=1.0)
            return -0.02 * high, high
        if not self.log:
            pad = 0.06 * (finite.max() - finite.min()).item() or 0.1 * finite.abs().max().item() or 1.0
            return finite.min().item() - pad, finite.max().item() + pad
        high = finite.max().item()
        low = max(finite[finite > 0].min().item(), high * 10**-MAX_DECADES)
        limits = [x for x in self.limits.flatten().tolist() if low / 5 < x < high * 5]
        low, high = min([low, *limits]), max([high, *limits])
        if bool((finite < low).any()):
            low /= 2.0  # space at the bottom for zeros
        pad = max((high / low) ** 0.06, 1.1)
        return low / pad, high * pad

    def axis(self) -> Figure:
        """Return the layout of the y axis."""
        if not self.log:
            return {"range": [self.low, self.high]}
        ends = [math.log10(self.low), math.log10(self.high)]
        decades = ends[1] - ends[0]
        if decades < 0.35:  # there may be no 1, 2 or 5 in the range
            return {"type": "log", "range": ends, "nticks": 5, "tickformat": "~g"}
        tick: float | str = "D2" if decades < 1.6 else math.ceil(decades / 6)
        return {"type": "log", "range": ends, "dtick": tick, "tickformat": "~g"}

    def lines(self) -> Iterator[Figure]:
        """Yield a line for each layer; lines of layers that are off come last, on top."""
        has_markers = self.values.numel() <= MAX_MARKERS or len(self.steps) == 1
        for k in sorted(range(len(self.names)), key=lambda k: self.is_off[k]):
            name, is_off, values = escaped(self.names[k]), self.is_off[k], self.values[k].tolist()
            is_clamped = self.log and any(value < self.low for value in values)
            clamped = [max(value, self.low) for value in values] if is_clamped else values
            in_legend = not self.many_off if is_off else self.by_layer
            index, group = (0, OFF_NOW) if is_off else self.family.get(self.names[k], (0, OTHERS))
            beside_families = is_off or group == OTHERS  # it is visible when families replace single layers
            yield line(
                self.key,
                digits(clamped),
                mode="lines+markers" if has_markers else "lines",
                name=self.labels[self.names[k]],
                meta=[name, self._should_be(k)],
                uid=f"L{self.key}_{k}{'k' if beside_families else ''}",
                **({"customdata": digits(values)} if is_clamped else {}),
                line={
                    "color": self.colours[k],
                    "width": 3.5 if is_off and in_legend else 1.8 if self.by_layer else 1.1,
                    "dash": "solid" if in_legend else DASHES[index % len(DASHES)],
                },
                marker={"size": 7 if is_off and in_legend else 4},
                opacity=1.0 if in_legend else 0.7,
                legendgroup=name if in_legend else escaped(group),
                legendrank=k + (0 if is_off else 1000),
                showlegend=in_legend,
                hovertemplate=f"<b>%{{meta[0]}}</b><br>step %{{x}}<br>{quantity_title(self.key)} "
                f"%{{{'customdata' if is_clamped else 'y'}:.3~g}}%{{meta[1]}}<extra></extra>",
            )

    def groups(self) -> Iterator[Figure]:
        """Yield the legend's entries for groups of layers: those that are off, if they are many, and families."""
        if self.many_off:
            yield self._group(OFF_NOW, OFF_NOW, sum(self.is_off), "@danger", "solid", 500)
        bare = unprefixed(tuple(self.all_names))
        names = {
            family: OTHERS if family == OTHERS else family_of(bare[self.all_names[members[0]]])
            for family, members in self.families.items()
        }
        short = shortened(tuple(names.values()))
        for n, (family, members) in enumerate(self.healthy.items()):
            label = short[names[family]]
            yield self._group(family, label, len(members), colour(n), DASHES[n % len(DASHES)], 2000 + n)

    def family_bands(self) -> Iterator[Figure]:
        """Yield the traces of families, which the page shows until single layers are switched on."""
        families = {family: members for family, members in self.healthy.items() if members and family != OTHERS}
        yield from family_traces(self.key, self.all_values, families, self.log, self.low)

    def _group(self, group: str, label: str, count: int, colour: str, dash: str, rank: int) -> Figure:
        return line(
            [None],
            [None],
            name=f"{escaped(label)} ({count})",
            line={"color": colour, "width": 1.5, "dash": dash},
            legendgroup=escaped(group),
            legendrank=rank,
            showlegend=count > 0,
        )

    def _should_be(self, k: int) -> str:
        low, high = self.limits[k, -1].tolist()
        if math.isnan(low) or math.isnan(high):
            return ""
        return f"<br>should be {in_words(low, high)} at step {self.steps[-1]}"

    def bands(self) -> Iterator[Figure]:
        """Yield the band that most layers share as an area; one-sided limits, and other bands, as lines."""
        for index, layers in enumerate(self._by_band()[:4]):
            low, high = self.limits[layers[0]].T
            is_single = len(layers) == 1 < len(self.names)
            is_shared = index == 0 and not is_single
            name = escaped(self.names[layers[0]])
            if is_shared and bool(((low > 0) & high.isfinite()).any()):
                yield from self._area(low, high, len(layers))
                continue
            colour, owner = (self.colours[layers[0]], name) if is_single else ("@limit", f"{len(layers)} layers")
            for limit in (low, high):
                if bool((limit.isfinite() & (limit > 0)).any()):
                    yield self._edge(limit, colour, f"limit of {owner}", "band" if is_shared else name)

    def _by_band(self) -> list[list[int]]:
        """Return the layers grouped by band, the largest group first."""
        groups: list[list[int]] = []
        for k, limits in enumerate(self.limits):
            if not limits.isfinite().any():
                continue
            for layers in groups:
                if torch.allclose(self.limits[layers[0]], limits, rtol=1e-3, atol=0.0, equal_nan=True):
                    layers.append(k)
                    break
            else:
                groups.append([k])
        return sorted(groups, key=lambda layers: -len(layers))

    def _area(self, low: Tensor, high: Tensor, count: int) -> Iterator[Figure]:
        finite = (low.isfinite() & high.isfinite()).tolist()
        with_limits = int(self.limits.isfinite().flatten(1).any(1).sum())
        name = "band of most layers" if 2 * count > with_limits else f"band of {count} layers"
        for limit, fill in ((low, "none"), (high, "tonexty")):
            yield line(
                [*compress(self.steps, finite)],
                digits([*compress(limit.tolist(), finite)]),
                line={"color": "@limit", "width": 0.5},
                fill=fill,
                fillcolor="@band",
                hoverinfo="skip",
                name="band" if len(self.names) == 1 else name,
                legendgroup="band",
                legendrank=3000,
                showlegend=fill != "none",
            )

    def _edge(self, limit: Tensor, colour: str, name: str, group: str) -> Figure:
        style = {"color": colour, "width": 1, "dash": "dash"}
        return line(self.key, digits(limit.tolist()), line=style, hoverinfo="name", name=name, legendgroup=group)
