"""A sweep as a picture: a panel for each quantity, with its layers against width on log-log axes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spectral_monitor.scaling.sweeps.slope import Slope, exponent
from spectral_monitor.scaling.sweeps.table import sweep_headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from spectral_monitor.scaling.sweeps.result import SweepResult

PANEL_INCHES = 3.6
"""Width and height of a panel in inches."""
COLUMNS = 4
MAX_LAYERS_IN_LEGEND = 40


def sweep_figure(result: SweepResult) -> Figure:
    """Draw means over seeds as curves, smallest to largest values as bands; see :meth:`SweepResult.figure`."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError:
        raise ModuleNotFoundError('a figure needs matplotlib: pip install "spectral-monitor[plots]"') from None

    off, other = result.off, "depth" if result.axis == "width" else "width"
    other_sizes = list(dict.fromkeys(slope.beside for slope in result.slopes)) or [None]
    panels = [(size, quantity) for size in other_sizes for quantity in result.recipe.quantities]
    rows = len(other_sizes) if len(other_sizes) > 1 else math.ceil(len(panels) / COLUMNS)
    columns = math.ceil(len(panels) / rows)
    # Colours follow the order of layers in the network that has most.
    largest = max(other_sizes, key=lambda size: sum(slope.beside == size for slope in result.slopes))
    layers = list(dict.fromkeys(s.layer for s in sorted(result.slopes, key=lambda slope: slope.beside != largest)))
    shades = [0.92 * i / max(1, len(layers) - 1) for i in range(len(layers))]
    colours = dict(zip(layers, colormaps["viridis"](shades), strict=True))
    figure = Figure(figsize=(PANEL_INCHES * columns + 2.2, PANEL_INCHES * rows + 0.7), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis, (size, quantity) in zip(axes.flat, panels, strict=False):
        slopes = [s for s in result.slopes if s.quantity == quantity and s.beside == size]
        _panel(axis, slopes, colours, off)
        for limit in result.limits.values():
            if limit.quantity == quantity and not limit.reason:
                axis.axhline(abs(limit.value), color=colours[limit.layer], linestyle=(0, (2, 2)), linewidth=1, zorder=1)
        axis.set_title(f"{quantity}, {other} {size}" if len(other_sizes) > 1 else quantity, fontsize=11)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    _legend(figure, result, colours)
    figure.suptitle(textwrap.fill(sweep_headline(result), 40 * columns + 10), fontsize=10)
    return figure


def _panel(axis: Axes, slopes: Sequence[Slope], colours: dict[str, Any], off: Sequence[Slope]) -> None:
    drawn = [slope for slope in slopes if any(math.isfinite(value) for value in slope.values)]
    for slope in drawn:
        bold = slope in off
        points = [
            (size, *map(abs, values))
            for size, *values in zip(slope.sizes, slope.values, slope.least, slope.most, strict=True)
            if math.isfinite(values[0])
        ]
        sizes, values, least, most = zip(*points, strict=True)
        colour = colours[slope.layer]
        axis.fill_between(sizes, least, most, color=colour, alpha=0.15, linewidth=0)
        axis.plot(sizes, values, color=colour, linewidth=2.2 if bold else 1.2, marker="o", markersize=5 if bold else 3)
    if not drawn:
        axis.text(0.5, 0.5, "no values", transform=axis.transAxes, ha="center", va="center", color="0.5")
        axis.set_xticks([])
        axis.set_yticks([])
        return
    sizes = drawn[0].sizes
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
    axis.set_xlim(sizes[0] * 0.85, sizes[-1] * 1.18)
    axis.set_xlabel(drawn[0].axis)
    _show_decades(axis)
    _expected(axis, drawn)
    axis.grid(True, which="major", color="0.92", linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _show_decades(axis: Axes) -> None:
    """Show at least one and a half decades, so that a flat curve looks flat."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    low, high = map(math.log10, axis.get_ylim())
    lacking = max(0.0, 1.5 - (high - low)) / 2
    axis.set_ylim(10 ** (low - lacking), 10 ** (high + lacking))
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 3) if high - low + 2 * lacking < 3 else (1,)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _expected(axis: Axes, slopes: Sequence[Slope]) -> None:
    """Draw a dashed line for each predicted slope, through the middle of its curves."""
    by_slope: dict[float, list[Slope]] = {}
    for slope in slopes:
        if not math.isnan(slope.predicted) and not slope.fit.reason:
            by_slope.setdefault(round(slope.predicted, 1) + 0.0, []).append(slope)
    for group in by_slope.values():
        predicted = sum(slope.predicted for slope in group) / len(group)
        sizes = group[0].sizes
        logs = [
            (math.log(size), math.log(abs(value)))
            for slope in group
            for size, value in zip(slope.sizes, slope.values, strict=True)
            if math.isfinite(value)
        ]
        x, y = (sum(pair[i] for pair in logs) / len(logs) for i in (0, 1))
        ends = [sizes[0] * 0.85, sizes[-1] * 1.18]
        heights = [math.exp(y + predicted * (math.log(size) - x)) for size in ends]
        axis.plot(ends, heights, color="crimson", linestyle=(0, (5, 4)), linewidth=1.3, zorder=4)
        axis.annotate(
            f"{slopes[0].axis}^{exponent(predicted)}" if abs(predicted) >= 0.005 else "flat",
            (1, heights[-1]),
            xycoords=("axes fraction", "data"),
            xytext=(2, 0),
            textcoords="offset points",
            fontsize=8,
            color="crimson",
            va="center",
        )


def _legend(figure: Figure, result: SweepResult, colours: dict[str, Any]) -> None:
    from matplotlib.lines import Line2D

    off = {slope.layer for slope in result.off}
    names = list(colours)
    names = names[:: max(1, math.ceil(len(names) / MAX_LAYERS_IN_LEGEND))]  # spread over the network
    handles = [
        Line2D([], [], color=colours[name], linewidth=2.2 if name in off else 1.2, marker="o", markersize=4, label=name)
        for name in names
    ]
    if any(not math.isnan(slope.predicted) for slope in result.slopes):
        handles.append(Line2D([], [], color="crimson", linestyle="--", linewidth=1.3, label="predicted"))
    if any(not limit.reason for limit in result.limits.values()):
        handles.append(Line2D([], [], color="0.4", linestyle=(0, (2, 2)), linewidth=1, label="infinite width"))
    legend = figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False, title="layer")
    legend.get_title().set_fontsize(9)
    for text in legend.get_texts():
        if text.get_text() in off:
            text.set_fontweight("bold")
