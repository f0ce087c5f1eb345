"""``spectral-monitor show``: one measurement as a table, as JSON or as CSV."""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spectral_monitor.cli.parser import add_layer, add_run, command
from spectral_monitor.cli.reading import at_step, matching, records
from spectral_monitor.reporting.files.json_values import plain
from spectral_monitor.suggestions import did_you_mean

if TYPE_CHECKING:
    from spectral_monitor.measurement import Measurement
    from spectral_monitor.reporting.text.lines import Table


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(
        commands,
        _show,
        "show",
        "Print what is off and what to do, then a table of all layers. In a deep network, healthy layers of one kind "
        "share a row.",
        "examples:\n  spectral-monitor show lightning_logs\n  spectral-monitor show lightning_logs --step 500 --all\n"
        "  spectral-monitor show lightning_logs --layer '*.attn.*' --sort update_natural",
    )
    add_run(parser)
    add_view(parser)
    parser.add_argument("--step", type=int, metavar="N", help="the measurement of this optimizer step, not the last")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="everything as one JSON object")
    form.add_argument("--csv", action="store_true", help="a row for each layer, biases too, a column for each quantity")


def add_view(parser: argparse.ArgumentParser) -> None:
    """Add the options that select and sort the rows of the table."""
    parser.add_argument("--all", action="store_true", help="a row for every layer")
    add_layer(parser)
    parser.add_argument(
        "--sort", metavar="COLUMN", help="by a column, the largest first: its title, or a quantity such as update_ratio"
    )


def _show(args: argparse.Namespace) -> None:
    measurement = at_step(records(args.place), args.step)
    if args.json or args.csv:
        rows = _sorted(_rows(measurement, args.layer), args.sort)
        if args.csv:
            writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")  # None becomes an empty cell
            writer.writeheader()
            writer.writerows(rows)
        else:
            verdicts = [verdict.to_row() for verdict in measurement.verdicts]
            content = {"step": measurement.step, "summary": measurement.summary, "verdicts": verdicts, "layers": rows}
            print(json.dumps(plain(content), indent=2, allow_nan=False))
        return
    print(shown(measurement, args))


def shown(measurement: Measurement, args: argparse.Namespace) -> str:
    """Return the table of a measurement with the options of :func:`add_view`."""
    from spectral_monitor.reporting.text.console import rendered
    from spectral_monitor.reporting.text.table import measurement_rows

    is_selection = args.layer is not None or args.sort is not None
    table = measurement_rows(measurement, folded=not (args.all or is_selection))
    if is_selection:
        table = _selected(table, measurement, args.layer, args.sort)
    return rendered(table)


def _selected(table: Table, measurement: Measurement, pattern: str | None, sort: str | None) -> Table:
    """Return a table with those rows whose layer matches, sorted; ``table`` has a row for each layer."""
    names = table.columns[0].cells
    vectors = [info.name for info in measurement.layers if info.name not in names]
    matches = matching(pattern, [*names, *vectors])
    rows = [i for i, name in enumerate(names) if name in matches]
    if pattern is not None and not rows:
        raise ValueError(f"only biases and gains match {pattern!r}; use --csv or --json to see them")
    if sort is not None:
        keys = _sort_keys(sort, table, measurement)
        rows.sort(key=lambda i: keys[i])
        table = _with_column(sort, table, measurement)
    columns = tuple(replace(column, cells=tuple(column.cells[i] for i in rows)) for column in table.columns)
    return replace(table, columns=columns, states=tuple(table.states[i] for i in rows))


def _with_column(key: str, table: Table, measurement: Measurement) -> Table:
    """Return a table with the column that its rows are sorted by, which is never left out for want of space."""
    from spectral_monitor.reporting.text.lines import Column
    from spectral_monitor.reporting.text.table import number

    columns = [replace(col, spare=0) if key in (col.title, col.quantity) else col for col in table.columns]
    if key in measurement.values and not any(key in (col.title, col.quantity) for col in columns):
        numbers = dict(zip((info.name for info in measurement.layers), measurement.values[key].tolist(), strict=True))
        cells = tuple(number(numbers[name]) if name in numbers else "" for name in columns[0].cells)
        columns.append(Column(key, cells, quantity=key))
    return replace(table, columns=tuple(columns))


def _sort_keys(sort: str, table: Table, measurement: Measurement) -> list[Any]:
    """Return the sort key of each row: numbers from the largest, NaN at the end; texts from a to z."""
    from spectral_monitor.reporting.content.typical import VS_TYPICAL, vs_typical

    indices = {info.name: i for i, info in enumerate(measurement.layers)}
    titles = {column.title: column.quantity for column in table.columns}
    quantity = titles.get(sort) or sort
    if quantity in measurement.values:
        numbers = measurement.values[quantity].tolist()
    elif sort == VS_TYPICAL:
        numbers = vs_typical(measurement)
    elif sort in titles:
        cells = next(column.cells for column in table.columns if column.title == sort)
        return [_order(cell or None) for cell in cells]
    else:
        valid = [*(column.title for column in table.columns if not column.drawn), *measurement.values]
        raise ValueError(f"no column {sort!r}{did_you_mean(sort, valid) or ';'} columns: {', '.join(valid)}")
    return [_order(numbers[indices[name]] if name in indices else None) for name in table.columns[0].cells]


def _order(value: float | str | None) -> tuple[Any, ...]:
    """Return a key that sorts numbers from the largest, then texts from a to z, then missing values."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return (2,)
    return (1, value) if isinstance(value, str) else (0, -value)


def _rows(measurement: Measurement, pattern: str | None) -> list[dict[str, Any]]:
    """Return a dict for each layer: its description, its state, and every quantity, ``None`` where it is NaN."""
    names = matching(pattern, [info.name for info in measurement.layers])
    rows = []
    for info in measurement.layers:
        if info.name in names:
            state = measurement.states.get(info.name)
            rows.append(
                {
                    "step": measurement.step,
                    "layer": info.name,
                    "role": info.role,
                    "fan_in": info.fan_in,
                    "fan_out": info.fan_out,
                    "state": state and state.state,
                    "reason": (state and state.reason) or None,
                    **plain(measurement[info.name]),
                }
            )
    return rows


def _sorted(rows: list[dict[str, Any]], sort: str | None) -> list[dict[str, Any]]:
    if sort is None or not rows:
        return rows
    if sort not in rows[0]:
        raise ValueError(f"no column {sort!r}{did_you_mean(sort, rows[0]) or ';'} columns: {', '.join(rows[0])}")
    return sorted(rows, key=lambda row: _order(row[sort]))
