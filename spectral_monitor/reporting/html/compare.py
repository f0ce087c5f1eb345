"""A page that shows the curves of two runs in the same charts."""

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
"""Line styles of the first and the second run."""


def write_comparison(a: Run, b: Run, names: Sequence[str], lines: Sequence[str], path: str | os.PathLike[str]) -> None:
    """Write a page with a chart for each quantity that both runs have: the first run solid, the second one dotted.

    ``lines``: the text at the top: the answer, then the lines of a table.

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
    for number, panel in enumerate(PANELS):
        figure, panel_steps = _overlaid(panel, (a.measurements, b.measurements))
        if figure is not None:
            figures[f"panel-{number}"] = figure
            steps |= panel_steps
            chart = f'<div class="wide"><div class="figure" id="panel-{number}"></div></div>'
            sections.append(f"<section><h2>{escaped(panel.question)}</h2>\n{chart}</section>")
    document = page(escaped(answer), "\n".join(sections), figures, steps)
    Path(path).write_text(document, encoding="utf-8", errors="replace", newline="\n")


def _overlaid(panel: Panel, runs: Sequence[Sequence[Measurement]]) -> tuple[Figure | None, dict[str, list[int]]]:
    """Return one figure with the lines of both runs, and the steps of each quantity in each run."""
    common = [key for key in panel.quantities if all(any(key in m.values for m in run) for run in runs)]
    if not common:
        return None, {}
    panel = replace(panel, only=tuple(common))
    (a, a_steps), (b, b_steps) = (curves(panel, run, run[-1]) for run in runs)
    if a is None or b is None or list(a_steps) != list(b_steps):
        return None, {}
    data = [_trace_of_run(trace, "A") for trace in a["data"] if not trace.get("uid", "").startswith("F")]
    data += [_trace_of_run(trace, "B") for trace in b["data"] if "meta" in trace]  # lines; one band is enough
    for name in (name for name in a["layout"] if name.startswith("yaxis")):
        axis, other = a["layout"][name], b["layout"][name]
        if axis.get("type") == other.get("type"):
            low, high = zip(axis["range"], other["range"], strict=True)
            axis["range"] = [min(low), max(high)]
        else:  # one of them has negative values
            axis.pop("type", None)
            axis.pop("range", None)
    steps = {f"{key} A": a_steps[key] for key in a_steps} | {f"{key} B": b_steps[key] for key in b_steps}
    return {"data": data, "layout": a["layout"]}, steps


def _trace_of_run(trace: Figure, run: str) -> Figure:
    """Return a trace with the steps of a run; lines also get the run's dashes, and its name in their tooltip."""
    if isinstance(trace["x"], str):
        trace = {**trace, "x": f"{trace['x']} {run}"}
    if "meta" not in trace:
        return trace
    return {
        **trace,
        "uid": f"L{run}{trace['uid'][1:]}",  # plotly identifies lines by it
        "line": {**trace["line"], "dash": DASHES[run]},
        "hovertemplate": trace["hovertemplate"].replace("%{meta[0]}", f"%{{meta[0]}} in {run}", 1),
        "showlegend": trace["showlegend"] and run == "A",
    }
