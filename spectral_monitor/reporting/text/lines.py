"""Tables as text: the columns that fit a width, and their lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spectral_monitor.messages import HARD_SPACE, lines_of

MIN_TEXT_WIDTH = 18
"""Characters of the last column, at least, if it is text: other columns are left out for it, then it is wrapped."""
NOT_MEASURED, NO_FEATURES = "not measured", "weights and updates are measured, features are not"
"""Heads of :func:`reason_lines`."""
NO_VALUE = "-"
"""In place of a number that is missing."""
INDENT = "  "
"""In front of the continuation of a wrapped line."""
GAP = "   "
"""Between the parts of a line; a line ends between two parts, not inside one."""


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    title: str  # above it
    cells: tuple[str, ...]  # one for each row
    text: bool = False  # whether it is text, which is aligned to the left
    spare: int = 0  # if not all columns fit, those with the highest number are left out first; 0: never
    quantity: str = ""  # key of the quantity in it, if any
    legend: str = ""  # explanation, if it needs one
    drawn: bool = False  # whether it is a picture made of characters


@dataclass(frozen=True)
class Table:
    """The table of a measurement or a model, for any display; ``str`` returns plain text of any width."""

    title: str  # one line, the answer first
    columns: tuple[Column, ...]  # all of the same length, or none
    foot: tuple[str, ...] = ()  # lines below, after the legends of the columns
    state: str = ""  # ``"healthy"``, ``"off"`` or ``"not judged"``; empty if the table is not about health
    states: tuple[str, ...] = ()  # of each row, perhaps ``"disturbed"``; empty like ``state``
    notes: tuple[str, ...] = ()  # lines between the title and the rows

    def __str__(self) -> str:
        return self.plain()

    def plain(self, width: int | None = None) -> str:
        """Return plain text.

        Args:
            width: characters of a line; the least important columns are left out, sentences wrapped. ``None``: any.
        """
        shown = self.columns if width is None else that_fit(self.columns, width)
        lines = [part for line in (self.title, *self.notes) for part in folded_line(line, width)]
        lines += aligned(shown, width)
        return "\n".join([*lines, *self.below(shown, width)])

    def below(self, shown: Sequence[Column], width: int | None) -> list[str]:
        """Return the lines below the rows: legends of the columns shown, the foot, and titles of columns left out."""
        legends = [column.legend for column in shown if column.legend]
        if legends and any(NO_VALUE in column.cells for column in shown):
            legends.append(f"{NO_VALUE}: no value")
        left_out = [column.title.replace(" ", HARD_SPACE) for column in self.columns if column not in shown]
        lines = [*legends[:1], *filter(None, ["; ".join(legends[1:])]), *self.foot]
        lines += [f"a wider table adds: {', '.join(left_out)}"] if left_out else []
        return [part for line in lines for part in folded_line(line, width)]


def that_fit(columns: Sequence[Column], width: int) -> tuple[Column, ...]:
    """Return the columns that fit a width; the last one, if it is text, can be wrapped to its minimum width."""
    kept = list(columns)
    widths = {column.title: max(map(len, (column.title, *column.cells))) for column in columns}
    if kept and kept[-1].text:
        widths[kept[-1].title] = min(widths[kept[-1].title], MIN_TEXT_WIDTH)
    for column in sorted(filter(lambda column: column.spare, columns), key=lambda column: -column.spare):
        if sum(widths[other.title] + 2 for other in kept) - 2 <= width:
            break
        kept.remove(column)
    return tuple(kept)


def folded_line(text: str, width: int | None) -> list[str]:
    """Return a line as several that fit a width, those after the first indented; words and parts are not split."""
    if width is None or len(text) <= width:
        return [text.replace(HARD_SPACE, " ")]
    parts = text.split(GAP)
    if len(parts) > 1:
        parts = [part.replace(" ", HARD_SPACE) if len(part) <= width - len(INDENT) else part for part in parts]
    return lines_of(GAP.join(parts), width, later=text[: len(text) - len(text.lstrip())] + INDENT)


def text_column(title: str, cells: Sequence[str], spare: int = 0) -> Column:
    """Return a column of printable text."""
    return Column(title, tuple(map(printable, cells)), text=True, spare=spare)


def printable(text: str) -> str:
    r"""Escape line breaks and control characters, which a layer's name may have.

    Example:
        >>> print(printable("red\x1b[31m"))
        red\x1b[31m
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def reason_lines(head: str, reasons: Sequence[tuple[str, str]], join: Callable[[list[str]], str]) -> list[str]:
    """Return a head with the number of names, and a line for each reason with its names; nothing without names.

    ``reasons``: (name, reason); ``join`` makes a text of the names in a line.
    """
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons:
        by_reason.setdefault(reason, []).append(name)
    heads = [f"{head} ({len(reasons)}):"] if reasons else []
    return heads + [printable(f"  {join(names)}: {reason}") for reason, names in by_reason.items()]


def aligned(columns: Sequence[Column], width: int | None = None) -> list[str]:
    """Return a line of titles and the lines of each row; text is aligned to the left, numbers to the right.

    A last column of long text is wrapped to the width; ``None``: no limit.
    """
    if not columns:
        return []
    *others, last = columns
    widths = [max(len(cell) for cell in (column.title, *column.cells)) for column in others]
    last_cells = [[text] for text in (last.title, *last.cells)]
    if width is not None and others and last.text:
        remaining = max(width - sum(widths) - 2 * len(widths), MIN_TEXT_WIDTH)
        last_cells = [lines_of(text, remaining, later="") or [""] for (text,) in last_cells]
    widths.append(max(len(line) for cell in last_cells for line in cell))
    lines = []
    for row, last_cell in enumerate(last_cells):
        cells = [column.cells[row - 1] if row else column.title for column in others]
        for part in last_cell:
            padded = (
                cell.ljust(size) if column.text else cell.rjust(size)
                for cell, size, column in zip([*cells, part], widths, columns, strict=True)
            )
            lines.append("  ".join(padded).rstrip())
            cells = [""] * len(others)
    return lines
