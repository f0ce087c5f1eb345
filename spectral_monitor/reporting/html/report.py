"""A run as one page of HTML that opens without a network: the answer, pictures, tables."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from spectral_monitor.condition import NETWORK, Verdict
from spectral_monitor.condition.verdict import duration
from spectral_monitor.measurement import HEALTHY, NOT_JUDGED, OFF, Measurement
from spectral_monitor.messages import joined
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting.content.families import folded_names
from spectral_monitor.reporting.content.headline import each_of, following, headline, headlines
from spectral_monitor.reporting.content.history import History
from spectral_monitor.reporting.content.labels import quantity_title
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
from spectral_monitor.reporting.text.lines import GAP, Column
from spectral_monitor.reporting.text.table import ARROWS, measurement_rows, number, summary_line

MAX_UNFOLDED_NAME = 44
"""Characters of a layer's name that are not folded."""
MAX_NAMES = 5
"""The most layers that the answer names; the table below it has all."""
_IN_TABLE_OF_VERDICTS = ("should be", "what")
"""Columns that the table of all layers lacks, because the table of verdicts has them."""
_OVER_MEDIAN = "worst_layer_ratio"
"""Left out: it compares with the median of all layers, the page with what is typical of each kind."""


def write_report(
    measurements: Iterable[Measurement],
    path: str | os.PathLike[str],
    notes: Sequence[str] = (),
    limit: Sequence[Measurement] = (),
    about: RunFacts | None = None,
) -> None:
    """Write a page about a run, about 5 MB, most of which is plotly.

    Args:
        measurements: in their order, such as ``monitor.measurements``; if a step is repeated, the later one counts.
        path: of the file; an existing file is replaced.
        notes: sentences for the foot of the page.
        limit: measurements of infinite width, such as :func:`spectral_monitor.scaling.reference_run` returns; they are
            drawn dashed.
        about: the loss curve and other facts about the run.

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
    """Return the page that :func:`write_report` writes; it raises the same errors."""
    run, omissions = settle(measurements)
    if not run:
        raise ValueError("there is nothing to report on: no measurements")
    current = _judged(run)
    reported = latest_judged(run) or run[-1]
    about = parts.with_measured_loss(about or RunFacts(), run)
    loss = parts.loss_figure(about)
    figures: dict[str, Figure] = {} if loss is None else {"loss-figure": loss}
    steps: dict[str, Sequence[int]] = {}
    sections = [_verdicts(reported if reported.roots else current), _run(about, run, current)]
    chapters = ([("off", "What is off")] if sections[0] else []) + [("run", "The run")]
    picture, picture_steps = overview(run, current)
    if picture is not None:
        figures["overview-figure"] = picture
        steps |= picture_steps
        sections.append(_overview(current))
        chapters.append(("overview", "Every layer"))
    sections.append(_key(current))
    summary = {key: value for measurement in run for key, value in measurement.summary.items()}
    missing = []
    for index, panel in enumerate(PANELS):
        figure, panel_steps = curves(panel, run, current, limit)
        if figure is None:
            missing += [] if panel.by_name else [panel.question]
            continue
        figures[f"panel-{index}"] = figure
        steps |= panel_steps
        sections.append(_panel(panel, index, summary, current))
        chapters.append((f"question-{index}", panel.question))
    if missing:
        sections.append(f"<section><p>Not measured: {escaped(' '.join(missing))}</p></section>")
    drawn = max(map(len, steps.values()), default=0)
    thinned = [f"Heatmaps and curves show {drawn} of them, evenly spaced."] if 0 < drawn < len(run) else []
    keys, table = _layers(current)
    measured = [key for panel in PANELS for key in panel.quantities if any(key in m.values for m in run)]
    foot = [*thinned, *omissions, *notes, *limit_sentences(run, limit)]
    sections += [table, parts.glossary(measured), _footer(run, foot)]
    chapters += [("layers", "All layers"), ("glossary", "Glossary")]
    slides = parts.by_step(run, current, keys)
    families = any(trace.get("uid", "").startswith("F") for figure in figures.values() for trace in figure["data"])
    top = [_header(reported, run, current, parts.contents(chapters)), parts.bar(slides, families)]
    body = "\n".join(filter(None, [*top, *sections]))
    layers = [[escaped(info.name), info.name] for info in current.layers if info.is_matrix]
    title = f"{escaped(headlines(reported)[0])} &middot; step {run[-1].step}"
    return page(title, body, figures, steps, {"layers": layers, "table": slides})


def whole_page(history: History) -> str | None:
    """Return the page of a sink's history; ``None`` without plotly or measurements."""
    try:
        need_plotly("the page")
    except ImportError:
        return None
    measurements = history.union()
    return report(measurements) if measurements else None


def _drawing(name: str, words: str) -> str:
    """Return the element of a figure, with words for screen readers; the keyboard can scroll it."""
    words = escape(words)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="chart, can be scrolled: {words}">'
        f'<div class="figure" id="{name}" data-words="{words}"></div></div>'
    )


