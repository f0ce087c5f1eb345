"""Tables in a notebook."""

from __future__ import annotations

from html import escape

from spectral_monitor.measurement import HEALTHY, OFF
from spectral_monitor.reporting.text.lines import Table
from spectral_monitor.reporting.text.table import ARROWS

_COLOURS = {HEALTHY: "#1a7f37", OFF: "#d1242f"}


def html_table(table: Table) -> str:
    """Return a table as HTML without style sheets, scripts or files to load.

    Example:
        >>> from spectral_monitor.reporting.text.lines import Column
        >>> html_table(Table("one layer", (Column("layer", ("a<b",), text=True),)))[:46]
        '<div><p style="font-weight: bold">one layer</p'
    """
    colour = _COLOURS.get(table.state)
    style = "font-weight: bold" + (f"; color: {colour}" if colour else "")
    parts = [f'<p style="{style}">{escape(line)}</p>' for line in (table.title, *table.notes)]
    if table.columns:
        head = "".join(_cell("th", column.title, column.text) for column in table.columns)
        rows = zip(*(column.cells for column in table.columns), strict=True)
        body = ""
        for row, cells in enumerate(rows):
            off = bool(table.states) and table.states[row] == OFF
            body += "<tr>"
            for index, (cell, column) in enumerate(zip(cells, table.columns, strict=True)):
                body += _cell("td", cell, column.text, off and (index == 0 or cell.endswith(ARROWS)))
            body += "</tr>"
        parts.append(f'<div style="overflow-x: auto"><table><tr>{head}</tr>{body}</table></div>')
    parts += [f'<p style="opacity: 0.7">{escape(line)}</p>' for line in table.foot]
    return f"<div>{''.join(parts)}</div>"


def _cell(tag: str, text: str, is_text: bool, off: bool = False) -> str:
    style = f"text-align: {'left' if is_text else 'right'}" + (f"; color: {_COLOURS[OFF]}" if off else "")
    return f'<{tag} style="{style}">{escape(text)}</{tag}>'
