"""A run as one page of HTML that opens without a network: the answer, pictures, tables."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from spectral_monitor.condition import NETWORK, Verdict
from spectral_monitor.measurement import HEALTHY, NOT_JUDGED, OFF, Measurement
from spectral_monitor.messages import some
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting.content.headline import following, headline, headlines
from spectral_monitor.reporting.content.history import History
from spectral_monitor.reporting.content.panels import PANELS, Panel
from spectral_monitor.reporting.content.tally import is_judged, latest_judged, named_by, tally
from spectral_monitor.reporting.content.typical import VS_TYPICAL, legend, vs_typical
from spectral_monitor.reporting.files.run_facts import RunFacts
from spectral_monitor.reporting.files.runs import settle
from spectral_monitor.reporting.html import parts
from spectral_monitor.reporting.html.curves import MAX_LAYERS_IN_LEGEND, MAX_LINES, curves, depth_colours
from spectral_monitor.reporting.html.figures import Figure, escaped, overview
from spectral_monitor.reporting.html.limit_lines import limit_sentences
from spectral_monitor.reporting.html.page import need_plotly, page
from spectral_monitor.reporting.text.lines import Column
from spectral_monitor.reporting.text.table import ARROWS, measurement_rows, number, summary_line

MAX_UNFOLDED_NAME = 44
"""Characters of a layer's name beyond which it is folded."""
MAX_NAMES = 5
"""Layers that the answer names; the table below it has all."""
_IN_TABLE_OF_VERDICTS = ("should be", "what")
_OVER_MEDIAN = "worst_layer_ratio"
"""Left out: it is over the median of all layers, the page compares each with what is typical of its kind."""


def write_report(
    measurements: Iterable[Measurement],
    path: str | os.PathLike[str],
    notes: Sequence[str] = (),
    limit: Sequence[Measurement] = (),
    about: RunFacts | None = None,
) -> None:
    """Write a page about a run, about 5 MB, most of which is plotly.

    Args:
        measurements: in their order, such as ``monitor.measurements``; where a step comes again the later one counts.
        path: of the file; what is there is replaced.
        notes: sentences for the foot of the page.
        limit: of infinite width, drawn dashed, such as :func:`spectral_monitor.scaling.reference_run` returns.
        about: the loss curve and what else is known of the run.

    Raises:
        ValueError: there are no measurements.
        ImportError: plotly is not installed.
        OSError: the file cannot be written.

    Example:
        With ``pip install "spectral-monitor[plots]"``: ``write_report(probe.measurements, "report.html")``.
    """
    Path(path).write_text(report(measurements, notes, limit, about), encoding="utf-8", errors="replace", newline="\n")


def report(
    measurements: Iterable[Measurement],
    notes: Sequence[str] = (),
    limit: Sequence[Measurement] = (),
    about: RunFacts | None = None,
) -> str:
    """Return the page that :func:`write_report` writes.

    Raises:
        ValueError: there are no measurements.
        ImportError: plotly is not installed.
    """
    run, omitted = settle(measurements)
    if not run:
        raise ValueError("there is nothing to report on: no measurements")
    now = _judged(run)
    told = latest_judged(run) or run[-1]
    about = parts.with_measured_loss(about or RunFacts(), run)
    loss = parts.loss_figure(about)
    figures: dict[str, Figure] = {} if loss is None else {"loss-figure": loss}
    steps: dict[str, Sequence[int]] = {}
    sections = [_verdicts(told if told.roots else now), _run(about, run, now)]
    chapters = ([("off", "What is off")] if sections[0] else []) + [("run", "The run")]
    picture, known = overview(run, now)
    if picture is not None:
        figures["overview-figure"] = picture
        steps |= known
        sections.append(_overview(now))
        chapters.append(("overview", "Every layer"))
    sections.append(_key(now))
    summary = {key: value for measurement in run for key, value in measurement.summary.items()}
    missing = []
    for place, panel in enumerate(PANELS):
        figure, known = curves(panel, run, now, limit)
        if figure is None:
            missing += [] if panel.by_name else [panel.question]
            continue
        figures[f"panel-{place}"] = figure
        steps |= known
        sections.append(_panel(panel, f"panel-{place}", summary, now))
        chapters.append((f"question-{place}", panel.question))
    if missing:
        sections.append(f"<section><p>Not measured: {escaped(' '.join(missing))}</p></section>")
    drawn = max(map(len, steps.values()), default=0)
    thinned = [f"Pictures and curves show {drawn} of them, evenly."] if 0 < drawn < len(run) else []
    keys, table = _layers(now)
    known_keys = [key for panel in PANELS for key in panel.quantities if any(key in m.values for m in run)]
    foot = [*thinned, *omitted, *notes, *limit_sentences(run, limit)]
    sections += [table, parts.glossary(known_keys), _footer(run, foot)]
    chapters += [("layers", "All layers"), ("glossary", "Glossary")]
    slides = parts.by_step(run, now, keys)
    families = any(trace.get("uid", "").startswith("F") for figure in figures.values() for trace in figure["data"])
    top = [_header(told, run, now, parts.contents(chapters)), parts.bar(slides, families)]
    body = "\n".join(filter(None, [*top, *sections]))
    layers = [[escaped(info.name), info.name] for info in now.layers if info.is_matrix]
    title = f"{escaped(headlines(told)[0])} &middot; step {run[-1].step}"
    return page(title, body, figures, steps, {"layers": layers, "table": slides})