def _judged(measurements: Sequence[Measurement]) -> Measurement:
    """Return the latest measurement at which any layer was judged; the latest of all if there is none."""
    judged = (m for m in reversed(measurements) if is_judged(m) and tally(m).judged)
    return next(judged, measurements[-1])


def _header(reported: Measurement, measurements: Sequence[Measurement], current: Measurement, links: str) -> str:
    """Return the answer from ``reported``, its worst roots and the values of the whole network.

    Pictures and tables below are of ``current``; ``links`` lead to the sections.
    """
    latest, (answer, *lines) = measurements[-1], headlines(reported)
    paragraphs = [f"<p>{escaped(line)}</p>" for line in lines]
    if current is not latest:
        source = f"step {current.step}, the last that could be judged: {headline(current)}"
        paragraphs.append(f"<p>The rest of the page shows {escaped(source)}.</p>")
    roots = [root for root in (reported.roots or current.roots) if root.layer != NETWORK]
    items = [
        f"<li>{each_of(named_by(root))}{_names(named_by(root))}: {escaped(root.sentence)}</li>"
        for root in roots[:MAX_NAMES]
    ]
    if len(roots) > MAX_NAMES:
        items.append(f"<li>and {len(roots) - MAX_NAMES} more, see below</li>")
    paragraphs += [f"<ul>{''.join(items)}</ul>"] if items else []
    recovered = [layer for layer, flag in current.flags.items() if flag == 0]
    if recovered:
        paragraphs.append(f"<p>Off earlier, now recovered: {_names(recovered)}.</p>")
    foot = " ".join(f"<span>{escaped(part)}</span>" for part in summary_line(latest).split(GAP) if part)
    status = {HEALTHY: "healthy", OFF: "off", NOT_JUDGED: "unjudged"}[tally(reported).state]
    return (
        f'<header class="{status}"><h1>{escaped(answer[:1].upper() + answer[1:])}</h1>\n{"".join(paragraphs)}\n'
        f'<p class="facts soft"><span>Step {latest.step}, the last of {len(measurements)} measurements</span> '
        f"{foot}</p>\n{links}</header>"
    )


