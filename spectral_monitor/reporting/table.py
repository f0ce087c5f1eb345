"""A measurement and a model's roles as rows of text, and those as lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING

from spectral_monitor.measurement import LayerInfo, Measurement
from spectral_monitor.reporting.folding import Row, rows
from spectral_monitor.reporting.headline import headlines
from spectral_monitor.reporting.tally import tally
from spectral_monitor.reporting.typical import VS_TYPICAL, legend, vs_typical

if TYPE_CHECKING:
    from spectral_monitor.anatomy import Anatomy
    from spectral_monitor.condition import Verdict

_COLUMNS = {
    "weight_natural": ("|W| nat", 1),
    "update_natural": ("|dW| nat", 0),
    "update_ratio": ("|dW|/|W|", 8),
    "update_stable_rank": ("srank dW", 10),
    "drift_ratio": ("drift", 7),
    "feature_change": ("dh/h", 5),
    "alignment": ("align", 6),
    "bfa": ("BFA deg", 9),
    "contribution": ("-<g,dW>", 11),
}
"""Quantity -> title, and how soon its column is left out where there is no room for all."""
_LEAST = 12
"""From here on columns are left out before all of those."""
ARROWS = (" ^", " v")
"""Behind a value that is off: too large, too small."""
SENTENCE = 72
"""Characters of a line of the last column of plain text; what is longer goes on in the next line."""


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        title: above it.
        cells: one for each row.
        text: whether it is text, which goes to the left.
        spare: 0 for what stays; where there is no room for all, the highest goes first.
        quantity: a key of the measurement, if that is what it shows.
    """

    title: str
    cells: tuple[str, ...]
    text: bool = False
    spare: int = 0
    quantity: str = ""


@dataclass(frozen=True)
class Table:
    """What is shown of a measurement or a model, however it is drawn; ``str`` of it is plain text.

    Attributes:
        title: one line, the answer first.
        columns: all of the same length, or none.
        foot: lines below.
        state: ``"healthy"``, ``"off"`` or ``"not judged"``; empty where the table is on something else.
        states: of each row, ``"disturbed"`` among them; empty like ``state``.
        notes: lines between the title and the rows.
    """

    title: str
    columns: tuple[Column, ...]
    foot: tuple[str, ...] = ()
    state: str = ""
    states: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([self.title, *self.notes, *aligned(self.columns), *self.foot])


def measurement_table(measurement: Measurement, folded: bool = True) -> str:
    """Return the table of :func:`measurement_rows` as plain text."""
    return str(measurement_rows(measurement, folded))


def role_table(anatomy: Anatomy) -> str:
    """Every matrix with its role, blocks and notes; then what is not measured and why."""
    return str(role_rows(anatomy))


def measurement_rows(measurement: Measurement, folded: bool = True) -> Table:
    """Return one row per matrix: roots first, below each what follows from it, then the others.

    Biases and gains are measured too, but have a row only if they have a verdict.

    Args:
        measurement: what is shown.
        folded: whether layers that follow from a root share a row, and so, in a network of many, do healthy layers
            that are close to typical and layers that were not judged for the same reason.
    """
    ratios = vs_typical(measurement)
    found = rows(measurement, ratios, folded)
    infos, single = measurement.layers, [row.places[0] if len(row.places) == 1 else None for row in found]
    columns = [
        _text("layer", [row.label for row in found]),
        _text("role", [_shared({infos[i].role for i in row.places}) for row in found], spare=3),
        _text("in -> out", [_shared({_fans(infos[i]) for i in row.places}) for row in found], spare=4),
    ]
    for key, (title, spare) in _columns(measurement).items():
        values = (measurement.values[key].rad2deg() if key == "bfa" else measurement.values[key]).tolist()
        cells = ["" if i is None else number(values[i]) for i in single]
        arrows = [_arrow(row.verdict, key) for row in found]
        if any(arrow.strip() for arrow in arrows):  # with room behind the other values
            cells, spare = [f"{cell}{arrow}" for cell, arrow in zip(cells, arrows, strict=True)], 0
        columns.append(Column(title, tuple(cells), spare=spare, quantity=key))
        if key == "update_natural":
            columns.append(Column(VS_TYPICAL, tuple(number_range([ratios[i] for i in row.places]) for row in found)))
    if any(row.verdict and row.verdict.quantity for row in found):
        limits = [v.should_be if (v := row.verdict) and v.quantity else "" for row in found]
        columns.append(_text("should be", limits, spare=2))
    if any(row.what for row in found):
        columns.append(_text("what", [_what(row, measurement) for row in found]))
    lines = headlines(measurement)
    foot = (summary_line(measurement), legend(measurement))
    title = f"spectral monitor, step {measurement.step}: {lines[0]}"
    state, states = tally(measurement).state, tuple(row.state for row in found)
    return Table(title, tuple(columns), tuple(filter(None, foot)), state, states, tuple(lines[1:]))