def whole_page(history: History) -> str | None:
    """Return the page from what a sink has kept; ``None`` without plotly, or where nothing was measured."""
    try:
        need_plotly("the page")
    except ImportError:
        return None
    measurements = history.every()
    return report(measurements) if measurements else None


def _drawing(name: str, words: str) -> str:
    """Return the place of a figure, with its words for screen readers; it can be scrolled with the keyboard."""
    said = escape(words)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="chart, can be scrolled: {said}">'
        f'<div class="figure" id="{name}" data-words="{said}"></div></div>'
    )


def _judged(measurements: Sequence[Measurement]) -> Measurement:
    """Return the latest of which layers could be judged, for what is NaN says nothing; the latest if none could."""
    judged = (m for m in reversed(measurements) if is_judged(m) and tally(m).judged)
    return next(judged, measurements[-1])


def _header(told: Measurement, measurements: Sequence[Measurement], now: Measurement, links: str) -> str:
    """Return the answer that ``told`` gives, the worst roots and the numbers of the whole network.

    Pictures and tables below are of ``now``; ``links`` lead to the sections.
    """
    last, (answer, *more) = measurements[-1], headlines(told)
    said = [f"<p>{escaped(line)}</p>" for line in more]
    if now is not last:
        what = f"step {now.step}, the last that could be judged: {headline(now)}"
        said.append(f"<p>What follows is of {escaped(what)}.</p>")
    roots = [root for root in (told.roots or now.roots) if root.layer != NETWORK]
    lines = [f"<li>{_names(named_by(root))}: {escaped(root.sentence)}</li>" for root in roots[:MAX_NAMES]]
    if len(roots) > MAX_NAMES:
        lines.append(f"<li>and {len(roots) - MAX_NAMES} more, see below</li>")
    said += [f"<ul>{''.join(lines)}</ul>"] if lines else []
    over = [layer for layer, flag in now.flags.items() if flag == 0]
    if over:
        said.append(f"<p>Off earlier, not any more: {_names(over)}.</p>")
    foot = " ".join(f"<span>{escaped(part)}</span>" for part in summary_line(last).split("   ") if part)
    of = f"Step {last.step}, the last of {len(measurements)} measurements"
    status = {HEALTHY: "healthy", OFF: "off", NOT_JUDGED: "unjudged"}[tally(told).state]
    return (
        f'<header class="{status}"><h1>{escaped(answer[:1].upper() + answer[1:])}</h1>\n{"".join(said)}\n'
        f'<p class="facts soft"><span>{of}</span> {foot}</p>\n{links}</header>'
    )