def _verdicts(reported: Measurement) -> str:
    """Return a table with a row for each root verdict, and how many layers follow from it."""
    if not reported.roots:
        return ""
    titles = ("layer", "quantity", "value", "should be", "for", "cause", "likely cause, and what to do")
    rows = "".join(f"<tr{_of_layer(root.layer)}>{_verdict(root, reported)}</tr>" for root in reported.roots)
    head = "".join(f"<th>{title}</th>" for title in titles)
    return (
        f'<section id="off"><h2>What is off at step {reported.step}</h2>\n'
        '<div class="wide long" tabindex="0" role="region" aria-label="table of what is off"><table class="cards">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _verdict(root: Verdict, reported: Measurement) -> str:
    arrow = "" if math.isnan(root.ratio) else "&nbsp;&uarr;" if root.ratio > 1 else "&nbsp;&darr;"
    value = f"{number(root.value)}{arrow}" if root.quantity else ""
    measurements = f"{root.measurements} measurement{'s' * (root.measurements != 1)}"
    follow = following(root, reported)
    return (
        f"<td>{_names(named_by(root)) or 'the whole network'}</td>"
        f'<td data-title="quantity" title="{_meaning(root.quantity)}">{escaped(quantity_title(root.quantity))}</td>'
        f'<td class="bad" data-title="value">{value}</td>'
        f'<td data-title="should be">{escaped(root.should_be) if root.quantity else ""}</td>'
        f'<td data-title="for">{duration(root.steps)}, {measurements}</td>'
        f'<td data-title="cause">{escaped(root.cause.replace("_", " "))}</td>'
        f'<td class="say" data-title="what to do">{escaped(root.sentence)}'
        + (f'<br><span class="soft">{escaped(follow)}</span></td>' if follow else "</td>")
    )


def _of_layer(name: str) -> str:
    return "" if name == NETWORK else f' data-layer="{escape(escaped(name))}"'


def _run(about: RunFacts, measurements: Sequence[Measurement], current: Measurement) -> str:
    """Return the section about the run: facts and its loss curve, or how to get one."""
    words = parts.loss_words(about)
    curve = _drawing("loss-figure", words) if words else f'<p class="soft">{escaped(parts.LOSS_HINT)}</p>'
    return f'<section id="run"><h2>The run</h2>{parts.facts(about, measurements, current)}{curve}</section>'


def _overview(current: Measurement) -> str:
    words = (
        f"every layer at step {current.step} against its band, and heatmaps of layers over steps: {headline(current)}; "
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


def _key(current: Measurement) -> str:
    colours = ", ".join(depth_colours(5))
    count = sum(info.is_matrix for info in current.layers)
    sample = f" {MAX_LINES} of {count} layers are drawn, evenly spaced, plus the output layer and those that are off."
    explanation = (
        '<p class="soft">Below, a curve for each layer: <span class="key" style="background: linear-gradient(to right, '
        f'{colours})"></span> from the first to the last, '
        if count <= MAX_LAYERS_IN_LEGEND
        else (
            '<p class="soft">Below, an area for each family of layers, from its lowest to its highest value, with its '
            "median as a line, and a curve for each layer without a family. Point at an area, or at a layer in the "
            "table, to see that layer; search to see only some. "
        )
    )
    return (
        f'{explanation}<span class="bad">Red</span> is off now; <span class="key" style="background: var(--band)">'
        "</span> where layers should be; dashed: a one-sided limit, or a limit specific to one layer."
        f"{sample if count > MAX_LINES else ''}</p>"
    )


def _panel(panel: Panel, index: int, summary: Mapping[str, float], current: Measurement) -> str:
    texts = _furthest(current) if _OVER_MEDIAN in panel.summaries else []
    for key in panel.summaries:
        value = summary.get(key, math.nan)
        if key != _OVER_MEDIAN and math.isfinite(value):
            texts.append(f"{key.replace('_', ' ')} {int(value) if value.is_integer() else number(value)}")
    facts = " ".join(f"<span>{escaped(text)}</span>" for text in texts)
    return (
        f'<section id="question-{index}"><h2>{escaped(panel.question)}</h2>\n'
        f'<p class="soft">{escaped(panel.reading)}</p>\n'
        + (f'<p class="facts">{facts}</p>\n' if facts else "")
        + _drawing(f"panel-{index}", f"{panel.question} {panel.reading}")
        + "</section>"
    )


def _furthest(current: Measurement) -> list[str]:
    """Return a text on the layer furthest from typical, with its number in the table; none without such a layer."""
    ratios = zip(vs_typical(current), current.layers, strict=True)
    matrices = [(ratio, info.name) for ratio, info in ratios if info.is_matrix and 0 < ratio < math.inf]
    if not matrices:
        return []
    ratio, name = max(matrices, key=lambda pair: abs(math.log(pair[0])))
    return [f"furthest from typical: {name}, {number(ratio)} {VS_TYPICAL}"]


def _layers(current: Measurement) -> tuple[list[str], str]:
    """Return the quantities that have a column, and a table with a row for every layer, nothing folded."""
    table = measurement_rows(current, folded=False)
    columns = [column for column in table.columns if column.title not in _IN_TABLE_OF_VERDICTS and not column.drawn]
    states = ["" if state == HEALTHY else state for state in table.states]
    reasons = next((column.cells for column in table.columns if column.title == "what"), states)
    states = [reason if state == NOT_JUDGED else state for state, reason in zip(states, reasons, strict=True)]
    if any(states) and tally(current).judged:
        columns.insert(1, Column("state", tuple(states), text=True))
    head, rows, names = "", [""] * len(columns[0].cells), columns[0].cells
    for index, column in enumerate(columns):
        side = "" if column.text else ' class="number"'
        meaning = f' title="{_meaning(column.quantity)}"' if column.quantity else ""
        head += f'<th{side}{meaning}><button type="button">{escaped(column.title)}</button></th>'
        key = VS_TYPICAL if column.title == VS_TYPICAL else column.quantity
        data = f' data-title="{escape(column.title)}" data-quantity="{key}"' if index else ""
        for row, cell in enumerate(column.cells):
            is_off = table.states[row] == OFF and (index == 0 or cell.endswith(ARROWS))
            text = _name(cell) if index == 0 else escaped(cell)
            rows[row] += f"<td{side}{data}>{f'<span class=bad>{text}</span>' if is_off else text}</td>"
    body = "".join(f"<tr{_of_layer(name)}>{row}</tr>" for name, row in zip(names, rows, strict=True))
    explanation = legend(current)
    return [column.quantity for column in columns if column.quantity], (
        f'<section id="layers"><h2>All layers at step {current.step}</h2>\n'
        + (f'<p class="soft">{escaped(explanation)}</p>\n' if explanation else "")
        + '<div class="wide long" tabindex="0" role="region" aria-label="table of all layers"><table class="cards">'
        + f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _footer(measurements: Sequence[Measurement], notes: Sequence[str]) -> str:
    from spectral_monitor import __version__

    steps = f"{len(measurements)} measurements, steps {measurements[0].step} to {measurements[-1].step}"
    paragraphs = "".join(f"<p>{escaped(note)}</p>" for note in notes)
    return f"<footer><p>spectral_monitor {__version__} &middot; {steps}</p>{paragraphs}</footer>"


def _name(layer: str) -> str:
    return f'<span class="name{" folded" if len(layer) > MAX_UNFOLDED_NAME else ""}">{escaped(layer)}</span>'


def _names(layers: Sequence[str]) -> str:
    """Return the names of layers; of many, those of a family together."""
    names = folded_names(layers) if len(layers) > MAX_NAMES else layers
    return joined([_name(name) for name in names], MAX_NAMES)


def _meaning(quantity: str) -> str:
    entry = QUANTITIES.get(quantity)
    return "" if entry is None else escaped(f"{quantity}: {entry.notation}; {entry.meaning}").replace('"', "&quot;")
