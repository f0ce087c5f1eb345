"""A run as one page of HTML that opens without a network: the answer, pictures, tables."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from spectral_monitor.condition import Verdict
from spectral_monitor.measurement import Measurement
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting.panels import MATRICES, PANELS, Panel
from spectral_monitor.reporting.report_curves import LINES, curves, depth_colours
from spectral_monitor.reporting.report_figures import Figure, escaped, overview
from spectral_monitor.reporting.report_page import page
from spectral_monitor.reporting.runs import settled
from spectral_monitor.reporting.table import ARROWS, is_judged, measurement_rows, number, unjudged

FOLDED = 44
"""Characters of a layer's name beyond which it is folded."""
NAMED = 5
"""Layers that the answer names; the table below it has all."""
_IN_TABLE_OF_VERDICTS = ("should be", "what")


def write_report(measurements: Iterable[Measurement], path: str | os.PathLike[str], notes: Sequence[str] = ()) -> None:
    """Write a page about a run, about 5 MB, most of which is plotly.

    Args:
        measurements: in their order, such as ``monitor.measurements``; where a step comes again the later one counts.
        path: of the file; what is there is replaced.
        notes: sentences for the foot of the page.

    Raises:
        ValueError: there are no measurements.
        ImportError: plotly is not installed.
        OSError: the file cannot be written.

    Example:
        With ``pip install "spectral-monitor[plots]"``: ``write_report(probe.measurements, "report.html")``.
    """
    Path(path).write_text(report(measurements, notes), encoding="utf-8", errors="replace", newline="\n")


def report(measurements: Iterable[Measurement], notes: Sequence[str] = ()) -> str:
    """The page that :func:`write_report` writes.

    Raises:
        ValueError: there are no measurements.
        ImportError: plotly is not installed.
    """
    run = settled(measurements)
    if not run.measurements:
        raise ValueError("there is nothing to report on: no measurements")
    now = _judged(run.measurements)
    answer, status = _answer(next(filter(is_judged, reversed(run.measurements)), run.measurements[-1]))
    figures: dict[str, Figure] = {}
    steps: dict[str, Sequence[int]] = {}
    sections = [_header(answer, status, run.measurements, now), _verdicts(now)]
    picture, known = overview(run.measurements, now)
    if picture is not None:
        figures["overview-figure"], steps = picture, {**steps, **known}
        sections.append(_overview())
    sections.append(_key(now))
    summary = {key: value for measurement in run.measurements for key, value in measurement.summary.items()}
    missing = []
    for place, panel in enumerate(PANELS):
        figure, known = curves(panel, run.measurements, now)
        if figure is None:
            missing.append(panel.question)
            continue
        figures[f"panel-{place}"], steps = figure, {**steps, **known}
        sections.append(_panel(panel, f"panel-{place}", summary))
    if missing:
        sections.append(f"<section><p>Not measured: {escaped(' '.join(missing))}</p></section>")
    drawn = max(map(len, steps.values()), default=0)
    thinned = [f"Pictures and curves show {drawn} of them, evenly."] if 0 < drawn < len(run.measurements) else []
    sections += [_layers(now), _footer(run.measurements, [*thinned, *run.notes, *notes])]
    body = "\n".join(filter(None, sections))
    return page(f"{escaped(answer)} &middot; step {run.measurements[-1].step}", body, figures, steps)


def _judged(measurements: Sequence[Measurement]) -> Measurement:
    """The latest of which layers could be judged, for what is NaN says nothing; the latest if none could."""
    judged = (m for m in reversed(measurements) if is_judged(m) and measurement_rows(m).outside is not None)
    return next(judged, measurements[-1])


def _answer(last: Measurement) -> tuple[str, str]:
    """One sentence, and what it means: ``outside``, ``inside`` or nothing of either."""
    table = measurement_rows(last)
    count = len(table.columns[0].cells)
    if table.outside is None and "violations" in last.summary:
        return f"At step {last.step} no layer could be judged: {unjudged(last)}", "unjudged"
    if table.outside is None:
        return f"{count} layers were measured and none was judged", "unjudged"
    if table.outside:
        are = "is" if table.outside == 1 else "are"
        return f"{table.outside} of {count} layers {are} outside the spectral condition", "outside"
    return f"All {count} layers are inside the spectral condition", "inside"


def _header(answer: str, status: str, measurements: Sequence[Measurement], now: Measurement) -> str:
    last = measurements[-1]
    said = []
    if now is not last:
        title = measurement_rows(now).title
        said.append(f"<p>What follows is of step {now.step}, the last that could be judged: {escaped(title)}.</p>")
    lines = [f"<li>{_name(verdict.layer)}: {escaped(verdict.sentence)}</li>" for verdict in now.verdicts[:NAMED]]
    if len(now.verdicts) > NAMED:
        lines.append(f"<li>and {len(now.verdicts) - NAMED} more, see below</li>")
    said += [f"<ul>{''.join(lines)}</ul>"] if lines else []
    over = [layer for layer, flag in now.flags.items() if flag == 0]
    if over:
        more = f" and {len(over) - NAMED} more" if len(over) > NAMED else ""
        said.append(f"<p>Outside earlier, not any more: {', '.join(map(_name, over[:NAMED]))}{more}.</p>")
    foot = " ".join(
        f"<span>{escaped(part)}</span>" for line in measurement_rows(last).foot for part in line.split("   ") if part
    )
    of = f"Step {last.step}, the last of {len(measurements)} measurements"
    return (
        f'<header class="{status}"><h1>{escaped(answer)}</h1>\n{"".join(said)}\n'
        f'<p class="facts soft"><span>{of}</span> {foot}</p></header>'
    )


