"""Parts of the page besides figures and tables: controls, contents, loss curve, facts about the run, glossary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from spectral_monitor.measurement import NODE, Measurement
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting.content.tally import off
from spectral_monitor.reporting.content.typical import VS_TYPICAL, vs_typical
from spectral_monitor.reporting.files.run_facts import RunFacts
from spectral_monitor.reporting.html.figures import Figure, digits, escaped, line
from spectral_monitor.reporting.text.table import number

MAX_SLIDER_STEPS = 60
"""The most stops of the step slider: measurements at even intervals, the last one included."""
LOSS_HINT = (
    "No loss curve: this run's folder holds no training loss. Log it under a name such as train_loss, "
    'self.log("train_loss", loss), with a TensorBoardLogger or a CSVLogger, and write the page from the run\'s '
    "folder: spectral-monitor report RUN."
)
TERMS = {
    "layer": "one weight matrix of the network. Biases and gains are measured too, but have no curve.",
    "hidden, output, embedding": "the role of a layer: most are hidden, the last one gives the network's outputs, "
    "embeddings turn tokens into vectors.",
    VS_TYPICAL: (
        "the size of a layer's update over that of a typical layer with its learning rate, mostly the median. 1 is "
        "typical; the legend shows what is healthy."
    ),
    "band": "the values within which a layer counts as healthy. Green on this page.",
    "off": "outside its band, far enough or for long enough.",
    "disturbed": "off because of another layer. Fix that one first; this one follows.",
    "not judged": "not enough is known: too few measurements, or nothing to compare with.",
    "family": "the same layer in every block, such as h.*.mlp.c_fc: charts show its lowest, median and highest value.",
}


def contents(sections: Iterable[tuple[str, str]]) -> str:
    """Return links to sections, which are (id, title)."""
    links = "".join(f'<a href="#{name}">{escaped(title)}</a>' for name, title in sections)
    return f'<nav aria-label="On this page">{links}</nav>'


def bar(table: Mapping[str, Any], families: bool) -> str:
    """Return the controls that stay in view; ``families``: with a switch from families to single layers."""
    parts = [
        '<label>Find <input type="search" id="search" placeholder="layer, such as attn.q_proj" '
        'autocomplete="off" spellcheck="false"></label><output id="found" for="search"></output>'
    ]
    if families:
        parts.append('<label><input type="checkbox" id="single"> single layers instead of families</label>')
    if len(table["steps"]) > 1:
        last, index = len(table["steps"]) - 1, table["now"]
        text = f"step {table['steps'][index]}"
        parts.append(
            f'<label>Step <input type="range" id="step" min="0" max="{last}" value="{index}" aria-valuetext="{text}">'
            f'<output id="at" for="step">{text}</output></label>'
        )
    return f'<div class="bar" role="search">{"".join(parts)}</div>'


def by_step(measurements: Sequence[Measurement], current: Measurement, keys: Sequence[str]) -> dict[str, Any]:
    """Return the content of the table at every stop of the slider, ``current`` among them.

    Returns:
        ``steps``; ``now``, the index of the current one; ``rows``, the layers; ``columns``, key -> step -> layer ->
        number;
        ``off``, for each step the indices of layers that are off.
    """
    stride = max(1, math.ceil(len(measurements) / MAX_SLIDER_STEPS))
    stops = [m for k, m in enumerate(reversed(measurements)) if k % stride == 0 or m is current][::-1]
    rows = [i for i, info in enumerate(current.layers) if info.is_matrix]
    names = [current.layers[i].name for i in rows]
    values = {VS_TYPICAL: [vs_typical(m) for m in stops]}
    for key in keys:
        values[key] = [m.values[key].tolist() if key in m.values else [math.nan] * len(m.layers) for m in stops]
    return {
        "steps": [m.step for m in stops],
        "now": next(k for k, m in enumerate(stops) if m is current),
        "rows": list(map(escaped, names)),
        "columns": {key: [digits([column[i] for i in rows], 3) for column in steps] for key, steps in values.items()},
        "off": [[names.index(name) for name in off(m) if name in names] for m in stops],
    }


def facts(run: RunFacts, measurements: Sequence[Measurement], current: Measurement) -> str:
    """Return one line about the run: model, optimizer, learning rates, steps, date, hyperparameters."""
    texts = {str(title): str(text) for title, text in run.about.items()}
    if "lr" in current.values:
        rates = sorted({f"{x:.3g}" for x in current.values["lr"].tolist() if math.isfinite(x)}, key=float)
        if rates:
            texts["learning rates"] = rates[0] if len(rates) == 1 else f"{rates[0]} to {rates[-1]}"
    matrices, nodes = sum(info.is_matrix for info in current.layers), sum(info.role == NODE for info in current.layers)
    texts["layers"] = f"{matrices} matrices, {len(current.layers) - matrices - nodes} biases and gains" + (
        f", outputs of {nodes} modules" if nodes else ""
    )
    texts["measured"] = f"{len(measurements)} times, steps {measurements[0].step} to {measurements[-1].step}"
    spans = "".join(f"<span>{escaped(title)}: {escaped(text)}</span>" for title, text in texts.items())
    return f'<p class="facts">{spans}</p>'


def with_measured_loss(run: RunFacts, measurements: Sequence[Measurement]) -> RunFacts:
    """Return the facts with the loss of the measured steps if no loss was logged."""
    if _finite_points(run):
        return run
    points = [(m.step, m.summary["loss"]) for m in measurements if math.isfinite(m.summary.get("loss", math.nan))]
    return replace(run, loss="loss of measured steps", points=points) if len(points) > 1 else run


def _finite_points(run: RunFacts) -> list[tuple[int, float]]:
    return [(step, value) for step, value in run.points if math.isfinite(value)]


def loss_figure(run: RunFacts) -> Figure | None:
    """Return the loss curve; ``None`` if there is none."""
    finite = _finite_points(run)
    if not finite:
        return None
    positive = all(value > 0 for _, value in finite)
    curve = line(
        [step for step, _ in run.points],
        digits([value for _, value in run.points]),
        line={"color": "@accent", "width": 1.5},
        hovertemplate=f"step %{{x}}<br>{escaped(run.loss)} %{{y:.4~g}}<extra></extra>",
        showlegend=False,
    )
    layout = {
        "height": 220,
        "margin": {"l": 60, "r": 10, "t": 10, "b": 40},
        "xaxis": {"title": {"text": "step", "standoff": 4}, "domain": [0, 1], "anchor": "y"},
        "yaxis": {"title": {"text": escaped(run.loss)}, "anchor": "x", **({"type": "log"} if positive else {})},
    }
    return {"data": [curve], "layout": layout}


def loss_words(run: RunFacts) -> str:
    """Return the text alternative of the loss curve; empty if there is none."""
    points = _finite_points(run)
    if not points:
        return ""
    (first_step, first_loss), (last_step, last_loss) = points[0], points[-1]
    return f"{run.loss}: {number(first_loss)} at step {first_step}, {number(last_loss)} at step {last_step}"


def glossary(keys: Iterable[str]) -> str:
    """Return a list that explains the terms of the page and the quantities on it."""
    entries = {f"{title} ({key})" if (title := QUANTITIES[key].title) else key: QUANTITIES[key] for key in keys}
    meanings = TERMS | {term: f"{entry.meaning} ({entry.notation})" for term, entry in entries.items()}
    terms = [f"<dt>{escaped(term)}</dt><dd>{escaped(meaning)}</dd>" for term, meaning in meanings.items()]
    return f'<section id="glossary"><h2>Glossary</h2><dl>{"".join(terms)}</dl></section>'
