"""The points of a sweep in files, so that it can be resumed, extended and divided between jobs."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from spectral_monitor.measurement import LayerInfo, Measurement
from spectral_monitor.parametrization.layer_position import LayerPosition
from spectral_monitor.reporting.files.json_values import is_torn, plain, read_as, value_of
from spectral_monitor.scaling.batches import SweepError
from spectral_monitor.scaling.sweeps.point import Point, RunKey

LINE_START = '{"format":"spectral_monitor.sweep","version":1,'
"""The start of every line. Lines are independent: files may be joined, and a truncated line is left out."""


def part_path(path: Path, part: tuple[int, int] | None) -> Path:
    """Return the file of a part, beside that of the sweep: on some file systems jobs cannot share one file.

    Example:
        >>> part_path(Path("sweep.jsonl"), (2, 8)).name
        'sweep.part2of8.jsonl'
    """
    return path if part is None else path.with_name(f"{path.stem}.part{part[0]}of{part[1]}{path.suffix}")


def append(path: Path, point: Point, settings: Mapping[str, Any]) -> None:
    """Add a point, in one write.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        torn = "\n" if is_torn(file) else ""
        row = json.dumps(plain(_row(point, settings)), separators=(",", ":"), allow_nan=False)
        file.write(f"{torn}{LINE_START}{row[1:]}\n".encode())


def read(path: Path, settings: Mapping[str, Any]) -> dict[RunKey, Point]:
    """Return the points in a sweep's file and in those of its parts.

    Raises:
        ValueError: a file is not of a sweep, or of another one; the message names the difference.
        OSError: a file cannot be read.
    """
    if path.is_dir():
        raise SweepError(f"{str(path)!r} is a folder: give the name of a file")
    parts = path.parent.glob(f"{glob.escape(path.stem)}.part*of*{glob.escape(path.suffix)}")
    points: dict[RunKey, Point] = {}
    for file in [path, *sorted(parts)]:
        if file.exists():
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            for point in _points(file, lines, settings):
                points.setdefault(point.key, point)
    return points


def _points(file: Path, lines: Iterable[str], settings: Mapping[str, Any]) -> Iterable[Point]:
    for number, line in enumerate(lines, start=1):
        if not line.startswith(LINE_START) and not LINE_START.startswith(line):
            raise SweepError(
                f"{str(file)!r}, line {number}: not a point of a sweep; give a file of your own to the sweep"
            )
        try:
            row = json.loads(line)
        except ValueError:
            continue  # truncated: a process was killed while it wrote
        stored = row["settings"]
        if stored != settings:
            keys = [key for key in {**stored, **settings} if stored.get(key) != settings.get(key)]
            changes = "; ".join(f"{key}: {stored.get(key)!r} there, {settings.get(key)!r} here" for key in keys)
            raise SweepError(
                f"{str(file)!r} has points of another sweep ({changes}); give another file, or remove that one"
            )
        yield _point(row)


def _row(point: Point, settings: Mapping[str, Any]) -> dict[str, Any]:
    measurements = [
        {
            "step": m.step,
            "values": {key: column.tolist() for key, column in m.values.items()},
            "summary": m.summary,
            "reasons": m.reasons,
        }
        for m in point.measurements
    ]
    return {
        "settings": settings,
        **point.key._asdict(),
        "failure": point.failure,
        "losses": point.losses,
        "layers": [asdict(info) for info in point.layers],
        "places": {name: asdict(position) for name, position in point.places.items()},
        "measurements": measurements,
    }


def _point(row: Mapping[str, Any]) -> Point:
    layers = read_as(tuple[LayerInfo, ...], row["layers"])
    measurements = tuple(
        Measurement(
            step=m["step"],
            layers=layers,
            values={key: torch.tensor([value_of(x) for x in column]) for key, column in m["values"].items()},
            summary={key: value_of(x) for key, x in m["summary"].items()},
            reasons=m["reasons"],
        )
        for m in row["measurements"]
    )
    key = RunKey(row["width"], row["depth"], row["seed"])
    losses = tuple(value_of(loss) for loss in row["losses"])
    positions = {name: LayerPosition(**fields) for name, fields in row["places"].items()}
    return Point(key, measurements, losses, row["failure"], positions)
