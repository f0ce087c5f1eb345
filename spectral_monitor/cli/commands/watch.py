"""``spectral-monitor watch``: the table of ``show``, again after every measurement."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from spectral_monitor.cli.commands.show import add_view, shown
from spectral_monitor.cli.parser import add_run, command
from spectral_monitor.cli.reading import records
from spectral_monitor.reporting.files.runs import run_file

PAUSE = 10.0
"""Shortest pause between two looks, in multiples of the time that reading takes: large files are read less often."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(
        commands,
        _watch,
        "watch",
        "Show the table of a run while it trains, and switch to the next run in the folder when it begins. Ctrl-C "
        "stops the display, not the training.",
        "example:\n  spectral-monitor watch lightning_logs",
    )
    add_run(parser)
    add_view(parser)
    parser.add_argument(
        "--every", type=_seconds, default=2.0, metavar="SECONDS", help="between two looks; default: %(default)s"
    )


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError
    return number


def _watch(args: argparse.Namespace) -> None:
    run_file(args.place)  # a mistake in the path ends it here
    import spectral_monitor.reporting.text.table  # noqa: F401  now, so that its import does not count as reading

    drawn: tuple[Path, int, int] | None = None
    try:
        with _screen() as draw:
            while True:
                begin = time.perf_counter()
                path = run_file(args.place)[0]
                stat = path.stat()
                state = (path, stat.st_mtime_ns, stat.st_size)
                if state != drawn:
                    try:
                        draw(_page(path, args))
                    except ValueError:
                        if drawn is None:
                            raise
                    drawn = state
                time.sleep(max(args.every, PAUSE * (time.perf_counter() - begin)))
    except KeyboardInterrupt:
        pass


def _page(path: Path, args: argparse.Namespace) -> str:
    """Return the table and a line on its source."""
    run = records(path)
    steps = f"{len(run)} measured, step {run[0].step} to {run[-1].step}"
    return f"{shown(run[-1], args)}\n{path}: {steps}; {time.strftime('%H:%M:%S')}, Ctrl-C to stop"


@contextmanager
def _screen() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a text: in place of the last one on a terminal with rich, else below it."""
    append = partial(print, end="\n\n", flush=True)
    try:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        yield append
        return
    console = Console()
    if not console.is_terminal:
        yield append
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda text: live.update(Text.from_ansi(text), refresh=True)
