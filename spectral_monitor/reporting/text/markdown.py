"""Markdown of verdicts, the answer first, and of the questions that charts answer."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from textwrap import wrap

from spectral_monitor.condition.verdict import Verdict, duration, short
from spectral_monitor.measurement import Measurement
from spectral_monitor.messages import joined
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting.content.families import folded_names
from spectral_monitor.reporting.content.headline import MAX_NAMES, following, headlines
from spectral_monitor.reporting.content.labels import quantity_title
from spectral_monitor.reporting.content.panels import PANELS
from spectral_monitor.reporting.content.tally import named_by

LINE = 40
"""Characters of a line in a cell; beside longer ones TensorBoard makes other columns too narrow for words."""
MAX_LISTED = 20
"""The most layers with a corrected learning rate that are listed."""


def verdict_markdown(measurement: Measurement) -> str:
    r"""Return the answer, the root verdicts and the factors of a correction, as Markdown.

    Layers that follow from a root are counted in its row.

    Example:
        >>> from spectral_monitor import LayerInfo
        >>> from spectral_monitor.measurement import LayerState
        >>> layers = (LayerInfo("a", "operator", 8, 8, (8, 8)), LayerInfo("b_", "operator", 8, 8, (8, 8)))
        >>> root = Verdict("b_", "update_natural", 0.4, (0.01, 0.16), 10.0, 40, 5, "lr_too_large", "divide it by 10")
        >>> states = {"a": LayerState("healthy"), "b_": LayerState("off")}
        >>> measurement = Measurement(50, layers, {}, {"violations": 1.0}, (root,), states=states)
        >>> answer, table = verdict_markdown(measurement).split("\n\n")
        >>> print(answer)
        **Step 50: 1 of 2 layers off: b\_; 1 healthy**
        >>> print(table)
        | layer | quantity | value | should be | for | likely cause, and what to do |
        |---|---|---|---|---|---|
        | b\_ | update size | 0.4 | 0.01 .. 0.16 | 40 steps | divide it by 10 |
    """
    first, *others = headlines(measurement)
    parts = [f"**Step {measurement.step}: {escaped(first)}**", *map(escaped, others)]
    if measurement.roots:
        header = ("layer", "quantity", "value", "should be", "for", "likely cause, and what to do")
        parts.append(table(header, (_row(root, measurement) for root in measurement.roots)))
    multipliers = _multipliers(measurement)
    if multipliers:
        count = len(multipliers)
        rates = f"{count} learning rates, the most changed first" if count > 1 else "one learning rate"
        parts.append(f"The correction multiplies {rates}:")
        rows = ((escaped(name), short(multiplier)) for name, multiplier in multipliers[:MAX_LISTED])
        parts.append(table(("layer", "multiplied by"), rows))
        if count > MAX_LISTED:
            parts.append(f"... and {count - MAX_LISTED} more, changed less than these.")
    return "\n\n".join(parts)


def questions_markdown(quantities: Collection[str]) -> str:
    r"""Return the questions that some quantities answer, how to read the charts, and the meaning of each quantity.

    Example:
        >>> question, reading, rows = questions_markdown(["lr"]).split("\n\n")
        >>> print(question)
        ### What did the corrector do?
        >>> print(rows)
        | quantity | unit | what it is | healthy |
        |---|---|---|---|
        | lr | of the optimizer | effective learning rate of the step | follows the schedule |
    """
    parts = []
    for panel in PANELS:
        keys = [key for key in panel.quantities if key in quantities]
        if keys:
            header = ("quantity", "unit", "what it is", "healthy")
            parts += [f"### {panel.question}", escaped(panel.reading), table(header, map(_quantity_row, keys))]
    return "\n\n".join(parts)


def _quantity_row(key: str) -> tuple[str, ...]:
    entry = QUANTITIES[key]
    cells = ("<br>".join(map(escaped, wrap(text, LINE))) for text in (entry.meaning, entry.healthy))
    return escaped(key), escaped(entry.unit), *cells


def escaped(text: str) -> str:
    r"""Escape a text so that Markdown shows it unchanged, in a table's cell too.

    Example:
        >>> print(escaped("blocks.0.w_q|<b>"))
        blocks.0.w\_q\|&lt;b&gt;
    """
    text = re.sub(r"([\\`*_{}\[\]|])", r"\\\1", " ".join(text.split()))
    for char, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("~", "&#126;")):
        text = text.replace(char, entity)
    return text


def _row(root: Verdict, measurement: Measurement) -> tuple[str, ...]:
    """Return the cells of a root verdict; a verdict without a quantity has no value."""
    values = (quantity_title(root.quantity), short(root.value), root.should_be) if root.quantity else ("", "", "")
    layers = named_by(root)
    names = layers if len(layers) <= MAX_NAMES else folded_names(layers)
    cells = (joined(names, MAX_NAMES) or "the whole network", *values, duration(root.steps))
    lines = [*wrap(root.sentence, LINE), *wrap(following(root, measurement), LINE)]
    return *map(escaped, cells), "<br>".join(map(escaped, lines))


def _multipliers(measurement: Measurement) -> list[tuple[str, float]]:
    """Return the layers whose learning-rate multiplier is not 1, with the multiplier, the most changed first."""
    values = measurement.values.get("lr_multiplier")
    if values is None:
        return []
    pairs = zip((info.name for info in measurement.layers), values.tolist(), strict=True)
    changed = [(name, multiplier) for name, multiplier in pairs if multiplier > 0 and multiplier != 1]
    return sorted(changed, key=lambda pair: -abs(math.log(pair[1])))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; cells are escaped already."""
    first, *others = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([first, "|---" * len(header) + "|", *others])
