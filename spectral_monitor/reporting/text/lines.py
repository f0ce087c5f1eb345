"""Tables as text: columns, which of them there is room for, and the lines they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap

TEXT = 14
"""Characters that the last column, which is wrapped, is left at least, while there are columns that can go."""
INDENT = "  "
"""Before what a line that was too long goes on with."""


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    title: str  # above it
    cells: tuple[str, ...]  # one for each row
    text: bool = False  # whether it is text, which goes to the left
    spare: int = 0  # 0 for what stays; where there is no room for all, the highest goes first
    quantity: str = ""  # a key of the measurement, if that is what it shows
    legend: str = ""  # what it says, where that is not plain
    drawn: bool = False  # whether it is a picture made of characters


@dataclass(frozen=True)
class Table:
    """The table of a measurement or a model, however it is drawn; ``str`` gives plain text of any width."""

    title: str  # one line, the answer first
    columns: tuple[Column, ...]  # all of the same length, or none
    foot: tuple[str, ...] = ()  # lines below, after the legends of the columns
    state: str = ""  # ``"healthy"``, ``"off"`` or ``"not judged"``; empty where the table is on something else
    states: tuple[str, ...] = ()  # of each row, ``"disturbed"`` among them; empty like ``state``
    notes: tuple[str, ...] = ()  # lines between the title and the rows

    def __str__(self) -> str:
        return self.plain()

    def plain(self, width: int | None = None) -> str:
        """Return plain text.

        Args:
            width: characters of a line; columns that matter least are left out, sentences wrapped. ``None``: no limit.
        """
        shown = self.columns if width is None else that_fit(self.columns, width)
        lines = [part for line in (self.title, *self.notes) for part in folded_line(line, width)]
        lines += aligned(shown, width)
        return "\n".join([*lines, *self.below(shown, width)])

    def below(self, shown: Sequence[Column], width: int | None) -> list[str]:
        """Return the lines below the rows: what the columns that are shown say, the foot, and which are not shown."""
        legends = [column.legend for column in shown if column.legend]
        gone = [column.title for column in self.columns if column not in shown]
        lines = [*legends[:1], *filter(None, ["; ".join(legends[1:])]), *self.foot]
        lines += [f"no room for: {', '.join(gone)}"] if gone else []
        return [part for line in lines for part in folded_line(line, width)]


def that_fit(columns: Sequence[Column], width: int) -> tuple[Column, ...]:
    """Return the columns there is room for; the last one, if it is text, is wrapped and counts with what it needs."""
    kept = list(columns)
    widths = {column.title: max(map(len, (column.title, *column.cells))) for column in columns}
    if kept and kept[-1].text:
        widths[kept[-1].title] = min(widths[kept[-1].title], TEXT)
    for column in sorted((column for column in columns if column.spare), key=lambda column: -column.spare):
        if sum(widths[of.title] + 2 for of in kept) - 2 <= width:
            break
        kept.remove(column)
    return tuple(kept)


def folded_line(text: str, width: int | None) -> list[str]:
    """Return a line as several that fit, those after the first indented; a long name stays whole."""
    if width is None or len(text) <= width:
        return [text]
    return wrap(text, width, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False)


def text_column(title: str, cells: Sequence[str], spare: int = 0) -> Column:
    """Return a column of text, whatever is in it printable."""
    return Column(title, tuple(map(printable, cells)), text=True, spare=spare)


def printable(text: str) -> str:
    r"""Escape what would break a line or steer a terminal; a layer may be called anything.

    Example:
        >>> print(printable("red\x1b[31m"))
        red\x1b[31m
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def unmeasured_lines(reasons: Sequence[tuple[str, str]], names: Callable[[list[str]], str]) -> list[str]:
    """Return how many parameters are not measured, and a line for each reason with those it holds for.

    ``reasons``: name of a parameter and reason; ``names`` puts the names that share a line into words.
    """
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons:
        by_reason.setdefault(reason, []).append(name)
    head = [f"not measured ({len(reasons)}):"] if reasons else []
    return head + [printable(f"  {names(some)}: {reason}") for reason, some in by_reason.items()]


def aligned(columns: Sequence[Column], width: int | None = None) -> list[str]:
    """Return a line of titles and those of each row, columns two spaces apart; text to the left, numbers to the right.

    A last column of long text is wrapped to the width; ``None``: no limit.
    """
    if not columns:
        return []
    *before, last = columns
    widths = [max(len(cell) for cell in (column.title, *column.cells)) for column in before]
    rows = [[text] for text in (last.title, *last.cells)]
    if width is not None and before and last.text:
        room = max(width - sum(widths) - 2 * len(widths), TEXT)
        rows = [wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""] for (text,) in rows]
    wide = max(len(line) for row in rows for line in row)
    found = []
    for place, row in enumerate(rows):
        cells = [column.cells[place - 1] if place else column.title for column in before]
        for line in row:
            padded = (
                cell.ljust(w) if of.text else cell.rjust(w)
                for cell, w, of in zip([*cells, line], [*widths, wide], columns, strict=True)
            )
            found.append("  ".join(padded).rstrip())
            cells = [""] * len(before)
    return found
