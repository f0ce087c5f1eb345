"""``spectral-monitor report``: a page about a whole run."""

from __future__ import annotations

import argparse
from pathlib import Path

from spectral_monitor.cli.parser import add_run, command
from spectral_monitor.cli.reading import find_file, say
from spectral_monitor.reporting.logged_run import read_run


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(
        commands,
        _report,
        "report",
        "Write one HTML file about the whole run: what is off and what to do, heatmaps of layers over steps, and "
        "curves. It opens in any browser, offline. Needs plotly.",
        "example:\n  spectral-monitor report lightning_logs/version_0 -o report.html",
    )
    add_run(parser)
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="default: %(default)s"
    )


def _report(args: argparse.Namespace) -> None:
    from spectral_monitor.reporting.html.page import need_plotly

    need_plotly("a report")
    from spectral_monitor.reporting.files.run_facts import run_facts
    from spectral_monitor.reporting.html.report import write_report
    from spectral_monitor.reporting.limit_run import read_limit

    check_target(args.output)
    file = find_file(args.place)
    run = read_run(file)
    for note in run.notes:
        say(note)
    write_report(run.measurements, args.output, run.notes, read_limit(file), run_facts(file))
    print(wrote(args.output))


def check_target(path: Path) -> None:
    """Raise a ValueError if a file cannot be written: it is a folder, or its folder does not exist."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"cannot write {str(path)!r}: give -o the name of a file in an existing folder")


def wrote(path: Path) -> str:
    """Return the message that a page was written."""
    return f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB); open it in a browser"
