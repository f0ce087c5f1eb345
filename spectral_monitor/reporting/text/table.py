"""A measurement as rows of text, and those as lines."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

from spectral_monitor.measurement import NODE, LayerInfo, Measurement
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting.content.headline import headlines, root_lines
from spectral_monitor.reporting.content.labels import role_name
from spectral_monitor.reporting.content.tally import tally
from spectral_monitor.reporting.content.typical import VS_TYPICAL, legend, limits, vs_typical
from spectral_monitor.reporting.text.folding import Row, rows
from spectral_monitor.reporting.text.gauge import gauge, scale
from spectral_monitor.reporting.text.lines import Column, Table, printable, text_column

if TYPE_CHECKING:
    from spectral_monitor.condition import Verdict

_LEAST = 12
"""From here on columns are left out before all of those."""
ARROWS = (" ^", " v")
"""Behind a value that is off: too large, too small."""
WIDTH = 80
"""Characters of a line where nothing else is asked for: those of a narrow terminal, and of a page of code."""
NOTE = "! "
"""Before a line on a cause."""
DOUBTFUL = 0.3
"""A standard error of features, relative to them, that is worth a word."""


def measurement_table(measurement: Measurement, folded: bool = True, width: int | None = WIDTH) -> str:
    """Return the table of :func:`measurement_rows` as plain text of a width; ``None`` for all of its columns."""
    return measurement_rows(measurement, folded).plain(width)


def measurement_rows(measurement: Measurement, folded: bool = True) -> Table:
    """Return one row per matrix: roots first, below each what follows from it, then the others.

    Biases and gains are measured too, but have a row only if they have a verdict.

    Args:
        folded: whether layers that follow from a root share a row. In a network of many layers, so do healthy layers
            close to typical, and layers that were not judged for the same reason.
    """
    ratios, band = vs_typical(measurement), limits(measurement)
    found = rows(measurement, ratios, folded)
    infos, single = measurement.layers, [row.places[0] if len(row.places) == 1 else None for row in found]
    columns = [
        text_column("layer", [row.label for row in found]),
        text_column("role", [_shared({role_name(infos[i].role) for i in row.places}) for row in found], spare=6),
        text_column("in -> out", [_shared({fans(infos[i]) for i in row.places}) for row in found], spare=8),
    ]
    if "update_natural" in measurement.values:
        of_rows = [[ratios[i] for i in row.places] for row in found]
        cells = _with_arrows(list(map(number_range, of_rows)), found, "update_natural")
        columns.append(Column(VS_TYPICAL, tuple(cells), legend=legend(measurement)))
        drawn = tuple(gauge(some, band) for some in of_rows)
        columns.append(Column(scale(band), drawn, text=True, spare=2, drawn=True))
    shown = _columns(measurement)
    for key, (title, spare, says) in shown.items():
        values = measurement.values[key].tolist()
        cells = ["" if i is None else number(values[i]) for i in single]
        marked = cells if key == "update_natural" else _with_arrows(cells, found, key)
        spare = spare if marked == cells else 0
        columns.append(Column(title, tuple(marked), spare=spare, quantity=key, legend=says))
    if any(row.verdict and row.verdict.quantity for row in found):
        should = [v.should_be if (v := row.verdict) and v.quantity else "" for row in found]
        columns.append(text_column("should be", should, spare=5))
    if any(row.what for row in found):
        columns.append(text_column("what", [_what(row, shown) for row in found]))
    lines = headlines(measurement)
    title = f"spectral monitor, step {measurement.step}: {lines[0]}"
    state, states = tally(measurement).state, tuple(row.state for row in found)
    notes = (*lines[1:], *(f"{NOTE}{printable(line)}" for line in root_lines(measurement)))
    foot = tuple(filter(None, (summary_line(measurement),)))
    return Table(title, tuple(columns), foot, state, states, notes)


def _with_arrows(cells: list[str], found: Sequence[Row], key: str) -> list[str]:
    """Return the cells of a quantity, with an arrow where it gave a layer away, and room behind the others then."""
    arrows = [_arrow(row.verdict, key) for row in found]
    marked = [f"{cell}{arrow}" for cell, arrow in zip(cells, arrows, strict=True)]
    return marked if any(arrow.strip() for arrow in arrows) else cells


def _columns(measurement: Measurement) -> dict[str, tuple[str, int, str]]:
    """Return the usual ones that were measured; where none was, those that were, the first of which always stays."""
    columns = {key: quantity.column for key, quantity in QUANTITIES.items() if key in measurement.values}
    usual = {key: (c.title, c.spare, c.legend) for key, c in columns.items() if c is not None}
    return usual or {key: (key, _LEAST + k if k else 0, "") for k, key in enumerate(measurement.values)}


def _arrow(verdict: Verdict | None, key: str) -> str:
    """Return the mark behind a value: too large, too small, or room for one."""
    if verdict is None or verdict.quantity != key or math.isnan(verdict.ratio):
        return "  "
    return ARROWS[not verdict.ratio > 1]


def _what(row: Row, shown: Container[str]) -> str:
    """Return what a row says, after the value that gave the layer away if it is not among the quantities shown."""
    verdict = row.verdict
    if verdict is None or not verdict.quantity or verdict.quantity in shown:
        return row.what
    return f"{verdict.quantity} {number(verdict.value)}: {row.what}"


def _shared(cells: set[str]) -> str:
    """Return the cell that all layers of a row share; nothing if they differ."""
    return next(iter(cells)) if len(cells) == 1 else ""


def fans(info: LayerInfo) -> str:
    """Return what a layer maps: inputs to outputs, rows of a table to outputs, and how many such blocks are stacked in
    it; empty for a node.
    """
    if info.role == NODE:
        return ""
    rows = math.prod(info.shape[:-1])
    inputs = f"{rows} tokens" if info.role == "embedding" and len(info.shape) > 1 else str(info.fan_in)
    return f"{inputs} -> {info.fan_out}" + (f" x{info.blocks}" if info.blocks > 1 else "")


def summary_line(measurement: Measurement) -> str:
    """Return the numbers of the whole network on one line, three spaces apart."""
    s = {key: value for key, value in measurement.summary.items() if math.isfinite(value)}
    parts = []
    if "final_layer_alignment" in s:
        parts.append(f"output alignment {number(s['final_layer_alignment'])}")
    if "loss_change_predicted" in s:
        predicted = number(s["loss_change_predicted"])
        if "loss_change" in s:
            parts.append(f"loss change {number(s['loss_change'])} (predicted {predicted})")
        else:
            parts.append(f"predicted loss change {predicted}")
    if s.get("feature_error", 0.0) > DOUBTFUL:
        parts.append(f"dh/h of few samples, off by up to {100 * s['feature_error']:.0f} %")
    if s.get("skipped_updates"):
        steps = f"{s['skipped_updates']:.0f} measured step{'s' * (s['skipped_updates'] != 1)}"
        parts.append(f"{steps} with NaN, inf or no update")
    if "overhead_ms" in s:
        parts.append(f"took {s['overhead_ms']:.0f} ms")
    return "   ".join(parts)


def number(value: float) -> str:
    """Return a number with two or three digits, whatever its size; "-" for NaN.

    Example:
        >>> [number(value) for value in (0.0, 0.0123, 0.456, 7.891, 45.67, 123.4, 12345.0, math.nan)]
        ['0', '1.2e-2', '0.46', '7.89', '45.7', '123', '1.2e4', '-']
    """
    if math.isnan(value):
        return "-"
    size = abs(value)
    if value == 0 or 0.1 <= size < 1000:
        digits = 0 if value == 0 or size >= 100 else 1 if size >= 10 else 2
        return f"{value:.{digits}f}"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def number_range(ratios: Sequence[float]) -> str:
    """Return the lowest and the highest of several numbers.

    Example:
        >>> number_range([0.5, math.nan, 2.0]), number_range([0.5]), number_range([math.nan, math.nan])
        ('0.50 .. 2.00', '0.50', '-')
    """
    known = [ratio for ratio in ratios if not math.isnan(ratio)]
    low, high = (number(min(known)), number(max(known))) if known else ("-", "-")
    return low if low == high else f"{low} .. {high}"
