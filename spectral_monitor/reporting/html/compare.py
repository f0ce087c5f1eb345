"""Two runs on one page: the curves of both in the same charts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from spectral_monitor.measurement import Measurement
from spectral_monitor.reporting.content.panels import PANELS, Panel
from spectral_monitor.reporting.html.curves import curves
from spectral_monitor.reporting.html.figures import Figure, escaped
from spectral_monitor.reporting.html.page import page

if TYPE_CHECKING:
    from spectral_monitor.reporting.logged_run import Run

DASHES = {"A": "solid", "B": "dot"}
"""Of the first run's lines and of the second one's."""


def write_comparison(a: Run, b: Run, names: Sequence[str], lines: Sequence[str], path: str | os.PathLike[str]) -> None:
    """Write a page with a chart for each quantity that both runs have: the first run solid, the second one dotted.

    Args:
        names: of both runs.
        lines: what is said at the top, the answer first; then a table as text.

    Raises:
        ImportError: plotly is not installed.
        OSError: the file cannot be written.
    """
    answer, *table = lines
    head = (
        f"<header><h1>{escaped(answer[:1].upper() + answer[1:])}</h1>"
        f"<p>Solid lines: {escaped(names[0])}. Dotted lines: {escaped(names[1])}. Red: off in that run.</p></header>"
    )
    text = escaped("\n".join(table))
    sections = [head, f'<section class="wide"><pre style="margin: 0">{text}</pre></section>']
    figures: dict[str, Figure] = {}
    steps: dict[str, Sequence[int]] = {}
    for place, panel in enumerate(PANELS):
        figure, known = _overlaid(panel, (a.measurements, b.measurements))
        if figure is not None:
            figures[f"panel-{place}"] = figure
            steps |= known
            drawn = f'<div class="wide"><div class="figure" id="panel-{place}"></div></div>'
            sections.append(f"<section><h2>{escaped(panel.question)}</h2>\n{drawn}</section>")
    document = page(escaped(answer), "\n".join(sections), figures, steps)
    Path(path).write_text(document, encoding="utf-8", errors="replace", newline="\n")


def _overlaid(panel: Panel, runs: Sequence[Sequence[Measurement]]) -> tuple[Figure | None, dict[str, list[int]]]:
    """Return one figure with the lines of both runs, and the steps of each quantity in each run."""
    common = [key for key in panel.quantities if all(any(key in m.values for m in run) for run in runs)]
    if not common:
        return None, {}
    panel = replace(panel, only=tuple(common))
    (first, steps), (second, more) = (curves(panel, run, run[-1]) for run in runs)
    if first is None or second is None or list(steps) != list(more):
        return None, {}
    data = [_of(trace, "A") for trace in first["data"] if not trace.get("uid", "").startswith("F")]
    data += [_of(trace, "B") for trace in second["data"] if "meta" in trace]  # lines; one band is enough
    for axis in (name for name in first["layout"] if name.startswith("yaxis")):
        one, other = first["layout"][axis], second["layout"][axis]
        if one.get("type") == other.get("type"):
            low, high = zip(one["range"], other["range"], strict=True)
            one["range"] = [min(low), max(high)]
        else:  # one of them has negative values
            one.pop("type", None)
            one.pop("range", None)
    known = {f"{key} {run}": at for run, of in (("A", steps), ("B", more)) for key, at in of.items()}
    return {"data": data, "layout": first["layout"]}, known


def _of(trace: Figure, run: str) -> Figure:
    """Return a trace as one of a run: its steps, its dashes, and its name where the mouse is."""
    if isinstance(trace["x"], str):
        trace = {**trace, "x": f"{trace['x']} {run}"}
    if "meta" not in trace:
        return trace
    uid = f"L{run}{trace['uid'][1:]}"  # one of its own: plotly tells lines apart by it
    line = {**trace["line"], "dash": DASHES[run]}
    template = trace["hovertemplate"].replace("%{meta[0]}", f"%{{meta[0]}} in {run}", 1)
    return {
        **trace,
        "uid": uid,
        "line": line,
        "hovertemplate": template,
        "showlegend": trace["showlegend"] and run == "A",
    }
