"""The curves of a report: a line for each layer, over the band where it should be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from textwrap import wrap

import numpy as np
import torch
from torch import Tensor

from spectral_monitor.condition.verdict import in_words
from spectral_monitor.measurement import Measurement
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting.content.families import OTHERS, families_of, family_of
from spectral_monitor.reporting.content.history import Thinned
from spectral_monitor.reporting.content.labels import shortened, unprefixed
from spectral_monitor.reporting.content.panels import Panel, shown
from spectral_monitor.reporting.content.tally import off
from spectral_monitor.reporting.html.families import colour, family_traces
from spectral_monitor.reporting.html.figures import Figure, digits, drawable, escaped, labels, line, title_of, titled
from spectral_monitor.reporting.html.limit_lines import limit_traces, widened

MAX_LAYERS_IN_LEGEND = 14
"""Layers that each have a place in the legend; more of them have one by family."""
MAX_LINES = 120
"""Layers that are drawn, at most; a browser takes its time for more."""
MAX_THICK_LINES = 5
"""Layers outside, at most, that each have a thick line and a place in the legend."""
MAX_MARKERS = 1500
"""Of all curves of a quantity together; if there are more, only the lines are drawn."""
MAX_DECADES = 9.0
"""Below the largest value; what is smaller is drawn at the bottom."""
OUTSIDE = "off now"
TITLE_WIDTH = 40
"""Characters of a line below a chart's title."""
MAX_CHARTS_IN_ROW, CHART_HEIGHT = 3, 258
"""Charts in a row, at most; pixels of a chart's height."""
GAP = 0.09
"""Between two charts, for what is written beside the second one; of the width."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_DEPTH = ((59, 111, 216), (128, 90, 213), (200, 80, 150), (232, 112, 60), (205, 155, 20))
"""Colours from the first layer to the last, legible on white and on black."""


def depth_colours(count: int) -> list[str]:
    """Return a colour for each layer, in the order of the network.

    Example:
        >>> depth_colours(2)
        ['rgb(59,111,216)', 'rgb(205,155,20)']
    """
    places = np.linspace(0, len(_DEPTH) - 1, count)
    mixed = [np.interp(places, range(len(_DEPTH)), channel).round() for channel in zip(*_DEPTH, strict=True)]
    return [f"rgb({red:.0f},{green:.0f},{blue:.0f})" for red, green, blue in zip(*mixed, strict=True)]


def drawn(rows: Sequence[int], first: Sequence[bool]) -> list[int]:
    """Return some of very many layers, evenly spaced and with both ends; preferred layers come first.

    Example:
        >>> found = drawn(range(1000), [i == 77 for i in range(1000)])
        >>> len(found), found[0], 77 in found, found[-1]
        (120, 0, True, 999)
    """
    found: list[int] = []
    for some in ([i for i in rows if first[i]], [i for i in rows if not first[i]]):
        room = min(len(some), MAX_LINES - len(found))
        found += [some[k * (len(some) - 1) // max(1, room - 1)] for k in range(room)]
    return sorted(found)


def curves(
    panel: Panel, measurements: Sequence[Measurement], now: Measurement, limit: Sequence[Measurement] = ()
) -> tuple[Figure | None, dict[str, list[int]]]:
    """Return the figure that answers one question, and the steps of each quantity in it.

    Layers that are off at ``now`` are red; ``limit``, measurements of infinite width, is dashed. ``None`` where nothing
    is known.
    """
    outside = set(off(now))
    first = [info.role == "readout" or info.name in outside for info in now.layers]
    every = shown(panel, now.layers)
    rows = drawn(every, first)
    known = {key: found for key in panel.quantities if (found := drawable(measurements, key)) is not None}
    known = {key: found for key, found in known.items() if found.values(key)[rows].isfinite().any()}
    if not known:
        return None, {}
    layout: Figure = {
        "margin": {"l": 60, "r": 10, "t": 56, "b": 46},
        "annotations": [],
        "hovermode": "closest",
        "legend": {"tracegroupgap": 0, "itemsizing": "constant"},
    }
    data: list[Figure] = []
    few = all(
        int(found.values(key)[rows].isfinite().any(1).sum()) <= MAX_LAYERS_IN_LEGEND for key, found in known.items()
    )
    meanings = {key: wrap(QUANTITIES[key].meaning, TITLE_WIDTH) for key in known}
    for key, words in meanings.items():
        words += [f"healthy: {QUANTITIES[key].limits}"] if QUANTITIES[key].limits else []
    most = max(map(len, meanings.values()))
    layout["margin"]["t"] += 15 * (most - 1)
    between = layout["margin"]["t"] + layout["margin"]["b"]
    pixels, domains = _grid(len(known), between)
    layout["height"] = pixels + between
    for place, ((key, found), (across, upright)) in enumerate(zip(known.items(), domains, strict=True)):
        suffix = "" if place == 0 else str(place + 1)
        chart = _Chart(key, found, rows, every, now, few)
        dashed = limit_traces(limit, key, chart.names)
        chart.low, chart.high = widened(chart.low, chart.high, dashed, chart.log)
        layout[f"xaxis{suffix}"] = {"domain": across, "anchor": f"y{suffix}", "title": {"text": "step", "standoff": 4}}
        layout[f"yaxis{suffix}"] = {"domain": upright, "anchor": f"x{suffix}", **chart.axis()}
        title = titled(
            QUANTITIES[key].counted_in, *map(escaped, meanings[key]), *["&nbsp;"] * (most - len(meanings[key]))
        )
        layout["annotations"].append(title_of(title, suffix, f"y{suffix}"))
        traces = [*chart.bands(), *chart.family_bands(), *dashed, *chart.lines()]
        traces += chart.groups() if place == 0 else []
        for trace in traces:
            trace["showlegend"] = trace.get("showlegend", False) and place == 0
            data.append({**trace, "xaxis": f"x{suffix}", "yaxis": f"y{suffix}"})
    return {"data": data, "layout": layout}, {key: found.steps for key, found in known.items()}


def _grid(count: int, between: int) -> tuple[int, list[tuple[list[float], list[float]]]]:
    """Return the height of some charts in rows of equal length, ``between`` pixels from one row to the next, and the
    part of it that each takes across and upright.
    """
    rows = -(-count // MAX_CHARTS_IN_ROW)
    beside = -(-count // rows)
    width = (1 - GAP * (beside - 1)) / beside
    pixels = rows * CHART_HEIGHT + (rows - 1) * between
    domains = []
    for row, column in (divmod(place, beside) for place in range(count)):
        left, top = column * (width + GAP), 1 - row * (CHART_HEIGHT + between) / pixels
        domains.append(([left, min(1.0, left + width)], [max(0.0, top - CHART_HEIGHT / pixels), top]))
    return pixels, domains


class _Chart:
    """One quantity of some layers.

    Args:
        key: the quantity.
        found: all of it.
        rows: places of the layers that each have a curve.
        every: places of all layers of the chart, which families are of.
        now: the measurement that says which layers are outside.
        few: whether each layer has its own colour and name, in this chart and in those beside it.
    """

    def __init__(
        self, key: str, found: Thinned, rows: Sequence[int], every: Sequence[int], now: Measurement, few: bool
    ) -> None:
        values = found.values(key)
        known = values.isfinite().any(1).tolist()
        rows, every = ([i for i in some if known[i]] for some in (rows, every))
        self.key, self.steps = key, found.steps
        self.names, self.short = [now.layers[i].name for i in rows], labels(now)
        self.values, self.limits = values[rows], found.bands(key)[rows][..., :2]
        band = QUANTITIES[key].band
        if band is not None and not self.limits.isfinite().any():  # the judge has none
            self.limits = torch.tensor(band, device="cpu").expand_as(self.limits)
        verdicts = set(off(now))
        self.outside = [name in verdicts for name in self.names]
        self.crowd = sum(self.outside) > MAX_THICK_LINES
        self.few = few
        self.all_values, self.all_names = values[every], [now.layers[i].name for i in every]
        self.families = {} if self.few else families_of(self.all_names)
        self.family = {self.all_names[k]: (n, of) for n, (of, some) in enumerate(self.families.items()) for k in some}
        # Layers that are off have a red line.
        self.inside = {of: [k for k in some if self.all_names[k] not in verdicts] for of, some in self.families.items()}
        depth = depth_colours(len(now.layers))
        colours = [depth[i] for i in rows] if few else [colour(self.family[name][0]) for name in self.names]
        self.colours = ["@danger" if out else tint for out, tint in zip(self.outside, colours, strict=True)]
        finite = self.all_values[self.all_values.isfinite()]
        self.log = not QUANTITIES[key].bounded and bool((finite >= 0).all() and (finite > 0).any())
        self.low, self.high = self._range(finite)

    def _range(self, finite: Tensor) -> tuple[float, float]:
        """Return the range of the axis: all values, and limits that are not far from them."""
        if QUANTITIES[self.key].bounded:  # all of its range; others are on a log scale if they are nowhere negative
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
            low /= 2.0  # room at the bottom for what is 0
        pad = max((high / low) ** 0.06, 1.1)
        return low / pad, high * pad

    def axis(self) -> Figure:
        """Return the layout of the y axis."""
        if not self.log:
            return {"range": [self.low, self.high]}
        ends = [math.log10(self.low), math.log10(self.high)]
        decades = ends[1] - ends[0]
        apart: float | str = "D2" if decades < 1.6 else math.ceil(decades / 6)
        if decades < 0.35:  # then there may be no 1, 2 or 5 among the values
            return {"type": "log", "range": ends, "nticks": 5, "tickformat": "~g"}
        return {"type": "log", "range": ends, "dtick": apart, "tickformat": "~g"}

    def lines(self) -> Iterator[Figure]:
        """Return a line for each layer; lines outside the band come last, on top."""
        dots = self.values.numel() <= MAX_MARKERS or len(self.steps) == 1
        for k in sorted(range(len(self.names)), key=lambda k: self.outside[k]):
            name, out, values = escaped(self.names[k]), self.outside[k], self.values[k].tolist()
            below = self.log and any(value < self.low for value in values)
            drawn = [max(value, self.low) for value in values] if below else values
            alone = not self.crowd if out else self.few
            n, of = (0, OUTSIDE) if out else self.family.get(self.names[k], (0, OTHERS))
            kept = out or of == OTHERS  # is seen beside families
            yield line(
                self.key,
                digits(drawn),
                mode="lines+markers" if dots else "lines",
                name=self.short[self.names[k]],
                meta=[name, self._should_be(k)],
                uid=f"L{self.key}_{k}{'k' if kept else ''}",
                **({"customdata": digits(values)} if below else {}),
                line={
                    "color": self.colours[k],
                    "width": 3.5 if out and alone else 1.8 if self.few else 1.1,
                    "dash": "solid" if alone else DASHES[n % len(DASHES)],
                },
                marker={"size": 7 if out and alone else 4},
                opacity=1.0 if alone else 0.7,
                legendgroup=name if alone else escaped(of),
                legendrank=k + (0 if out else 1000),
                showlegend=alone,
                hovertemplate=f"<b>%{{meta[0]}}</b><br>step %{{x}}<br>{self.key} "
                f"%{{{'customdata' if below else 'y'}:.3~g}}%{{meta[1]}}<extra></extra>",
            )

    def groups(self) -> Iterator[Figure]:
        """Return the legend where not every layer has an entry: families of layers, on which one can click."""
        if self.crowd:
            yield self._group(OUTSIDE, OUTSIDE, sum(self.outside), "@danger", "solid", 500)
        bare = unprefixed(tuple(self.all_names))
        first = {of: bare[self.all_names[some[0]]] for of, some in self.families.items()}
        names = {of: OTHERS if of == OTHERS else family_of(name) for of, name in first.items()}
        short = shortened(tuple(names.values()))
        for n, (of, some) in enumerate(self.inside.items()):
            yield self._group(of, short[names[of]], len(some), colour(n), DASHES[n % len(DASHES)], 2000 + n)

    def family_bands(self) -> Iterator[Figure]:
        """Yield the traces of families, which the page shows unless single layers are asked for."""
        found = {of: some for of, some in self.inside.items() if some and of != OTHERS}
        yield from family_traces(self.key, self.all_values, found, self.log, self.low)

    def _group(self, of: str, name: str, count: int, colour: str, dash: str, rank: int) -> Figure:
        return line(
            [None],
            [None],
            name=f"{escaped(name)} ({count})",
            line={"color": colour, "width": 1.5, "dash": dash},
            legendgroup=escaped(of),
            legendrank=rank,
            showlegend=count > 0,
        )

    def _should_be(self, k: int) -> str:
        low, high = self.limits[k, -1].tolist()
        if math.isnan(low) or math.isnan(high):
            return ""
        return f"<br>should be {in_words(low, high)} at step {self.steps[-1]}"

    def bands(self) -> Iterator[Figure]:
        """Return the band that most layers share as an area; one-sided limits, and the bands of others, as lines."""
        for place, some in enumerate(self._alike()[:4]):
            low, high = self.limits[some[0]].T
            single = len(some) == 1 < len(self.names)
            name = escaped(self.names[some[0]])
            if place == 0 and not single and bool(((low > 0) & high.isfinite()).any()):
                yield from self._area(low, high, len(some))
                continue
            colour, of = (self.colours[some[0]], name) if single else ("@limit", f"{len(some)} layers")
            for limit in (low, high):
                if bool((limit.isfinite() & (limit > 0)).any()):
                    yield self._edge(limit, colour, f"limit of {of}", "band" if place == 0 and not single else name)

    def _alike(self) -> list[list[int]]:
        """Return the layers grouped by band, the largest group first."""
        groups: list[list[int]] = []
        for k, limits in enumerate(self.limits):
            if not limits.isfinite().any():
                continue
            for some in groups:
                if torch.allclose(self.limits[some[0]], limits, rtol=1e-3, atol=0.0, equal_nan=True):
                    some.append(k)
                    break
            else:
                groups.append([k])
        return sorted(groups, key=lambda some: -len(some))

    def _area(self, low: Tensor, high: Tensor, count: int) -> Iterator[Figure]:
        known = (low.isfinite() & high.isfinite()).tolist()
        limited = int(self.limits.isfinite().flatten(1).any(1).sum())
        most = "band of most layers" if 2 * count > limited else f"band of {count} layers"
        steps = [step for step, some in zip(self.steps, known, strict=True) if some]
        for limit, fill in ((low, "none"), (high, "tonexty")):
            yield line(
                steps,
                digits([x for x, some in zip(limit.tolist(), known, strict=True) if some]),
                line={"color": "@limit", "width": 0.5},
                fill=fill,
                fillcolor="@band",
                hoverinfo="skip",
                name="band" if len(self.names) == 1 else most,
                legendgroup="band",
                legendrank=3000,
                showlegend=fill != "none",
            )

    def _edge(self, limit: Tensor, colour: str, name: str, group: str) -> Figure:
        look = {"color": colour, "width": 1, "dash": "dash"}
        return line(self.key, digits(limit.tolist()), line=look, hoverinfo="name", name=name, legendgroup=group)
