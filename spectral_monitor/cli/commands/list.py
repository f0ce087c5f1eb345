"""``spectral-monitor list``: which runs there are, and how they are."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from spectral_monitor.cli.parser import command
from spectral_monitor.cli.reading import records
from spectral_monitor.cli.text import columns, printable, say
from spectral_monitor.reporting.files.records import RUN_FILE, Record
from spectral_monitor.reporting.files.runs import WHAT_TO_GIVE, run_files


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(
        commands,
        "list",
        "Print one line for each run in a folder, the newest last: steps, what is off, the worst layer.",
        "example:\n  spectral-monitor list lightning_logs",
    )
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path(), metavar="DIR", help="default: the current folder"
    )
    parser.set_defaults(run=_list)


def _list(args: argparse.Namespace) -> None:
    if not args.folder.is_dir():
        raise FileNotFoundError(f"there is no folder {str(args.folder)!r}; {WHAT_TO_GIVE}")
    files = sorted(run_files(args.folder), key=lambda path: (path.stat().st_mtime, path))
    if not files:
        raise FileNotFoundError(f"no {RUN_FILE} in {str(args.folder)!r} or its folders; {WHAT_TO_GIVE}")
    rows = []
    for path in files:
        try:
            rows.append(_row(path, args.folder))
        except (OSError, ValueError) as error:
            say(str(error).partition("; give")[0])
    if not rows:
        raise ValueError(f"none of the {len(files)} files in {str(args.folder)!r} can be read; {WHAT_TO_GIVE}")
    titles = ("run", "steps", "measured", "off", "worst layer")
    print("\n".join(columns([titles, *rows], (1, 2, 3))))


def _row(path: Path, folder: Path) -> tuple[str, ...]:
    run = records(path, quiet=True)
    judged = next((record for record in reversed(run) if record.is_judged), None)
    name = path.parent if path.name == RUN_FILE else path
    shown = str(name.relative_to(folder))
    if shown == ".":
        shown = str(name)
    off = "-" if judged is None else str(len(judged.roots))
    return printable(shown), str(run[-1].step), str(len(run)), off, "" if judged is None else _worst(judged)


def _worst(record: Record) -> str:
    """Return the layer of the first root and its cause, or the layer that is furthest from typical."""
    if record.roots:
        root = record.roots[0]
        return f"{root.layer}: {root.cause.replace('_', ' ')}"
    ratios = typical(record)
    if not ratios:
        return ""
    name = max(ratios, key=lambda layer: abs(math.log(ratios[layer])))
    return f"{name} {ratios[name]:.2g}x typical"


def typical(record: Record) -> dict[str, float]:
    """Return layer -> its update over the reference it was held against; only what is positive and finite."""
    values, bands = record.values.get("update_natural"), record.bands.get("update_natural")
    if values is None or bands is None:
        return {}
    found = {}
    for info, value, (_, _, reference) in zip(record.layers, values, bands, strict=True):
        if 0 < value < math.inf and 0 < reference < math.inf:
            found[info.name] = value / reference
    return found