def _verdicts(now: Measurement) -> str:
    if not now.verdicts:
        return ""
    titles = ("layer", "quantity", "value", "should be", "for", "cause", "what it likely is, and what to do")
    rows = "".join(f"<tr>{_verdict(verdict)}</tr>" for verdict in now.verdicts)
    head = "".join(f"<th>{title}</th>" for title in titles)
    return (
        f'<section id="outside"><h2>Outside the condition at step {now.step}</h2>\n<div class="wide long"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _verdict(verdict: Verdict) -> str:
    arrow = "&uarr;" if verdict.ratio > 1 else "&darr;"
    return (
        f"<td>{_name(verdict.layer)}</td>"
        f'<td title="{_meaning(verdict.quantity)}">{escaped(verdict.quantity)}</td>'
        f'<td class="bad">{number(verdict.value)}&nbsp;{arrow}</td><td>{escaped(verdict.should_be)}</td>'
        f"<td>{verdict.steps} steps, {verdict.measurements} measurements</td>"
        f'<td>{escaped(verdict.cause.replace("_", " "))}</td><td class="say">{escaped(verdict.sentence)}</td>'
    )


def _overview() -> str:
    return (
        '<section id="overview"><h2>Every layer, from the first measurement to the last</h2>\n'
        '<p class="soft">A row for each layer, the first of the network at the top. Left: where it is now; the bar is '
        "where it should be. In the pictures red is an update that is too large, or a step uphill, and blue one that "
        "is too small, or downhill; grey was not measured, or is held against nothing.</p>\n"
        '<div class="wide"><div class="figure" id="overview-figure"></div></div></section>'
    )


def _key(now: Measurement) -> str:
    colours = ", ".join(depth_colours(5))
    count = sum(info.role in MATRICES for info in now.layers)
    some = (
        f" Of {count} layers {LINES} are drawn, evenly, with the readout and those that are outside."
        if count > LINES
        else ""
    )
    return (
        '<p class="soft">Below, a curve for each layer: <span class="key" style="background: linear-gradient(to right, '
        f'{colours})"></span> from the first to the last, <span class="bad">red</span> what is outside now; '
        '<span class="key" style="background: var(--band)"></span> where they should be, dashed where only a limit is '
        f"known or a layer has its own.{some}</p>"
    )


def _panel(panel: Panel, name: str, summary: Mapping[str, float]) -> str:
    known = [(key, summary[key]) for key in panel.summaries if math.isfinite(summary.get(key, math.nan))]
    words = [f"{key.replace('_', ' ')} {int(x) if x.is_integer() else number(x)}" for key, x in known]
    facts = " ".join(f"<span>{escaped(text)}</span>" for text in words)
    return (
        f'<section><h2>{escaped(panel.question)}</h2>\n<p class="soft">{escaped(panel.reading)}</p>\n'
        + (f'<p class="facts">{facts}</p>\n' if facts else "")
        + f'<div class="wide"><div class="figure" id="{name}"></div></div></section>'
    )


def _layers(now: Measurement) -> str:
    table = measurement_rows(now)
    columns = [column for column in table.columns if column.title not in _IN_TABLE_OF_VERDICTS]
    head, rows = "", [""] * len(columns[0].cells)
    for place, column in enumerate(columns):
        side = "" if column.text else ' class="number"'
        meaning = f' title="{_meaning(column.quantity)}"' if column.quantity else ""
        head += f"<th{side}{meaning}>{escaped(column.title)}</th>"
        for row, cell in enumerate(column.cells):
            bad = row < (table.outside or 0) and (place == 0 or cell.endswith(ARROWS))
            shown = _name(cell) if place == 0 else escaped(cell)
            rows[row] += f"<td{side}>{f'<span class=bad>{shown}</span>' if bad else shown}</td>"
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<section id="layers"><h2>All layers at step {now.step}</h2>\n<div class="wide long"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _footer(measurements: Sequence[Measurement], notes: Sequence[str]) -> str:
    from spectral_monitor import __version__

    first, last = measurements[0], measurements[-1]
    said = [f"spectral_monitor {__version__}", f"{len(measurements)} measurements, steps {first.step} to {last.step}"]
    return f"<footer><p>{' &middot; '.join(said)}</p>{''.join(f'<p>{escaped(note)}</p>' for note in notes)}</footer>"


def _name(layer: str) -> str:
    return f'<span class="name{" folded" if len(layer) > FOLDED else ""}">{escaped(layer)}</span>'


def _meaning(quantity: str) -> str:
    known = QUANTITIES.get(quantity)
    return "" if known is None else escaped(f"{quantity}: {known.formula}; {known.meaning}").replace('"', "&quot;")