def _verdicts(told: Measurement) -> str:
    """Return a table with a row for each root verdict, and how many layers follow from it."""
    if not told.roots:
        return ""
    titles = ("layer", "quantity", "value", "should be", "for", "cause", "what it likely is, and what to do")
    rows = "".join(f"<tr{_of_layer(root.layer)}>{_verdict(root, told)}</tr>" for root in told.roots)
    head = "".join(f"<th>{title}</th>" for title in titles)
    return (
        f'<section id="off"><h2>What is off at step {told.step}</h2>\n'
        '<div class="wide long" tabindex="0" role="region" aria-label="table of what is off"><table class="cards">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _verdict(root: Verdict, told: Measurement) -> str:
    arrow = "" if math.isnan(root.ratio) else "&nbsp;&uarr;" if root.ratio > 1 else "&nbsp;&darr;"
    seen = f"{number(root.value)}{arrow}" if root.quantity else ""
    more = following(root, told)
    return (
        f"<td>{_names(named_by(root)) or 'the whole network'}</td>"
        f'<td data-title="quantity" title="{_meaning(root.quantity)}">{escaped(root.quantity)}</td>'
        f'<td class="bad" data-title="value">{seen}</td>'
        f'<td data-title="should be">{escaped(root.should_be) if root.quantity else ""}</td>'
        f'<td data-title="for">{root.steps} steps, {root.measurements} measurements</td>'
        f'<td data-title="cause">{escaped(root.cause.replace("_", " "))}</td>'
        f'<td class="say" data-title="what to do">{escaped(root.sentence)}'
        + (f'<br><span class="soft">{escaped(more)}</span></td>' if more else "</td>")
    )


def _of_layer(name: str) -> str:
    return "" if name == NETWORK else f' data-layer="{escape(escaped(name))}"'


def _run(about: RunFacts, measurements: Sequence[Measurement], now: Measurement) -> str:
    """Return the section on the run: facts, and the place of its loss curve, or how to get one."""
    words = parts.loss_words(about)
    drawn = _drawing("loss-figure", words) if words else f'<p class="soft">{escaped(parts.LOSS_HINT)}</p>'
    return f'<section id="run"><h2>The run</h2>{parts.facts(about, measurements, now)}{drawn}</section>'


def _overview(now: Measurement) -> str:
    words = (
        f"every layer at step {now.step} against its band, and pictures of layer by step: {headline(now)}; "
        "the table of all layers below has the numbers"
    )
    return (
        '<section id="overview"><h2>Every layer, from the first measurement to the last</h2>\n'
        '<p class="soft">A row for each layer, the first of the network at the top. Left: where it is now; the bar is '
        "where it should be. Heatmaps: red means update too large, or outputs moving uphill; blue means too small, or "
        "downhill; grey means not measured or not judged. Point at a row to see its layer in every chart.</p>\n"
        + _drawing("overview-figure", words)
        + "</section>"
    )


def _key(now: Measurement) -> str:
    colours = ", ".join(depth_colours(5))
    count = sum(info.is_matrix for info in now.layers)
    drawn = (
        f" Of {count} layers {MAX_LINES} are drawn, evenly, with the output layer and those that are off."
        if count > MAX_LINES
        else ""
    )
    curves = (
        '<p class="soft">Below, a curve for each layer: <span class="key" style="background: linear-gradient(to right, '
        f'{colours})"></span> from the first to the last, '
        if count <= MAX_LAYERS_IN_LEGEND
        else '<p class="soft">Below, an area for each family of layers, from its lowest to its highest value, with its '
        "median as a line, and a curve for each layer of no family. Point at an area, or at a layer in the table, to "
        "see that layer; search to see only some. "
    )
    return (
        f'{curves}<span class="bad">Red</span> is off now; <span class="key" style="background: var(--band)"></span> '
        "where layers should be; dashed: a one-sided limit, or a limit specific to one layer."
        f"{drawn}</p>"
    )


def _panel(panel: Panel, name: str, summary: Mapping[str, float], now: Measurement) -> str:
    keys = [key for key in panel.summaries if key != _OVER_MEDIAN]
    known = [(key, summary[key]) for key in keys if math.isfinite(summary.get(key, math.nan))]
    words = _furthest(now) if _OVER_MEDIAN in panel.summaries else []
    words += [f"{key.replace('_', ' ')} {int(x) if x.is_integer() else number(x)}" for key, x in known]
    facts = " ".join(f"<span>{escaped(text)}</span>" for text in words)
    return (
        f'<section id="question-{name.removeprefix("panel-")}"><h2>{escaped(panel.question)}</h2>\n'
        f'<p class="soft">{escaped(panel.reading)}</p>\n'
        + (f'<p class="facts">{facts}</p>\n' if facts else "")
        + _drawing(name, f"{panel.question} {panel.reading}")
        + "</section>"
    )


def _furthest(now: Measurement) -> list[str]:
    """Return the layer that is furthest from typical, with the number that the table has; nothing if none is known."""
    ratios = zip(vs_typical(now), now.layers, strict=True)
    matrices = [(ratio, info.name) for ratio, info in ratios if info.is_matrix and 0 < ratio < math.inf]
    if not matrices:
        return []
    ratio, name = max(matrices, key=lambda found: abs(math.log(found[0])))
    return [f"furthest from typical: {name}, {number(ratio)} {VS_TYPICAL}"]


def _layers(now: Measurement) -> tuple[list[str], str]:
    """Return the quantities that have a column, and a table with a row for every layer, nothing folded."""
    table = measurement_rows(now, folded=False)
    columns = [column for column in table.columns if column.title not in _IN_TABLE_OF_VERDICTS and not column.drawn]
    states = ["" if state == HEALTHY else state for state in table.states]
    whats = next((column.cells for column in table.columns if column.title == "what"), states)
    states = [what if state == NOT_JUDGED else state for state, what in zip(states, whats, strict=True)]
    if any(states) and tally(now).judged:
        columns.insert(1, Column("state", tuple(states), text=True))
    head, rows, names = "", [""] * len(columns[0].cells), columns[0].cells
    for place, column in enumerate(columns):
        side = "" if column.text else ' class="number"'
        meaning = f' title="{_meaning(column.quantity)}"' if column.quantity else ""
        head += f'<th{side}{meaning}><button type="button">{escaped(column.title)}</button></th>'
        of = VS_TYPICAL if column.title == VS_TYPICAL else column.quantity
        data = f' data-title="{escape(column.title)}" data-quantity="{of}"' if place else ""
        for row, cell in enumerate(column.cells):
            bad = table.states[row] == OFF and (place == 0 or cell.endswith(ARROWS))
            shown = _name(cell) if place == 0 else escaped(cell)
            rows[row] += f"<td{side}{data}>{f'<span class=bad>{shown}</span>' if bad else shown}</td>"
    body = "".join(f"<tr{_of_layer(name)}>{row}</tr>" for name, row in zip(names, rows, strict=True))
    known = legend(now)
    return [column.quantity for column in columns if column.quantity], (
        f'<section id="layers"><h2>All layers at step {now.step}</h2>\n'
        + (f'<p class="soft">{escaped(known)}</p>\n' if known else "")
        + '<div class="wide long" tabindex="0" role="region" aria-label="table of all layers"><table class="cards">'
        + f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _footer(measurements: Sequence[Measurement], notes: Sequence[str]) -> str:
    from spectral_monitor import __version__

    first, last = measurements[0], measurements[-1]
    said = [f"spectral_monitor {__version__}", f"{len(measurements)} measurements, steps {first.step} to {last.step}"]
    return f"<footer><p>{' &middot; '.join(said)}</p>{''.join(f'<p>{escaped(note)}</p>' for note in notes)}</footer>"


def _name(layer: str) -> str:
    return f'<span class="name{" folded" if len(layer) > MAX_UNFOLDED_NAME else ""}">{escaped(layer)}</span>'


def _names(layers: Sequence[str]) -> str:
    return some([_name(layer) for layer in layers], MAX_NAMES)


def _meaning(quantity: str) -> str:
    known = QUANTITIES.get(quantity)
    return "" if known is None else escaped(f"{quantity}: {known.notation}; {known.meaning}").replace('"', "&quot;")
