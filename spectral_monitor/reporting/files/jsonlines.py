"""Measurements written to and read from a file of JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectral_monitor.measurement import LayerInfo, LayerState, Measurement
from spectral_monitor.reporting.files.json_values import is_torn, plain
from spectral_monitor.reporting.files.records import (
    FORMAT,
    FURTHER_FILE,
    RUN_FILE,
    VERSION,
    read_records,
    without_quantities,
)
from spectral_monitor.reporting.sinks import check_free_space

DIGITS = 6
"""Significant digits of every value; estimates are good to 1 %."""


def run_file_name(number: int) -> str:
    """Return the file name for the first, second, ... monitor of a trainer.

    Example:
        >>> run_file_name(1), run_file_name(2)
        ('spectral_monitor.jsonl', 'spectral_monitor_2.jsonl')
    """
    return RUN_FILE if number == 1 else FURTHER_FILE.format(number)


class JSONLinesSink:
    """Appends every measurement to a file, one line of JSON each, for tools of your own and for ``spectral-monitor``.

    The first line describes the layers; so does a line whenever they change. Every other line is a measurement. Its
    ``values`` have a list for each quantity, in the order of the layers, with ``null`` where there is no value.
    ``reasons`` say why there is none: those that changed since the last line with that quantity, ``null`` for a reason
    that no longer holds. The file is opened for each line, so that it can be moved or read at any time.

    Args:
        path: of the file; its folder is made if necessary. Lines that are there already stay.
        run: facts about the run for the first line, such as ``{"model": "GPT"}``; the page shows them.

    Raises:
        IsADirectoryError: the path is a folder.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "run.jsonl"
        >>> layers = (LayerInfo("head", "readout", 10, 64, (10, 64)),)
        >>> sink = JSONLinesSink(path)
        >>> sink.write(Measurement(50, layers, {"weight_norm": torch.tensor([1.5])}, {"violations": 0.0}))
        >>> [(m.step, m.value("weight_norm", "head")) for m in read_measurements(path)]
        [(50, 1.5)]
    """

    def __init__(self, path: str | os.PathLike[str], run: Mapping[str, str] | None = None) -> None:
        self.path, self._run = Path(path), dict(run or {})
        if self.path.is_dir():
            raise IsADirectoryError(f"{str(self.path)!r} is a folder; JSONLinesSink writes a file")
        self._layers: tuple[LayerInfo, ...] | None = None
        self._reasons: dict[str, str] = {}
        self._quantities: set[str] = set()

    def write(self, measurement: Measurement) -> None:
        """Append a line, and before it one on the layers if they have changed.

        Raises:
            OSError: the file cannot be written to, or the disk is nearly full.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        check_free_space(self.path.parent)
        described, self._layers = self._layers, None  # until the line is written
        lines = []
        if described != measurement.layers or not self.path.exists():  # the file may have been moved
            lines, self._reasons, self._quantities = [_header(measurement.layers, self._run)], {}, set()
        measured = measurement.values.keys() | measurement.summary.keys()
        self._quantities |= measured
        before = without_quantities(self._reasons, self._quantities - measured)
        lines.append(_line(measurement, _changes(before, measurement.reasons)))
        with self.path.open("a+b") as file:
            if is_torn(file):
                lines.insert(0, "")
            file.write("".join(f"{line}\n" for line in lines).encode())
        others = {key: text for key, text in self._reasons.items() if key not in before}
        self._layers, self._reasons = measurement.layers, others | measurement.reasons

    def close(self) -> None:
        """End the run: the next one begins with a line on its layers. No file is open."""
        self._layers = None

    def __repr__(self) -> str:
        return f"JSONLinesSink({str(self.path)!r})"


def _header(layers: Sequence[LayerInfo], run: Mapping[str, str]) -> str:
    about = {"run": run} if run else {}
    return _dump({"format": FORMAT, "version": VERSION, **about, "layers": [asdict(info) for info in layers]})


def _changes(before: dict[str, str], now: dict[str, str]) -> dict[str, str | None]:
    """Return new and changed reasons, and ``None`` for those that are gone; most of many reasons stay the same."""
    gone = dict.fromkeys(before.keys() - now.keys())
    return {key: text for key, text in now.items() if before.get(key) != text} | gone


def _line(measurement: Measurement, reasons: dict[str, str | None]) -> str:
    return _dump(
        {
            "step": measurement.step,
            "summary": measurement.summary,
            "values": {key: _column(values) for key, values in measurement.values.items()},
            "bands": {key: [_column(row) for row in rows] for key, rows in measurement.bands.items()},
            "verdicts": [asdict(verdict) for verdict in measurement.verdicts],
            "states": _states(measurement),
            "flags": measurement.flags,
            "reasons": reasons,
        }
    )


def _states(measurement: Measurement) -> list[list[Any]]:
    """Return ``[state, reason, indices of the layers]`` for each state and reason; layers are many, states few."""
    indices = {info.name: i for i, info in enumerate(measurement.layers)}
    groups: dict[LayerState, list[int]] = {}
    for name, state in measurement.states.items():
        if name in indices:
            groups.setdefault(state, []).append(indices[name])
    return [[state.state, state.reason, layers] for state, layers in groups.items()]


def _dump(value: Any) -> str:
    return json.dumps(plain(value), separators=(",", ":"), allow_nan=False)


def _column(values: Tensor) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values.tolist()]


def read_measurements(path: str | os.PathLike[str]) -> Iterator[Measurement]:
    """Read the measurements in a file that a :class:`JSONLinesSink` wrote, in its order, to six digits.

    An incomplete last line is left out, for the file may still be written. So is an incomplete line before the line
    where another run begins, such as after a process was killed.

    Raises:
        ValueError: the file was not written by a sink, or another line is broken.
        OSError: the file cannot be read.
    """
    if Path(path).is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder: spectral_monitor.load finds the run in it")
    return map(_with_tensors, read_records(path))


def _with_tensors(record: Measurement) -> Measurement:
    """Return a measurement with tensors in place of lists of numbers."""
    values, bands = (
        {key: torch.tensor(numbers, device="cpu") for key, numbers in columns.items()}
        for columns in (record.values, record.bands)
    )
    return replace(record, values=values, bands=bands)
