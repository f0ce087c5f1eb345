"""Sources of measurements for the commands, and what is said about them."""

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
"""Bytes of a file that takes some seconds to read."""


def say(text: str) -> None:
    """Say something on stderr in one line, so that what is printed can go to a file."""
    print(f"spectral-monitor: {printable(text)}", file=sys.stderr)


def records(place: Path, *, quiet: bool = False) -> tuple[Measurement, ...]:
    """Return the measurements of a run that count, without torch; at least one.

    ``quiet``: say nothing about which file is read and what of it is left out.

    Raises:
        ValueError: it is no file of measurements, or has none yet.
        OSError: there is none, or it cannot be read.
    """
    path = find_file(place, quiet=quiet)
    kept, notes = settled_in(path, read_records)
    if not quiet:
        for note in notes:
            say(note)
    return kept


def find_file(place: Path, *, quiet: bool = False) -> Path:
    """Return the file that is meant, and say so where there are others."""
    path, others = run_file(place)
    if quiet:
        return path
    if others:
        more = "is one more file" if others == 1 else f"are {others} more files"
        say(f"reading {path}, the newest; there {more} of measurements in {place}")
    size = path.stat().st_size
    if size > LARGE:
        say(f"{path} has {size / 1e6:.0f} MB, that takes a moment")
    return path


def at_step(measurements: Sequence[Measurement], step: int | None) -> Measurement:
    """Return the measurement of a step, the last one without a step.

    Raises:
        ValueError: that step was not measured; with the nearest ones.
    """
    chosen = [m for m in measurements if step is None or m.step == step]
    if chosen:
        return chosen[-1]
    steps = [m.step for m in measurements]
    near = sorted(steps, key=lambda other: abs(other - (step or 0)))[:2]
    nearest = " and ".join(str(other) for other in sorted(near))
    count = "1 step was" if len(steps) == 1 else f"{len(steps)} steps were"
    raise ValueError(f"step {step} was not measured; {count}, from {steps[0]} to {steps[-1]}, nearest {nearest}")


def matching(pattern: str | None, names: Collection[str], what: str = "layer") -> set[str]:
    """Return the names that an fnmatch pattern fits, or that contain it; all without a pattern.

    Raises:
        ValueError: none does; with the nearest name.
    """
    if pattern is None:
        return set(names)
    fits = {name for name in names if fnmatchcase(name, pattern)} or {name for name in names if pattern in name}
    if not fits:
        hint = did_you_mean(pattern, names, 0.5)
        raise ValueError(f"no {what} matches {pattern!r}{hint or ';'} there are {listed(names)}")
    return fits
