"""Measurements in a file of JSON lines, and back again."""

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
from spectral_monitor.reporting.files.records import FORMAT, FURTHER_FILE, RUN_FILE, VERSION, concerning, read_records
from spectral_monitor.reporting.sinks import need_room

DIGITS = 6
"""Of every value; estimates are good to 1 %."""


def run_file_name(place: int) -> str:
    """Return the file name for the n-th monitor of a trainer.

    Example:
        >>> run_file_name(1), run_file_name(2)
        ('spectral_monitor.jsonl', 'spectral_monitor_2.jsonl')
    """
    return RUN_FILE if place == 1 else FURTHER_FILE.format(place)


class JSONLinesSink:
    """Appends every measurement to a file, one line of JSON each, for tools of your own and for ``spectral-monitor``.

    The first line, and one whenever the layers change, describes the layers; every other is a measurement. Its
    ``values`` have a list for each quantity, in the order of the layers, with ``null`` where there is no value. Why
    there is none is in ``reasons``: those that are others than in the last line with that quantity, ``null`` where one
    is gone. The file is opened for each line, so that it may be moved or read at any time.

    Args:
        path: of the file; its folder is made if need be. What is there already stays.
        run: what the first line says of the run, such as ``{"model": "GPT"}``; the page shows it.

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
        """Append a line, and before it one on the layers if they are others than before.

        Raises:
            OSError: the file cannot be written to, or the disk is all but full.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        need_room(self.path.parent)
        known, self._layers = self._layers, None  # until it is written
        lines = []
        if known != measurement.layers or not self.path.exists():  # somebody may have taken it away
            lines, self._reasons, self._quantities = [_header(measurement.layers, self._run)], {}, set()
        there = measurement.values.keys() | measurement.summary.keys()
        self._quantities |= there
        before = concerning(self._reasons, self._quantities - there)
        lines.append(_line(measurement, _changes(before, measurement.reasons)))
        with self.path.open("a+b") as file:
            if is_torn(file):
                lines.insert(0, "")
            file.write("".join(f"{line}\n" for line in lines).encode())
        others = {key: text for key, text in self._reasons.items() if key not in before}
        self._layers, self._reasons = measurement.layers, others | measurement.reasons

    def close(self) -> None:
        """Begin the next run with a line on its layers; no file is open."""
        self._layers = None

    def __repr__(self) -> str:
        return f"JSONLinesSink({str(self.path)!r})"


def _header(layers: Sequence[LayerInfo], run: Mapping[str, str]) -> str:
    about = {"run": run} if run else {}
    return _dump({"format": FORMAT, "version": VERSION, **about, "layers": [asdict(info) for info in layers]})


def _changes(before: dict[str, str], now: dict[str, str]) -> dict[str, str | None]:
    """Return what is new or different, and ``None`` for what is gone; reasons are many, and mostly stay."""
    gone = dict.fromkeys(before.keys() - now.keys())
    return {**{key: text for key, text in now.items() if before.get(key) != text}, **gone}


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
    """Return ``[state, reason, places of the layers]`` for each state and reason; layers are many, states few."""
    place = {info.name: i for i, info in enumerate(measurement.layers)}
    found: dict[LayerState, list[int]] = {}
    for name, state in measurement.states.items():
        if name in place:
            found.setdefault(state, []).append(place[name])
    return [[state.state, state.reason, places] for state, places in found.items()]


def _dump(value: Any) -> str:
    return json.dumps(plain(value), separators=(",", ":"), allow_nan=False)


def _column(values: Tensor) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values.tolist()]


def read_measurements(path: str | os.PathLike[str]) -> Iterator[Measurement]:
    """Read the measurements in a file that a :class:`JSONLinesSink` wrote, in its order, to six digits.

    An incomplete line is left out at the end, as in a file that is being written. It is also left out where another
    run goes on in the same file, as after a process was killed.

    Raises:
        ValueError: it is no such file, or a line in its middle is broken.
        OSError: it cannot be read.
    """
    if Path(path).is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder: spectral_monitor.load finds the run in it")
    return map(_with_tensors, read_records(path))


def _with_tensors(read: Measurement) -> Measurement:
    """Return a measurement with tensors in the place of lists of numbers."""
    values, bands = (
        {key: torch.tensor(some, device="cpu") for key, some in part.items()} for part in (read.values, read.bands)
    )
    return replace(read, values=values, bands=bands)
