"""The commands and their arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from textwrap import fill

from spectral_monitor import __version__

COMMANDS = {
    "show": "print the table of a measurement",
    "watch": "show the table while training goes on",
    "list": "print one line for each run",
    "verdicts": "print what is off; the exit status is 1 if anything is",
    "compare": "compare two runs layer by layer",
    "report": "write a page of pictures and tables",
    "export": "write all numbers as CSV or parquet",
    "inspect": "measure the weights of a checkpoint, without training",
    "sweep": "train a network at several widths and print what scales with the width",
    "completion": "print a script that completes commands in a shell",
}
"""Command -> what it does; each is a module of ``cli.commands`` with a function ``add``."""

RUN_HELP = "the folder of a logged run, a folder above it (the newest run is taken), or the file itself"


class HelpFormatter(argparse.HelpFormatter):
    """Help in which sentences fit the window, and indented lines, such as examples, stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Return a description: wrapped sentences, and indented or empty lines unchanged."""
        return "\n".join(line if line.startswith(" ") else fill(line, width) for line in text.split("\n"))

    def _format_action(self, action: argparse.Action) -> str:
        """Return the lines of an argument; of the commands, without a line and an indentation of their own."""
        if isinstance(action, argparse._SubParsersAction):
            return "".join(map(self._format_action, action._get_subactions()))
        return super()._format_action(action)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="spectral-monitor",
        description=(
            "Find the layer that trains too fast, too slowly or not at all, in a run that SpectralMonitor or a "
            "JSONLinesSink has logged."
        ),
        epilog="example:\n  spectral-monitor report lightning_logs/version_0 -o report.html",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        import_module(f"spectral_monitor.cli.commands.{name}").add(commands)
    return parser


def command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    run: Callable[[argparse.Namespace], int | None],
    name: str,
    description: str,
    epilog: str,
) -> argparse.ArgumentParser:
    """Add a command that calls ``run``, without arguments so far."""
    parser = commands.add_parser(
        name,
        help=COMMANDS[name],
        description=description,
        epilog=epilog,
        formatter_class=HelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_run(parser: argparse.ArgumentParser, name: str = "place", metavar: str = "RUN_DIR") -> None:
    """Add the argument that selects a run."""
    parser.add_argument(name, type=Path, metavar=metavar, help=RUN_HELP)


def add_layer(parser: argparse.ArgumentParser) -> None:
    """Add the option that selects layers."""
    parser.add_argument("--layer", metavar="PATTERN", help="only these layers, such as 'h.3.*', or part of a name")
