"""The command ``spectral-monitor``: a table or a page of what a run has logged, and sweeps over widths."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from spectral_monitor.reporting.runs import Run, read_run, run_file
from spectral_monitor.scaling.sweep_command import add_sweep

LARGE = 50_000_000
"""Bytes of a file that takes some seconds to read."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: its arguments; those of the process if none are given.

    Returns:
        0; 2 where what was asked for cannot be had, which is said on stderr in one sentence.
    """
    args = _parser().parse_args(argv)
    try:
        args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever was reading, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, ImportError) as error:
        print(f"spectral-monitor: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    from spectral_monitor import __version__

    parser = argparse.ArgumentParser(
        prog="spectral-monitor",
        description="Is every layer of a network learning features at the right size? Shows what SpectralMonitor, or a "
        "JSONLinesSink, has logged of a run, or what becomes of a network as it gets wider.",
        epilog="example: spectral-monitor report lightning_logs/version_0 -o report.html",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    show = _command(
        commands,
        "show",
        "print the table of the last measurement",
        "Print what is off and what to do, then how all other layers compare. In a deep network layers that\n"
        "say little by themselves share a row.",
        "examples:\n  spectral-monitor show lightning_logs\n  spectral-monitor show lightning_logs --step 500 --all",
    )
    show.add_argument("--all", action="store_true", help="a row for every layer")
    show.add_argument("--step", type=int, metavar="N", help="the measurement of this optimizer step, not the last")
    show.set_defaults(run=_show)

    report = _command(
        commands,
        "report",
        "write a page of pictures and tables",
        "Write one HTML file about the whole run that opens in any browser, without a network:\n"
        "what is off and what to do, pictures of layer by step, curves. Needs plotly.",
        "example:\n  spectral-monitor report lightning_logs/version_0 -o report.html",
    )
    report.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="default: %(default)s"
    )
    report.set_defaults(run=_report)
    add_sweep(commands)
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, brief: str, description: str, epilog: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=brief,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "place",
        type=Path,
        metavar="RUN_DIR",
        help="the folder a run was logged to, or one above it: of several runs the newest is taken; or the file itself",
    )
    return parser


def _show(args: argparse.Namespace) -> None:
    from spectral_monitor.reporting.console import rendered
    from spectral_monitor.reporting.table import measurement_rows

    run = _read(args.place)
    for note in run.notes:
        _say(note)
    found = [m for m in run.measurements if args.step is None or m.step == args.step]
    if not found:
        steps = [m.step for m in run.measurements]
        near = sorted(steps, key=lambda step: abs(step - args.step))[:2]
        nearest = " and ".join(str(step) for step in sorted(near))
        raise ValueError(
            f"step {args.step} was not measured; {len(steps)} steps were, from {steps[0]} to {steps[-1]}, "
            f"nearest {nearest}"
        )
    print(rendered(measurement_rows(found[-1], folded=not args.all)))


def _report(args: argparse.Namespace) -> None:
    try:
        import plotly  # type: ignore[import-untyped]  # noqa: F401
    except ImportError:
        raise ImportError('a report needs plotly: pip install "spectral-monitor[plots]"') from None
    from spectral_monitor.reporting.limit_run import read_limit
    from spectral_monitor.reporting.report import write_report

    if args.output.is_dir() or not args.output.parent.is_dir():
        raise ValueError(f"cannot write {str(args.output)!r}: give -o the name of a file in a folder that is there")
    run = _read(args.place)
    write_report(run.measurements, args.output, run.notes, read_limit(run_file(args.place)[0]))
    print(f"wrote {args.output} ({args.output.stat().st_size / 1e6:.1f} MB); open it in a browser")


def _read(place: Path) -> Run:
    path, others = run_file(place)
    if others:
        more = "is one more file" if others == 1 else f"are {others} more files"
        _say(f"reading {path}, the newest; there {more} of measurements in {place}")
    size = path.stat().st_size
    if size > LARGE:
        _say(f"{path} has {size / 1e6:.0f} MB, that takes a moment")
    return read_run(path)


def _say(text: str) -> None:
    """On stderr, so that what is printed can go to a file."""
    print(f"spectral-monitor: {text}", file=sys.stderr)
