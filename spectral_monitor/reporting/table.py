"""A measurement and a model's roles as rows of text, and those as lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spectral_monitor.engine.assemble import balance_ratios
from spectral_monitor.measurement import Measurement

if TYPE_CHECKING:
    from spectral_monitor.anatomy import Anatomy
    from spectral_monitor.condition import Verdict

_COLUMNS = {
    "weight_natural": ("|W| nat", 0),
    "update_natural": ("|dW| nat", 0),
    "update_ratio": ("|dW|/|W|", 6),
    "update_stable_rank": ("srank dW", 8),
    "drift_ratio": ("drift", 5),
    "feature_change": ("dh/h", 3),
    "alignment": ("align", 4),
    "bfa": ("BFA deg", 7),
    "contribution": ("-<g,dW>", 9),
}
"""Quantity -> title, and how soon its column is left out where there is no room for all."""
_LEAST = 10
"""From here on columns are left out before all of those."""
ARROWS = (" ^", " v")
"""Behind a value that is outside: too large, too small."""
_JUDGED = ("update_natural", "weight_natural", "update_ratio")
"""Without any of these nothing is held against anything."""


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
        outside: how many rows, the first ones, violate the condition; ``None`` where that was not judged.
    """

    title: str
    columns: tuple[Column, ...]
    foot: tuple[str, ...] = ()
    outside: int | None = None

    def __str__(self) -> str:
        return "\n".join([self.title, *aligned(self.columns), *self.foot])


def measurement_table(measurement: Measurement) -> str:
    """One line per matrix, those that violate the condition first; biases and gains are measured too but left out."""
    return str(measurement_rows(measurement))


def role_table(anatomy: Anatomy) -> str:
    """Every matrix with its role, blocks and notes; then what is not measured and why."""
    return str(role_rows(anatomy))


def measurement_rows(measurement: Measurement) -> Table:
    """One row per matrix, those that violate the condition first; biases and gains only if they do."""
    verdicts = {verdict.layer: verdict for verdict in measurement.verdicts}
    rows = [i for i, info in enumerate(measurement.layers) if info.role != "vector" or info.name in verdicts]
    rows = rows or list(range(len(measurement.layers)))
    order = {layer: place for place, layer in enumerate(verdicts)}
    rows.sort(key=lambda i: order.get(measurement.layers[i].name, len(order)))
    infos = [measurement.layers[i] for i in rows]
    judged = [verdicts.get(info.name) for info in infos]
    columns = [
        _text("layer", [info.name for info in infos]),
        _text("role", [info.role for info in infos], spare=1),
        _text("in -> out", [_fans(info.fan_in, info.fan_out, info.blocks) for info in infos], spare=2),
    ]
    for key, (title, spare) in _columns(measurement).items():
        values = measurement.values[key][rows]
        cells = [number(value) for value in (values.rad2deg() if key == "bfa" else values).tolist()]
        arrows = [ARROWS[not v.ratio > 1] if v is not None and v.quantity == key else "  " for v in judged]
        if set(arrows) != {"  "}:  # behind the values that are outside, and room for them behind the others
            cells, spare = [f"{cell}{arrow}" for cell, arrow in zip(cells, arrows, strict=True)], 0
        columns.append(Column(title, tuple(cells), spare=spare, quantity=key))
        if key == "update_natural":
            columns.append(_shares(measurement, rows))
    if verdicts:
        columns.append(_text("should be", ["" if v is None else v.should_be for v in judged]))
        columns.append(_text("what", [_what(v, measurement) for v in judged]))
    outside = None if "violations" not in measurement.summary or unjudged(measurement) else len(verdicts)
    return Table(_headline(measurement, len(rows)), tuple(columns), (_summary_line(measurement),), outside)


def _columns(measurement: Measurement) -> dict[str, tuple[str, int]]:
    """The usual ones that were measured; where none of them was, those that were, the first of which always stays."""
    usual = {key: column for key, column in _COLUMNS.items() if key in measurement.values}
    return usual or {key: (key, _LEAST + k if k else 0) for k, key in enumerate(measurement.values)}


