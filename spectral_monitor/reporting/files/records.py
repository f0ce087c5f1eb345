"""Measurements read from a file of JSON lines without torch: their values are lists of numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, cast

from spectral_monitor.condition.verdict import Verdict
from spectral_monitor.measurement import LayerInfo, LayerState, Measurement
from spectral_monitor.reporting.files.json_values import read_as, value_of

FORMAT, VERSION = "spectral_monitor.measurements", 2
RUN_FILE = "spectral_monitor.jsonl"
"""Name of the callback's file in the folder of a run."""
FURTHER_FILE = "spectral_monitor_{}.jsonl"
"""Name of the file of a second, third, ... monitor."""


class Numbers(list[Any]):
    """Numbers in place of a tensor, with the one method of tensors that tables call."""

    def tolist(self) -> list[Any]:
        """Return them as a list."""
        return self


def read_records(path: str | os.PathLike[str]) -> Iterator[Measurement]:
    """Yield the measurements of :func:`~spectral_monitor.reporting.read_measurements`, without torch.

    Values and bands are :class:`Numbers`. The same lines are left out and the same errors raised.
    """
    layers: tuple[LayerInfo, ...] | None = None
    reasons: dict[str, str] = {}
    quantities: set[str] = set()
    broken: ValueError | None = None
    with Path(path).open(errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            record = None
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("not an object")
                if "format" in row:
                    layers, reasons, quantities, broken = _layers(row), {}, set(), None
                elif layers is None:
                    raise ValueError("measurements before any layers")
                else:
                    changes = {key: read_as(str | None, text) for key, text in row["reasons"].items()}
                    reasons = {key: text for key, text in {**reasons, **changes}.items() if text is not None}
                    measured = row["values"].keys() | row["summary"].keys()
                    quantities |= measured
                    record = _record(row, layers, without_quantities(reasons, quantities - measured))
            except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                broken = broken or ValueError(
                    f"{str(path)!r}, line {number}: not written by spectral_monitor ({type(error).__name__}: {error})"
                )
            if record is not None:
                if broken is not None:
                    raise broken
                yield record
    if broken is not None and (layers is None or line.endswith("\n")):
        raise broken


def without_quantities(reasons: dict[str, str], quantities: Container[str]) -> dict[str, str]:
    """Return the reasons without those of some quantities, such as those that a line does not measure."""
    return {key: text for key, text in reasons.items() if key.partition("/")[0] not in quantities}


def _layers(row: dict[str, Any]) -> tuple[LayerInfo, ...]:
    if (row["format"], row["version"]) != (FORMAT, VERSION):
        raise ValueError(f"format {row['format']!r} version {row['version']!r}, expected {FORMAT!r} version {VERSION}")
    layers: tuple[LayerInfo, ...] = read_as(tuple[LayerInfo, ...], row["layers"])
    return layers


def _record(row: dict[str, Any], layers: tuple[LayerInfo, ...], reasons: dict[str, str]) -> Measurement:
    for key, column in [*row["values"].items(), *row["bands"].items()]:
        if len(column) != len(layers):
            raise ValueError(f"{len(column)} values of {key} for {len(layers)} layers")
    if any(len(limits) != 3 for rows in row["bands"].values() for limits in rows):
        raise ValueError("a band that is not three numbers")
    return Measurement(
        step=read_as(int, row["step"]),
        layers=layers,
        values=cast(Any, {key: Numbers(map(value_of, column)) for key, column in row["values"].items()}),
        summary={key: value_of(value) for key, value in row["summary"].items()},
        verdicts=read_as(tuple[Verdict, ...], row["verdicts"]),
        reasons=reasons,
        flags={key: value_of(value) for key, value in row["flags"].items()},
        states=_states(row["states"], layers),
        bands=cast(
            Any, {key: Numbers(list(map(value_of, limits)) for limits in rows) for key, rows in row["bands"].items()}
        ),
    )


def _states(rows: list[list[Any]], layers: tuple[LayerInfo, ...]) -> dict[str, LayerState]:
    """Return the state of each layer that has one, in the order of the layers."""
    groups = read_as(tuple[tuple[str, str, tuple[int, ...]], ...], rows)
    states = {i: LayerState(state, reason) for state, reason, indices in groups for i in indices}
    return {layers[i].name: states[i] for i in sorted(states)}
