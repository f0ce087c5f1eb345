"""A table on a terminal: in colour and within its width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spectral_monitor.measurement import HEALTHY, OFF
from spectral_monitor.reporting.table import ARROWS, Column, Table, printable

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod

TEXT = 32
"""Characters that the last column, which is wrapped, is left at least, while there are columns that can go."""


def rendered(table: Table) -> str:
    """The table for standard output.

    Where that is a terminal and rich is installed: layers that are off in colour (not if ``NO_COLOR`` is set), as wide
    as the window, with the columns that matter least left out if it is narrow. Else its plain text.

    Example:
        >>> print(rendered(Table("two layers", (Column("layer", ("a", "head"), text=True), Column("x", ("1", "20"))))))
        two layers
        layer   x
        a       1
        head   20
    """
    try:
        from rich.console import Console

        console = Console()
        if console.is_terminal and not console.legacy_windows:
            return _drawn(table, console)
    except Exception:  # without rich, or with one that is broken or of another age, the text is as good
        pass
    return str(table)


def _drawn(table: Table, console: Console) -> str:
    """As text with the terminal's codes, which a progress bar that has taken standard output over understands too."""
    from rich import box
    from rich.table import Table as Grid
    from rich.text import Text

    columns = _that_fit(table.columns, console.width)
    grid = Grid(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", show_edge=False)
    for place, column in enumerate(columns):
        wraps = column.text and place in (0, len(columns) - 1)
        side: JustifyMethod = "left" if column.text else "right"
        grid.add_column(Text(column.title), justify=side, no_wrap=not wraps, overflow="fold")
    for row, cells in enumerate(zip(*(column.cells for column in columns), strict=True)):
        off = bool(table.states) and table.states[row] == OFF
        grid.add_row(*(Text(cell, "bold red" if off and _marked(cell, i) else "") for i, cell in enumerate(cells)))
    judgement = {HEALTHY: "bold green", OFF: "bold red"}.get(table.state, "bold")
    with console.capture() as captured:
        for line in (table.title, *table.notes):
            console.print(Text(printable(line), judgement))
        if columns:
            console.print(grid)
        for line in table.foot:
            console.print(Text(line, "dim"))
        if gone := [column.title for column in table.columns if column not in columns]:
            console.print(Text(f"no room for: {', '.join(gone)}", "dim"))
    return captured.get().rstrip("\n")


def _marked(cell: str, place: int) -> bool:
    """The name of the layer, and values with an arrow."""
    return place == 0 or cell.endswith(ARROWS)


def _that_fit(columns: Sequence[Column], width: int) -> list[Column]:
    """Those there is room for, the last one cut to what it needs."""
    from rich.cells import cell_len

    kept = list(columns)
    widths = {column.title: max(map(cell_len, (column.title, *column.cells))) for column in columns}
    if kept and kept[-1].text:
        widths[kept[-1].title] = min(widths[kept[-1].title], TEXT)
    for column in sorted((column for column in columns if column.spare), key=lambda column: -column.spare):
        if sum(widths[of.title] + 2 for of in kept) <= width:
            break
        kept.remove(column)
    return kept