def _columns(measurement: Measurement) -> dict[str, tuple[str, int]]:
    """The usual ones that were measured; where none of them was, those that were, the first of which always stays."""
    usual = {key: column for key, column in _COLUMNS.items() if key in measurement.values}
    return usual or {key: (key, _LEAST + k if k else 0) for k, key in enumerate(measurement.values)}


def _arrow(verdict: Verdict | None, key: str) -> str:
    """Return the mark behind a value: too large, too small, or room for one."""
    if verdict is None or verdict.quantity != key or math.isnan(verdict.ratio):
        return "  "
    return ARROWS[not verdict.ratio > 1]


def _what(row: Row, measurement: Measurement) -> str:
    """Return what a row says, after the value that gave the layer away if no column shows it."""
    verdict = row.verdict
    elsewhere = verdict is not None and verdict.quantity and verdict.quantity not in _columns(measurement)
    return (f"{verdict.quantity} {number(verdict.value)}: " if verdict and elsewhere else "") + row.what


def _shared(cells: set[str]) -> str:
    """Return the cell that all layers of a row share; nothing if they differ."""
    return next(iter(cells)) if len(cells) == 1 else ""


def _fans(info: LayerInfo) -> str:
    return f"{info.fan_in} -> {info.fan_out}" + (f" x{info.blocks}" if info.blocks > 1 else "")


def summary_line(measurement: Measurement) -> str:
    """Return the numbers of the whole network on one line, three spaces apart."""
    s = {key: value for key, value in measurement.summary.items() if math.isfinite(value)}
    parts = []
    if "final_layer_alignment" in s:
        parts.append(f"readout alignment {number(s['final_layer_alignment'])}")
    if "loss_change_predicted" in s:
        predicted = number(s["loss_change_predicted"])
        known = "loss_change" in s
        parts.append(
            f"loss change {number(s['loss_change'])} (predicted {predicted})"
            if known
            else f"predicted loss change {predicted}"
        )
    if s.get("skipped_updates"):
        parts.append(f"{s['skipped_updates']:.0f} measured steps with NaN, inf or no update")
    if "overhead_ms" in s:
        parts.append(f"monitor {s['overhead_ms']:.0f} ms per measured step")
    return "   ".join(parts)


def role_rows(anatomy: Anatomy) -> Table:
    """One row per matrix; below, what is not measured and why."""
    matrices = [layer for layer in anatomy.layers if layer.is_matrix]
    vectors = len(anatomy.layers) - len(matrices)
    title = f"spectral monitor: {len(matrices)} matrices and {vectors} biases and gains are measured"
    columns = []
    if matrices:
        infos = [layer.info for layer in matrices]
        columns = [
            _text("layer", [info.name for info in infos]),
            _text("role", [info.role for info in infos]),
            _text("in -> out", [f"{info.fan_in} -> {info.fan_out}" for info in infos]),
            Column("blocks", tuple(str(info.blocks) for info in infos)),
            _text("note", [layer.note for layer in matrices]),
        ]
        if any(info.placement != "local" for info in infos):
            columns.insert(4, _text("placement", [info.placement for info in infos]))
    foot = []
    if anatomy.unmeasured:
        foot.append(f"not measured ({len(anatomy.unmeasured)}):")
        grouped: dict[str, list[str]] = {}
        for item in anatomy.unmeasured:
            grouped.setdefault(item.reason, []).append(item.name)
        for reason, names in grouped.items():
            shown = ", ".join(names[:8]) + (f", ... ({len(names)})" if len(names) > 8 else "")
            foot.append(printable(f"  {shown}: {reason}"))
    return Table(title, tuple(columns), tuple(foot))


def _text(title: str, cells: Sequence[str], spare: int = 0) -> Column:
    return Column(title, tuple(map(printable, cells)), text=True, spare=spare)


def printable(text: str) -> str:
    r"""With escapes for what would break a line or steer a terminal; a layer may be called anything.

    Example:
        >>> print(printable("red\x1b[31m"))
        red\x1b[31m
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def number(value: float) -> str:
    """Two or three digits, whatever the size; "-" for NaN.

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


def aligned(columns: Sequence[Column]) -> list[str]:
    """Return a line of titles and those of each row, columns two spaces apart; text to the left, numbers to the right.

    A last column of long text is wrapped, so that a terminal or a file shows it without a line of its own length.
    """
    if not columns:
        return []
    *before, last = columns
    widths = [max(len(cell) for cell in (column.title, *column.cells)) for column in before]
    rows = [[text] for text in (last.title, *last.cells)]
    if before and last.text:
        rows = [wrap(text, SENTENCE) or [""] for (text,) in rows]
    width = max(len(line) for row in rows for line in row)
    lines = []
    for place, row in enumerate(rows):
        cells = [column.cells[place - 1] if place else column.title for column in before]
        for line in row:
            lines.append(
                "  ".join(
                    cell.ljust(w) if of.text else cell.rjust(w)
                    for cell, w, of in zip([*cells, line], [*widths, width], columns, strict=True)
                ).rstrip()
            )
            cells = [""] * len(before)
    return lines
