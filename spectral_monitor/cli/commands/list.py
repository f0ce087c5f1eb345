"""``spectral-monitor list``: the runs in a folder, and what is off in each."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from spectral_monitor.cli.parser import command
from spectral_monitor.cli.reading import say
from spectral_monitor.measurement import Measurement
from spectral_monitor.reporting.content.tally import latest_judged
from spectral_monitor.reporting.content.typical import over_reference
from spectral_monitor.reporting.files.records import RUN_FILE, read_records
from spectral_monitor.reporting.files.runs import WHAT_TO_GIVE, run_files, settled_in
from spectral_monitor.reporting.text.lines import Column, aligned, printable


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(
        commands,
        _list,
        "list",
        "Print one line for each run in a folder, the newest last: the last measured step, what is off and the worst "
        "layer.",
        "example:\n  spectral-monitor list lightning_logs",
    )
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path(), metavar="DIR", help="default: the current folder"
    )


def _list(args: argparse.Namespace) -> None:
    if not args.folder.is_dir():
        raise FileNotFoundError(f"there is no folder {str(args.folder)!r}; {WHAT_TO_GIVE}")
    files = sorted(run_files(args.folder), key=lambda path: (path.stat().st_mtime, path))
    rows = []
    for path in files:
        try:
            rows.append(_row(path, args.folder))
        except (OSError, ValueError) as error:
            say(str(error).partition("; give")[0])
    if not rows:
        raise ValueError(f"none of the {len(files)} files in {str(args.folder)!r} can be read; {WHAT_TO_GIVE}")
    titles = ("run", "last step", "measured", "off", "worst layer")
    columns = [
        Column(title, cells, text=title in ("run", "worst layer"))
        for title, cells in zip(titles, zip(*rows, strict=True), strict=True)
    ]
    print("\n".join(aligned(columns)))


def _row(path: Path, folder: Path) -> tuple[str, ...]:
    run, _ = settled_in(path, read_records)
    judged = latest_judged(run)
    location = path.parent if path.name == RUN_FILE else path
    name = str(location if location == folder else location.relative_to(folder))
    off = "-" if judged is None else str(len(judged.roots))
    return printable(name), str(run[-1].step), str(len(run)), off, "" if judged is None else _worst(judged)


def _worst(record: Measurement) -> str:
    """Return the layer of the first root and its cause, or the layer that is furthest from typical."""
    if record.roots:
        root = record.roots[0]
        return f"{root.layer}: {root.cause.replace('_', ' ')}"
    pairs = zip(record.layers, over_reference(record), strict=True)
    ratios = {info.name: ratio for info, ratio in pairs if 0 < ratio < math.inf}
    if not ratios:
        return ""
    name = max(ratios, key=lambda layer: abs(math.log(ratios[layer])))
    return f"{name} {ratios[name]:.2g}x typical"
