"""A table on a terminal: in colour and within its width."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from spectral_monitor.measurement import HEALTHY, OFF
from spectral_monitor.messages import in_lines
from spectral_monitor.reporting.text.gauge import SYMBOLS
from spectral_monitor.reporting.text.lines import Table, folded_line, printable, that_fit
from spectral_monitor.reporting.text.table import ARROWS, WIDTH

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod


def page_command(folder: str) -> str:
    """Return the lines that say how to write the page of a run; without plotly they begin with its installation."""
    install = "" if find_spec("plotly") else '\n  pip install "spectral-monitor[plots]"'
    return f"spectral monitor: the whole run as a page{install}\n  spectral-monitor report {folder}"


def code_command(variable: str) -> str:
    """Return the lines that say how to print the corrected learning rates of a callback as code."""
    return f"spectral monitor: the corrected rates as code\n  print({variable}.param_groups_code())"


def in_words(steps: object) -> str:
    """Return a schedule in words; empty if quantities have different schedules.

    Example:
        >>> in_words(50), in_words("1, 2, 4, ..., every 100"), in_words({"light": 10})
        ('every 50 steps', 'at steps 1, 2, 4, ..., every 100', '')
    """
    if isinstance(steps, int):
        return f"every {steps} steps" if steps > 1 else "at every step"
    return f"at steps {steps}" if isinstance(steps, str) else ""


def nothing_measured(steps: int, before: int, schedule: object, following: int) -> str:
    """Return the lines that say that a training measured nothing.

    Args:
        before: steps of the trainings that it continues.
        following: the next step that would be measured; 0 if that is not known.

    Example:
        >>> print(nothing_measured(40, 150, "1, 2, 4, ..., every 100", 200))
        spectral monitor: nothing was measured in 40 optimizer steps after
          step 150 with every_n_steps='1, 2, 4, ..., every 100'; the next is step 200
    """
    count = f"{steps} optimizer steps" + (f" after step {before}" if before else "")
    ending = f"; the next is step {following}" if following > before + steps else ""
    return in_lines(f"spectral monitor: nothing was measured in {count} with every_n_steps={schedule!r}{ending}")


def rendered(table: Table) -> str:
    """Return the table for standard output.

    On a terminal with rich installed, layers that are off are in colour, unless ``NO_COLOR`` is set. The table is as
    wide as the window; in a narrow one the least important columns are left out. Elsewhere it is plain text, 80
    characters wide or as wide as ``COLUMNS`` says.

    Example:
        >>> from spectral_monitor.reporting.text.lines import Column
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
    except Exception:  # without rich, or with a broken or incompatible one, plain text is as good
        pass
    columns = os.environ.get("COLUMNS", "")
    return table.plain(int(columns) if columns.isdigit() and int(columns) else WIDTH)


def _drawn(table: Table, console: Console) -> str:
    """Return text with the terminal's codes, which also pass through a progress bar that captures standard output."""
    from rich import box
    from rich.table import Table as Grid
    from rich.text import Text

    width = console.width
    columns = that_fit(table.columns, width)
    grid = Grid(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", show_edge=False)
    for index, column in enumerate(columns):
        wraps = column.text and not column.drawn and index in (0, len(columns) - 1)
        side: JustifyMethod = "left" if column.text else "right"
        grid.add_column(Text(column.title), justify=side, no_wrap=not wraps, overflow="fold")
    symbols = SYMBOLS if "utf" in (console.encoding or "").lower() else {}
    texts = [[cell.translate(symbols if column.drawn else {}) for cell in column.cells] for column in columns]
    for row, (name, *cells) in enumerate(zip(*texts, strict=True)):
        style = "bold red" if table.states and table.states[row] == OFF else ""
        styled = (Text(cell, style if cell.endswith((*ARROWS, *SYMBOLS.values())) else "") for cell in cells)
        grid.add_row(Text(name, style), *styled)
    title_style = {HEALTHY: "bold green", OFF: "bold red"}.get(table.state, "bold")
    with console.capture() as captured:
        for line in (table.title, *table.notes):
            for part in folded_line(printable(line), width):
                console.print(Text(part, title_style))
        if columns:
            console.print(grid)
        for line in table.below(columns, width):
            console.print(Text(line, "dim"))
    return captured.get().rstrip("\n")
