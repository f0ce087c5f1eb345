"""Verdicts as Markdown: the answer first, then a row for each layer that is out of line, and what was done about it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from textwrap import wrap

import torch

from spectral_monitor.condition.verdict import Verdict, short
from spectral_monitor.measurement import Measurement
from spectral_monitor.reporting.panels import MATRICES

LINE = 40
"""Characters of a sentence in a line; TensorBoard makes columns beside a longer one too narrow for words."""
LISTED = 20
"""Layers with a corrected learning rate that are named."""


def verdict_markdown(measurement: Measurement) -> str:
    r"""The verdicts of a measurement, and the learning rates a correction has multiplied, as Markdown.

    Example:
        >>> from spectral_monitor import LayerInfo
        >>> layers = (LayerInfo("a", "operator", 8, 8, (8, 8)), LayerInfo("b_", "operator", 8, 8, (8, 8)))
        >>> told = Verdict("b_", "update_natural", 0.4, (0.01, 0.16), 10.0, 40, 5, "lr_too_large", "divide it by 10")
        >>> answer, table = verdict_markdown(Measurement(50, layers, {}, {"violations": 1.0}, (told,))).split("\n\n")
        >>> print(answer)
        **1 of 2 layers outside** the spectral condition at step 50, for 40 steps.
        >>> print(table)
        | layer | quantity | value | should be | for | likely cause, and what to do |
        |---|---|---|---|---|---|
        | b\_ | update\_natural | 0.4 | 0.01 .. 0.16 | 40 steps | divide it by 10 |
    """
    parts = [_headline(measurement)]
    if measurement.verdicts:
        header = ("layer", "quantity", "value", "should be", "for", "likely cause, and what to do")
        parts.append(_table(header, (_row(verdict) for verdict in measurement.verdicts)))
    changed = _multiplied(measurement)
    if changed:
        many = f"{len(changed)} learning rates, the most changed first" if len(changed) > 1 else "one learning rate"
        parts.append(f"The correction multiplies {many}:")
        parts.append(_table(("layer", "multiplied by"), ((escaped(name), short(by)) for name, by in changed[:LISTED])))
    if len(changed) > LISTED:
        parts.append(f"... and {len(changed) - LISTED} more, changed less than these.")
    return "\n\n".join(parts)


def escaped(text: str) -> str:
    r"""Text that says in Markdown what it says, in a table's cell too.

    Example:
        >>> print(escaped("blocks.0.w_q|<b>"))
        blocks.0.w\_q\|&lt;b&gt;
    """
    text = re.sub(r"([\\`*_{}\[\]|])", r"\\\1", " ".join(text.split()))
    for char, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("~", "&#126;")):
        text = text.replace(char, entity)
    return text


def _headline(measurement: Measurement) -> str:
    names = {verdict.layer for verdict in measurement.verdicts}
    total = sum(info.role in MATRICES or info.name in names for info in measurement.layers)
    if "violations" not in measurement.summary:
        return f"{total} layers measured at step {measurement.step}; nobody has judged them."
    if not measurement.verdicts:
        passing = _outside(measurement)
        if passing:
            where = f"{passing} of {total} layers outside the band just now"
            return f"**No verdict** at step {measurement.step}: {where}, which counts once it lasts."
        return f"**All {total} layers inside** the spectral condition at step {measurement.step}."
    longest = max(verdict.steps for verdict in measurement.verdicts)
    where = f"the spectral condition at step {measurement.step}, for {longest} steps"
    return f"**{len(names)} of {total} layers outside** {where}."


def _outside(measurement: Measurement) -> int:
    """Layers outside a band at this one measurement."""
    outside = torch.zeros(len(measurement.layers), dtype=torch.bool)
    for quantity, bands in measurement.bands.items():
        values = measurement.values.get(quantity, torch.full((len(bands),), math.nan))
        outside |= (values < bands[:, 0]) | (values > bands[:, 1])
    return int(outside.sum())


def _row(verdict: Verdict) -> tuple[str, ...]:
    value, steps = short(verdict.value), f"{verdict.steps} steps"
    what = "<br>".join(map(escaped, wrap(verdict.sentence, LINE)))
    return *map(escaped, (verdict.layer, verdict.quantity, value, verdict.should_be, steps)), what


def _multiplied(measurement: Measurement) -> list[tuple[str, float]]:
    """Layers whose learning rate is multiplied with something else than 1, and with what."""
    values = measurement.values.get("lr_multiplier")
    if values is None:
        return []
    named = zip((info.name for info in measurement.layers), values.tolist(), strict=True)
    changed = [(name, by) for name, by in named if by > 0 and by != 1]
    return sorted(changed, key=lambda item: -abs(math.log(item[1])))


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    written = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([written[0], "|---" * len(header) + "|", *written[1:]])
