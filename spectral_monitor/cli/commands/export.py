"""``spectral-monitor export``: every number of a run, for other tools."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from spectral_monitor.cli.commands.report import check_target
from spectral_monitor.cli.parser import add_layer, add_run, command
from spectral_monitor.cli.reading import matching, records
from spectral_monitor.reporting.files.long_format import COLUMNS, frame, long_rows

SUFFIXES = (".csv", ".parquet")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(
        commands,
        _export,
        "export",
        f"Write one row per number: {', '.join(COLUMNS)}. NaN has no row. Parquet needs pandas and pyarrow.",
        "examples:\n  spectral-monitor export lightning_logs > run.csv\n"
        "  spectral-monitor export lightning_logs -o run.parquet --quantity update_ratio",
    )
    add_run(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=".csv or .parquet; CSV on stdout without it")
    add_layer(parser)
    parser.add_argument("--quantity", metavar="PATTERN", help="only these quantities")


def _export(args: argparse.Namespace) -> None:
    if args.output is not None:
        if args.output.suffix not in SUFFIXES:
            raise ValueError(f"cannot write {str(args.output)!r}: give -o a name that ends in .csv or .parquet")
        check_target(args.output)
        if args.output.suffix == ".parquet" and not (find_spec("pandas") and find_spec("pyarrow")):
            raise ImportError("parquet needs pandas and pyarrow: pip install pandas pyarrow; CSV needs neither")
    run = records(args.place)
    layers = matching(args.layer, [info.name for info in run[-1].layers])
    quantities = matching(args.quantity, dict.fromkeys(key for record in run for key in record.values), "quantity")
    rows = (row for row in long_rows(run) if row[1] in layers and row[3] in quantities)
    if args.output is None:
        _write(rows, sys.stdout)
        return
    if args.output.suffix == ".csv":
        with args.output.open("w", newline="", encoding="utf-8") as file:
            count = _write(rows, file)
    else:
        table = frame(rows)
        table.to_parquet(args.output, index=False)
        count = len(table)
    measurements = f"{len(run)} measurements, steps {run[0].step} to {run[-1].step}"
    if len(run) == 1:
        measurements = f"1 measurement, step {run[0].step}"
    print(f"wrote {args.output} ({count} rows of {measurements})")


def _write(rows: Iterator[tuple[int, str, str, str, float]], file: TextIO) -> int:
    """Write CSV and return the number of rows."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    count = 0
    for count, row in enumerate(rows, start=1):  # noqa: B007  the last one is returned
        writer.writerow(row)
    return count
