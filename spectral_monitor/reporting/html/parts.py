"""Parts of the page besides figures and tables: controls, contents, loss curve, facts on the run, glossary."""

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
"""Measurements that the step slider stops at, at most, evenly, with the last one."""
LOSS_HINT = (
    "No loss curve: nothing in this run's folder holds a training loss. Log one under a name such as train_loss, "
    'self.log("train_loss", loss), with a TensorBoardLogger or a CSVLogger, and write the page from the run\'s folder: '
    "spectral-monitor report RUN."
)
TERMS = {
    "layer": "one weight matrix of the network. Biases and gains are measured too, but have no curve.",
    "hidden, output, embedding": "the role of a layer: most are hidden, the last one gives the network's outputs, "
    "embeddings turn tokens into vectors.",
    VS_TYPICAL: "the size of a layer's update over that of a typical layer with its learning rate, mostly the median. "
    "1 is typical; the legend says what is healthy.",
    "band": "the values within which a layer counts as healthy. Green on this page.",
    "off": "outside its band, far enough or for long enough.",
    "disturbed": "off because of another layer. Fix that one first; this one follows.",
    "not judged": "not enough is known: too few measurements, or nothing to compare with.",
    "family": "the same layer in every block, such as h.*.mlp.c_fc: charts show its lowest, median and highest value.",
}


def contents(sections: Iterable[tuple[str, str]]) -> str:
    """Return links to sections, given as (id, title)."""
    links = "".join(f'<a href="#{name}">{escaped(title)}</a>' for name, title in sections)
    return f'<nav aria-label="On this page">{links}</nav>'


def bar(table: Mapping[str, Any], families: bool) -> str:
    """Return the controls that stay in sight; families, if there are any, can be switched to single layers."""
    parts = [
        '<label>Find <input type="search" id="search" placeholder="layer, such as attn.q_proj" '
        'autocomplete="off" spellcheck="false"></label><output id="found" for="search"></output>'
    ]
    if families:
        parts.append('<label><input type="checkbox" id="single"> single layers instead of families</label>')
    if len(table["steps"]) > 1:
        last, now = len(table["steps"]) - 1, table["now"]
        said = f"step {table['steps'][now]}"
        parts.append(
            f'<label>Step <input type="range" id="step" min="0" max="{last}" value="{now}" aria-valuetext="{said}">'
            f'<output id="at" for="step">{said}</output></label>'
        )
    return f'<div class="bar" role="search">{"".join(parts)}</div>'


def by_step(measurements: Sequence[Measurement], now: Measurement, keys: Sequence[str]) -> dict[str, Any]:
    """Return what the table says at every step that the slider stops at, ``now`` among them.

    Returns:
        ``steps``; ``now``, the place of its step; ``rows``, the layers; ``columns``, key -> step -> layer -> number;
        ``off``, for each step the places of layers that are off.
    """
    apart = max(1, math.ceil(len(measurements) / MAX_SLIDER_STEPS))
    some = [m for k, m in enumerate(reversed(measurements)) if k % apart == 0 or m is now][::-1]
    rows = [i for i, info in enumerate(now.layers) if info.is_matrix]
    names = [now.layers[i].name for i in rows]
    sizes = {VS_TYPICAL: [vs_typical(m) for m in some]}
    for key in keys:
        sizes[key] = [m.values[key].tolist() if key in m.values else [math.nan] * len(m.layers) for m in some]
    columns = {key: [digits([of[i] for i in rows], 3) for of in steps] for key, steps in sizes.items()}
    outside = [[names.index(name) for name in off(m) if name in names] for m in some]
    steps, place = [m.step for m in some], next(k for k, m in enumerate(some) if m is now)
    return {"steps": steps, "now": place, "rows": list(map(escaped, names)), "columns": columns, "off": outside}


def facts(about: RunFacts, measurements: Sequence[Measurement], now: Measurement) -> str:
    """Return one line on the run: model, optimizer, learning rates, steps, date, hyperparameters."""
    known = {str(key): str(value) for key, value in about.about.items()}
    if "lr" in now.values:
        rates = sorted({f"{x:.3g}" for x in now.values["lr"].tolist() if math.isfinite(x)}, key=float)
        if rates:
            known["learning rates"] = rates[0] if len(rates) == 1 else f"{rates[0]} to {rates[-1]}"
    matrices, nodes = sum(x.is_matrix for x in now.layers), sum(x.role == NODE for x in now.layers)
    known["layers"] = f"{matrices} matrices, {len(now.layers) - matrices - nodes} biases and gains" + (
        f", outputs of {nodes} modules" if nodes else ""
    )
    known["measured"] = f"{len(measurements)} times, steps {measurements[0].step} to {measurements[-1].step}"
    spans = "".join(f"<span>{escaped(key)}: {escaped(value)}</span>" for key, value in known.items())
    return f'<p class="facts">{spans}</p>'


def with_measured_loss(about: RunFacts, measurements: Sequence[Measurement]) -> RunFacts:
    """Return facts with the loss of the measured steps, where none was logged."""
    if any(math.isfinite(value) for _, value in about.points):
        return about
    points = [(m.step, m.summary["loss"]) for m in measurements if math.isfinite(m.summary.get("loss", math.nan))]
    return replace(about, loss="loss of measured steps", points=points) if len(points) > 1 else about


def loss_figure(about: RunFacts) -> Figure | None:
    """Return the loss curve; ``None`` where there is none."""
    if not any(math.isfinite(value) for _, value in about.points):
        return None
    positive = all(value > 0 for _, value in about.points if math.isfinite(value))
    curve = line(
        [step for step, _ in about.points],
        digits([value for _, value in about.points]),
        line={"color": "@accent", "width": 1.5},
        hovertemplate=f"step %{{x}}<br>{escaped(about.loss)} %{{y:.4~g}}<extra></extra>",
        showlegend=False,
    )
    layout = {
        "height": 220,
        "margin": {"l": 60, "r": 10, "t": 10, "b": 40},
        "xaxis": {"title": {"text": "step", "standoff": 4}, "domain": [0, 1], "anchor": "y"},
        "yaxis": {"title": {"text": escaped(about.loss)}, "anchor": "x", **({"type": "log"} if positive else {})},
    }
    return {"data": [curve], "layout": layout}


def loss_words(about: RunFacts) -> str:
    """Return the text alternative of the loss curve; empty where there is none."""
    known = [(step, value) for step, value in about.points if math.isfinite(value)]
    if not known:
        return ""
    (first, start), (last, end) = known[0], known[-1]
    return f"{about.loss}: {number(start)} at step {first}, {number(end)} at step {last}"


def glossary(keys: Iterable[str]) -> str:
    """Return the terms of the page and the quantities that it shows, in one list."""
    meanings = TERMS | {key: f"{QUANTITIES[key].meaning} ({QUANTITIES[key].notation})" for key in keys}
    terms = [f"<dt>{escaped(term)}</dt><dd>{escaped(meaning)}</dd>" for term, meaning in meanings.items()]
    return f'<section id="glossary"><h2>Glossary</h2><dl>{"".join(terms)}</dl></section>'
