"""The table of a measurement."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

from spectral_monitor.measurement import NODE, LayerInfo, Measurement
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting.content.headline import headlines, lifted_line, root_lines
from spectral_monitor.reporting.content.labels import quantity_title, role_name
from spectral_monitor.reporting.content.tally import tally
from spectral_monitor.reporting.content.typical import VS_TYPICAL, legend, limits, vs_typical
from spectral_monitor.reporting.text.folding import Row, rows
from spectral_monitor.reporting.text.gauge import gauge, scale
from spectral_monitor.reporting.text.lines import GAP, NO_VALUE, Column, Table, printable, text_column

if TYPE_CHECKING:
    from spectral_monitor.condition import Verdict

_FIRST_SPARE = 12
"""``Column.spare`` of quantities that usually have no column: they are left out before all others."""
ARROWS = (" ^", " v")
"""Behind a value that is off: too large, too small."""
WIDTH = 80
"""Characters of a line by default: those of a narrow terminal, and of a page of code."""
NOTE = "! "
"""In front of a line on a cause."""
DOUBTFUL = 0.3
"""Relative standard error of features from which on the table mentions it."""


def measurement_table(
    measurement: Measurement, folded: bool = True, width: int | None = WIDTH, earlier: Iterable[Measurement] = ()
) -> str:
    """Return the table of :func:`measurement_rows` as plain text; ``width``: characters, ``None`` for all columns."""
    return measurement_rows(measurement, folded, earlier=earlier).plain(width)


def measurement_rows(
    measurement: Measurement, folded: bool = True, earlier: Iterable[Measurement] = (), steps: int = 0
) -> Table:
    """Return a table with a row for each matrix: roots first, each with the layers that follow from it, then others.

    Biases and gains are measured too, but have a row only if they have a verdict.

    Args:
        folded: whether layers that follow from a root share a row. In a network of many layers, so do healthy layers
            close to typical, and layers that were not judged for the same reason.
        earlier: measurements of the run; a line names their verdicts that no longer hold. The rows are of the last of
            them that has finite numbers, if ``measurement`` has none.
        steps: of the run; the title gives their number if later ones were not measured.
    """
    earlier = list(earlier)
    finite = measurement if _has_numbers(measurement) else next(filter(_has_numbers, reversed(earlier)), measurement)
    ratios, band, infos = vs_typical(finite), limits(finite), finite.layers
    layer_rows = rows(finite, ratios, folded)
    columns = [
        text_column("layer", [row.label for row in layer_rows]),
        text_column("role", [_shared({role_name(infos[i].role) for i in row.layers}) for row in layer_rows], spare=6),
        text_column("in -> out", [_shared({fans(infos[i]) for i in row.layers}) for row in layer_rows], spare=8),
    ]
    if "update_natural" in finite.values:
        ratios_of_rows = [[ratios[i] for i in row.layers] for row in layer_rows]
        cells = _with_arrows(list(map(number_range, ratios_of_rows)), layer_rows, "update_natural")
        columns.append(Column(VS_TYPICAL, tuple(cells), legend=legend(finite)))
        gauges = tuple(gauge(row_ratios, band) for row_ratios in ratios_of_rows)
        columns.append(Column(scale(band), gauges, text=True, spare=2, drawn=True))
    shown = _columns(finite)
    for key, (title, spare, explanation) in shown.items():
        values = finite.values[key].tolist()
        cells = [number(values[row.layers[0]]) if len(row.layers) == 1 else "" for row in layer_rows]
        marked = cells if key == "update_natural" else _with_arrows(cells, layer_rows, key)
        spare = spare if marked == cells else 0
        columns.append(Column(title, tuple(marked), spare=spare, quantity=key, legend=explanation))
    if any(row.verdict and row.verdict.quantity for row in layer_rows):
        bands = [v.should_be if (v := row.verdict) and v.quantity else "" for row in layer_rows]
        columns.append(text_column("should be", bands, spare=5))
    if any(row.remark for row in layer_rows):
        columns.append(text_column("what", [_remark(row, shown) for row in layer_rows]))
    lines = headlines(measurement)
    of_steps = f" of {steps}" if steps > measurement.step else ""
    title = f"spectral monitor, step {measurement.step}{of_steps}: {lines[0]}"
    state, states = tally(measurement).state, tuple(row.state for row in layer_rows)
    shown_step = "" if finite is measurement else f"the table shows step {finite.step}, the last with finite numbers"
    last_notes = filter(None, (lifted_line(earlier, measurement), shown_step))
    notes = (*lines[1:], *(f"{NOTE}{printable(line)}" for line in root_lines(measurement)), *last_notes)
    foot = tuple(filter(None, (summary_line(measurement),)))
    return Table(title, tuple(columns), foot, state, states, notes)


def _has_numbers(measurement: Measurement) -> bool:
    """Return whether some matrix has a finite number in a column, besides settings of its optimizer."""
    matrices = [i for i, info in enumerate(measurement.layers) if info.is_matrix]
    measured = [key for key in _columns(measurement) if key in QUANTITIES and QUANTITIES[key].needs]
    columns = (measurement.values[key].tolist() for key in measured)
    return not measured or any(math.isfinite(column[i]) for column in columns for i in matrices)


def _with_arrows(cells: list[str], layer_rows: Sequence[Row], key: str) -> list[str]:
    """Return the cells of a quantity, with an arrow where a verdict is on it, and then spaces behind the others."""
    arrows = [_arrow(row.verdict, key) for row in layer_rows]
    marked = [f"{cell}{arrow}" for cell, arrow in zip(cells, arrows, strict=True)]
    return marked if any(arrow.strip() for arrow in arrows) else cells


def _columns(measurement: Measurement) -> dict[str, tuple[str, int, str]]:
    """Return quantity -> title, spare and legend of its column, for the usual quantities that were measured.

    If none was, all that were measured have a column, and the first of them is never left out.
    """
    columns = {key: quantity.column for key, quantity in QUANTITIES.items() if key in measurement.values}
    if not measurement.is_corrected:
        columns.pop("lr_multiplier", None)
    texts = {key: (column.title, column.spare, column.legend) for key, column in columns.items() if column is not None}
    return texts or {key: (key, _FIRST_SPARE + k if k else 0, "") for k, key in enumerate(measurement.values)}


def _arrow(verdict: Verdict | None, key: str) -> str:
    """Return the arrow behind a value: too large, too small, or spaces."""
    if verdict is None or verdict.quantity != key or math.isnan(verdict.ratio):
        return "  "
    return ARROWS[not verdict.ratio > 1]


def _remark(row: Row, shown: Container[str]) -> str:
    """Return the remark on a row, after the value of its verdict if that quantity is not shown."""
    verdict = row.verdict
    if verdict is None or not verdict.quantity or verdict.quantity in shown:
        return row.remark
    return f"{quantity_title(verdict.quantity)} {number(verdict.value)}: {row.remark}"


def _shared(cells: set[str]) -> str:
    """Return the cell that all layers of a row share; empty if they differ."""
    return next(iter(cells)) if len(cells) == 1 else ""


def fans(info: LayerInfo) -> str:
    """Return the inputs and outputs of a layer, rows and outputs of an embedding, and the number of stacked blocks;
    empty for a node.
    """
    if info.role == NODE:
        return ""
    rows = math.prod(info.shape[:-1])
    inputs = f"{rows} tokens" if info.role == "embedding" and len(info.shape) > 1 else str(info.fan_in)
    return f"{inputs} -> {info.fan_out}" + (f" x{info.blocks}" if info.blocks > 1 else "")


def summary_line(measurement: Measurement) -> str:
    """Return the values of the whole network on one line."""
    summary = {key: value for key, value in measurement.summary.items() if math.isfinite(value)}
    parts = []
    if "final_layer_alignment" in summary:
        parts.append(f"output alignment {number(summary['final_layer_alignment'])}")
    if "loss_change_predicted" in summary:
        predicted = number(summary["loss_change_predicted"])
        if "loss_change" in summary:
            parts.append(f"loss change {number(summary['loss_change'])} (predicted {predicted})")
        else:
            parts.append(f"predicted loss change {predicted}")
    if summary.get("feature_error", 0.0) > DOUBTFUL:
        parts.append(f"dh/h from few samples, error up to {100 * summary['feature_error']:.0f} %")
    if skipped := summary.get("skipped_updates"):
        parts.append(f"{skipped:.0f} measured step{'s' * (skipped != 1)} with NaN, inf or no update")
    if measurement.is_corrected:
        parts.append(f"lr x {number_range(measurement.values['lr_multiplier'].tolist())}")
    if "overhead_ms" in summary:
        parts.append(f"took {summary['overhead_ms']:.0f} ms")
    return GAP.join(parts)


def number(value: float) -> str:
    """Return a number with two or three digits, whatever its size; "-" for NaN.

    Example:
        >>> [number(value) for value in (0.0, 0.0123, 0.456, 7.891, 45.67, 123.4, 12345.0, math.nan)]
        ['0', '1.2e-2', '0.46', '7.89', '45.7', '123', '1.2e4', '-']
    """
    if math.isnan(value):
        return NO_VALUE
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
    numbers = [ratio for ratio in ratios if not math.isnan(ratio)] or [math.nan]
    low, high = number(min(numbers)), number(max(numbers))
    return low if low == high else f"{low} .. {high}"