def is_judged(measurement: Measurement) -> bool:
    """Whether it has anything that layers are held against; at some steps only other quantities may be measured."""
    return any(key in measurement.values for key in _JUDGED)


def unjudged(measurement: Measurement) -> str:
    """Why no layer could be held against anything at this step; empty if any could.

    No verdict then means nothing: what is NaN, and what was not measured, violates nothing.

    Example:
        >>> import torch
        >>> from spectral_monitor import LayerInfo
        >>> layers = (LayerInfo("head", "readout", 10, 64, (10, 64)),)
        >>> nan = {"update_natural": torch.tensor([math.nan])}
        >>> unjudged(Measurement(5, layers, nan, {}, reasons={"*/*": "NaN or inf in its values"}))
        'NaN or inf in its values'
    """
    key = next((key for key in _JUDGED if key in measurement.values), None)
    if measurement.verdicts:
        return ""
    if key is None:
        return f"none of {', '.join(_JUDGED)} was measured"
    matrices = [i for i, info in enumerate(measurement.layers) if info.role != "vector"]
    if not matrices or measurement.values[key][matrices].isfinite().any():
        return ""
    return measurement.why(key, measurement.layers[matrices[0]].name) or f"no layer has a value of {key}"


def _headline(measurement: Measurement, rows: int) -> str:
    """The answer, where somebody has judged; else what this is."""
    if "violations" not in measurement.summary:
        return f"spectral measurement, step {measurement.step}: {rows} matrices"
    if why := unjudged(measurement):
        return f"spectral condition, step {measurement.step}: no layer could be judged: {why}"
    if not measurement.verdicts:
        return f"spectral condition, step {measurement.step}: all {rows} layers inside"
    longest = max(verdict.steps for verdict in measurement.verdicts)
    count = len(measurement.verdicts)
    return f"spectral condition, step {measurement.step}: {count} of {rows} layers outside, for {longest} steps"


def _what(verdict: Verdict | None, measurement: Measurement) -> str:
    if verdict is None:
        return ""
    elsewhere = verdict.quantity not in _columns(measurement)
    return (f"{verdict.quantity} {number(verdict.value)}: " if elsewhere else "") + verdict.sentence


def _fans(fan_in: int, fan_out: int, blocks: int = 1) -> str:
    return f"{fan_in} -> {fan_out}" + (f" x{blocks}" if blocks > 1 else "")


def _shares(measurement: Measurement, rows: Sequence[int]) -> Column:
    """update_natural over what it is held against; where it was not, over the operators' geometric median."""
    natural = measurement.values["update_natural"]
    if "update_natural" in measurement.bands:
        references = measurement.bands["update_natural"][:, 2]
        if references[rows].isfinite().any():
            return Column("x band", tuple(number(share) for share in (natural / references)[rows].tolist()))
    compared = [i for i in rows if measurement.layers[i].role in ("operator", "readout")]
    ratios = dict(zip(compared, balance_ratios(natural[compared]).tolist(), strict=True))
    return Column("x median", tuple(number(ratios.get(i, math.nan)) for i in rows))


def _summary_line(measurement: Measurement) -> str:
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
            _text("in -> out", [_fans(info.fan_in, info.fan_out) for info in infos]),
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


def aligned(columns: Sequence[Column]) -> list[str]:
    """A line of titles and one for each row, columns two spaces apart; text to the left, numbers to the right."""
    widths = [max(len(cell) for cell in (column.title, *column.cells)) for column in columns]
    lines = []
    for cells in zip(*((column.title, *column.cells) for column in columns), strict=True):
        pads = zip(cells, widths, columns, strict=True)
        lines.append("  ".join(cell.ljust(w) if of.text else cell.rjust(w) for cell, w, of in pads).rstrip())
    return lines
