"""The measurements that commands read, and messages about them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from spectral_monitor.measurement import Measurement
from spectral_monitor.reporting.files.records import read_records
from spectral_monitor.reporting.files.runs import run_file, settled_in
from spectral_monitor.reporting.text.lines import printable
from spectral_monitor.suggestions import did_you_mean, listed

LARGE = 50_000_000
"""Bytes from which on a file takes some seconds to read."""


def say(text: str) -> None:
    """Print a message as one line on stderr, so that stdout can go to a file."""
    print(f"spectral-monitor: {printable(text)}", file=sys.stderr)


def records(location: Path) -> tuple[Measurement, ...]:
    """Return the measurements of a run that count, without torch; at least one. Print what is left out.

    Raises:
        ValueError: the file holds no measurements.
        OSError: there is no such file, or it cannot be read.
    """
    measurements, notes = settled_in(find_file(location), read_records)
    for note in notes:
        say(note)
    return measurements


def find_file(location: Path) -> Path:
    """Return the newest file of measurements; print its name if there are others or it is large."""
    path, others = run_file(location)
    if others:
        count = "is one more file" if others == 1 else f"are {others} more files"
        say(f"reading {path}, the newest run; there {count} of measurements in {location}")
    size = path.stat().st_size
    if size > LARGE:
        say(f"reading {path} ({size / 1000000.0:.0f} MB), this takes a moment")
    return path


def at_step(measurements: Sequence[Measurement], step: int | None) -> Measurement:
    """Return the measurement of a step, by default the last one; raise a ValueError if it was not measured."""
    if step is None:
        return measurements[-1]
    of_step = [m for m in measurements if m.step == step]
    if of_step:
        return of_step[-1]
    steps = [m.step for m in measurements]
    nearest = " and ".join(map(str, sorted(sorted(steps, key=lambda other: abs(other - step))[:2])))
    count = "1 step was" if len(steps) == 1 else f"{len(steps)} steps were"
    raise ValueError(f"step {step} was not measured; {count}, from {steps[0]} to {steps[-1]}, nearest {nearest}")


def matching(pattern: str | None, names: Collection[str], kind: str = "layer") -> set[str]:
    """Return the names that match an fnmatch pattern, else those that contain it; all names without a pattern.

    If no name matches, it raises a ValueError with the nearest one.
    """
    if pattern is None:
        return set(names)
    matches = {name for name in names if fnmatchcase(name, pattern)} or {name for name in names if pattern in name}
    if not matches:
        hint = did_you_mean(pattern, names, 0.5)
        raise ValueError(f"no {kind} matches {pattern!r}{hint or ';'} there are {listed(names)}")
    return matches
