"""Charts in words, as Markdown: each question that is answered, and a row for each quantity that answers it."""

from __future__ import annotations

from collections.abc import Collection
from textwrap import wrap

from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting.content.panels import PANELS
from spectral_monitor.reporting.text.markdown import LINE, escaped, table


def questions_markdown(shown: Collection[str]) -> str:
    r"""Return the questions that some quantities answer, how to read them, and what each quantity is.

    Args:
        shown: keys of quantities.

    Example:
        >>> question, reading, rows = questions_markdown(["lr"]).split("\n\n")
        >>> print(question)
        ### What did the corrector do?
        >>> print(rows)
        | quantity | unit | what it is | healthy |
        |---|---|---|---|
        | lr | of the optimizer | effective learning rate of the step | the schedule |
    """
    parts = []
    for panel in PANELS:
        keys = [key for key in panel.quantities if key in shown]
        if keys:
            header = ("quantity", "unit", "what it is", "healthy")
            parts += [f"### {panel.question}", escaped(panel.reading), table(header, map(_row, keys))]
    return "\n\n".join(parts)


def _row(key: str) -> tuple[str, ...]:
    entry = QUANTITIES[key]
    words = ("<br>".join(map(escaped, wrap(text, LINE))) for text in (entry.meaning, entry.healthy))
    return escaped(key), escaped(entry.unit), *words
