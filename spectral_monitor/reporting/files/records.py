"""Measurements as a file of JSON lines has them: plain numbers, read without torch."""

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
READ = (1, 2)
"""Versions that are read; the first has neither states nor roots."""
RUN_FILE = "spectral_monitor.jsonl"
"""What the callback names its file in the folder of a run."""
FURTHER_FILE = "spectral_monitor_{}.jsonl"
"""That of a second monitor, and so on."""


class Numbers(list[Any]):
    """Numbers in the place of a tensor, with the one method that tables ask of it."""

    def tolist(self) -> list[Any]:
        """Return them as a list."""
        return self


def read_records(path: str | os.PathLike[str]) -> Iterator[Measurement]:
    """Yield what :func:`~spectral_monitor.reporting.read_measurements` does, without torch.

    Values and bands are :class:`Numbers`. What is left out, and what is raised, is said there.
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
                    told = {key: read_as(str | None, text) for key, text in row["reasons"].items()}
                    reasons = {key: text for key, text in {**reasons, **told}.items() if text is not None}
                    there = row["values"].keys() | row["summary"].keys()
                    quantities |= there
                    others = quantities - there
                    record = _record(row, layers, concerning(reasons, others))
            except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                broken = broken or ValueError(
                    f"{str(path)!r}, line {number}: not what spectral_monitor writes ({type(error).__name__}: {error})"
                )
            if record is not None:
                if broken is not None:
                    raise broken
                yield record
    if broken is not None and (layers is None or line.endswith("\n")):
        raise broken


def concerning(reasons: dict[str, str], others: Container[str]) -> dict[str, str]:
    """Return all but those of quantities that only other lines measured, which are kept for when they are again."""
    return {key: text for key, text in reasons.items() if key.partition("/")[0] not in others}


def _layers(row: dict[str, Any]) -> tuple[LayerInfo, ...]:
    if row["format"] != FORMAT or row["version"] not in READ:
        versions = " or ".join(map(str, READ))
        raise ValueError(f"format {row['format']!r} version {row['version']!r}, expected {FORMAT!r} version {versions}")
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
        states=_states(row.get("states", []), layers),
        bands=cast(
            Any, {key: Numbers(list(map(value_of, limits)) for limits in rows) for key, rows in row["bands"].items()}
        ),
    )


def _states(rows: list[list[Any]], layers: tuple[LayerInfo, ...]) -> dict[str, LayerState]:
    """Return the state of each layer that has one, in the order of the layers."""
    several = read_as(tuple[tuple[str, str, tuple[int, ...]], ...], rows)
    known = {place: LayerState(state, reason) for state, reason, places in several for place in places}
    return {layers[place].name: known[place] for place in sorted(known)}
