"""A sweep as a table of text: the answer first, then a row for each layer and quantity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from spectral_monitor.fitting.power_law import CONFIDENCE
from spectral_monitor.reporting.text.lines import Column, Table, printable, text_column
from spectral_monitor.reporting.text.table import number
from spectral_monitor.scaling.sweeps.limit import limit_sentences
from spectral_monitor.scaling.sweeps.slope import TOLERANCE, Slope, exponent

if TYPE_CHECKING:
    from spectral_monitor.scaling.sweeps.result import SweepResult

MAX_OFFENDERS = 2
"""Offenders in the first line."""
MAX_EXCLUDED = 20
"""Excluded points listed below the table."""
ONE_SAMPLE = (
    "predictions against depth are for one sample; in a batch of unlike samples the first layers of a chain have other "
    "slopes, because no layer has mixed the samples yet"
)
OFFENDERS = ("not as predicted", "grows", "vanishes")
_OTHER_VERDICTS = ("unclear", "no slope", "as predicted", "flat")


def sweep_table(result: SweepResult) -> Table:
    """Return a row for each slope: offenders first, the farthest off at the top."""
    off = result.off
    rows = sorted(result.slopes, key=lambda slope: _sort_key(slope, off))
    return Table(sweep_headline(result), tuple(_columns(result, rows)) if rows else (), tuple(_foot(result)))


def _sort_key(slope: Slope, off: Sequence[Slope]) -> tuple[int, float]:
    """Return the key by which rows are sorted; slopes of one verdict that are no offenders keep the network's order."""
    if slope.verdict in OFFENDERS:
        return slope not in off, -slope.distance
    return 2 + _OTHER_VERDICTS.index(slope.verdict), 0.0


def _columns(result: SweepResult, rows: Sequence[Slope]) -> list[Column]:
    columns = [
        text_column("layer", [row.layer for row in rows]),
        text_column("quantity", [row.quantity for row in rows]),
    ]
    other_sizes = [row.beside for row in rows]
    if len(set(other_sizes)) > 1:
        title = "depth" if rows[0].axis == "width" else "width"
        columns.append(Column(title, tuple("" if size is None else str(size) for size in other_sizes)))
    for i, size in enumerate(rows[0].sizes):
        title = f"{rows[0].axis} {size}" if i == 0 else str(size)
        columns.append(Column(title, tuple(number(row.values[i]) for row in rows), spare=1))
    if result.limits:
        limits = [result.limits[row.layer, row.quantity] for row in rows]
        columns.append(Column("infinite", tuple(number(limit.value) for limit in limits)))
        columns.append(Column("distance slope", tuple(_signed(limit.fit.slope) for limit in limits), spare=1))
    columns.append(Column("slope", tuple(_signed(row.fit.slope) for row in rows)))
    interval = ["-" if row.fit.reason else f"{_signed(row.fit.low)} .. {_signed(row.fit.high)}" for row in rows]
    columns.append(Column(f"{CONFIDENCE:.0%} interval", tuple(interval)))
    if any(not math.isnan(row.predicted) for row in rows):
        columns.append(Column("predicted", tuple(_signed(row.predicted) for row in rows)))
    any_over_seeds = any(row.fit.how == "seeds" for row in rows)
    columns.append(text_column("verdict", [_verdict_cell(row, any_over_seeds) for row in rows]))
    return columns


def _signed(value: float) -> str:
    return "-" if math.isnan(value) else f"{round(value, 2) + 0.0:+.2f}"


def _verdict_cell(slope: Slope, any_over_seeds: bool) -> str:
    parts = [slope.sentence]
    if slope.fit.how == "residuals" and any_over_seeds:
        parts.append("of one seed, interval from its residuals")
    if slope.note:
        parts.append(slope.note)
    if len(slope.excluded) > 2:
        parts.append(f"without {len(slope.excluded)} values, such as {slope.excluded[0]}")
    elif slope.excluded:
        parts.append(f"without {', '.join(slope.excluded)}")
    return "; ".join(parts)


def sweep_headline(result: SweepResult) -> str:
    """Return the sizes, seeds and step of a sweep and its answer, in one line."""
    sizes = sorted({key.width if result.axis == "width" else key.depth or 0 for key in result.keys})
    seeds = len({key.seed for key in result.keys})
    other_sizes = sorted({row.beside for row in result.slopes if row.beside is not None})
    other = "depth" if result.axis == "width" else "width"
    parts = [f"{result.axis} {sizes[0]} .. {sizes[-1]}"]
    if other_sizes:
        parts.append(f"{other} {', '.join(map(str, other_sizes))}")
    parts += [f"{seeds} seed{'s' if seeds > 1 else ''}", f"step {result.step}"]
    return f"sweep over {', '.join(parts)}: {_answer(result)}"


def _answer(result: SweepResult) -> str:
    if not result.slopes:
        return "no slope, because all points are left out"
    predicted = [slope for slope in result.slopes if not math.isnan(slope.predicted)]
    judged, off = predicted or list(result.slopes), result.off
    parametrization, healthy = result.recipe.parametrization, "as predicted" if predicted else "flat"
    method = "" if parametrization is None else f" ({parametrization.name}, {result.recipe.family})"
    parts = [f"{sum(slope.verdict == healthy for slope in judged)} of {len(judged)} {healthy}{method}"]
    for verdict, words in (("unclear", "unclear"), ("no slope", "without a slope")):
        count = sum(slope.verdict == verdict for slope in judged)
        parts += [f"{count} {words}"] if count else []
    moving = sum(math.isnan(slope.predicted) and slope.verdict in ("grows", "vanishes") for slope in result.slopes)
    if predicted and moving:
        parts.append(f"{moving} others grow or vanish with {result.axis}")
    if off:
        names = ", ".join(f"{slope.layer} {slope.quantity} {_behaviour(slope)}" for slope in off[:MAX_OFFENDERS])
        parts.append(f"{len(off)} off: {names}{', ...' if len(off) > MAX_OFFENDERS else ''}")
    elif len(parts) > 1:
        parts.append("none off")
    return ", ".join(parts)


def _behaviour(row: Slope) -> str:
    if math.isnan(row.predicted):
        return row.behaviour
    expected = "flat" if abs(row.predicted) < 0.005 else f"{row.axis}^{exponent(row.predicted)}"
    return f"{row.behaviour} (predicted: {expected})"


def _foot(result: SweepResult) -> list[str]:
    lines = []
    if result.slopes:
        lines.append(
            f"slope: s in value ~ {result.axis}^s; there is a verdict where the whole interval lies within {TOLERANCE} "
            "of what is expected, or outside"
        )
    if result.axis == "depth" and any(not math.isnan(slope.predicted) for slope in result.slopes):
        lines.append(ONE_SAMPLE)
    lines += [printable(sentence) for sentence in limit_sentences(result)]
    if {slope.fit.how for slope in result.slopes} - {""} == {"residuals"}:
        lines.append(
            "one seed: intervals come from the residuals of its lines and do not include the spread between seeds"
        )
    if result.excluded:
        shown = list(result.excluded[:MAX_EXCLUDED])
        if len(result.excluded) > MAX_EXCLUDED:
            shown.append(f"... ({len(result.excluded)} in all)")
        lines += ["left out:", *(printable(f"  {text}") for text in shown)]
    return lines
