"""Find the files of runs, and say which of their measurements count."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from spectral_monitor.measurement import Measurement
from spectral_monitor.reporting.files.records import FURTHER_FILE, RUN_FILE

WHAT_TO_GIVE = "give the folder of a run that SpectralMonitor has logged, or a file that a JSONLinesSink wrote"


def run_file(place: str | os.PathLike[str]) -> tuple[Path, int]:
    """Return the file of measurements that is meant, and how many others there are.

    Args:
        place: the file itself, or a folder to be searched, the folders in it too; of several the newest is taken, and
            of those of one run that of its first monitor.

    Raises:
        FileNotFoundError: there is none.
    """
    place = Path(place)
    if place.is_file():
        return place, 0
    if not place.is_dir():
        raise FileNotFoundError(f"there is no file or folder {str(place)!r}; {WHAT_TO_GIVE}")
    found = run_files(place)
    newest = max(found, key=lambda path: path.stat().st_mtime).parent
    return min(path for path in found if path.parent == newest), len(found) - 1


def run_files(folder: Path) -> list[Path]:
    """Return every file of measurements in a folder and the folders in it.

    Raises:
        FileNotFoundError: there is none.
    """
    found = [*folder.rglob(RUN_FILE), *folder.rglob(FURTHER_FILE.format("*"))]
    if not found:
        raise FileNotFoundError(f"no {RUN_FILE} in {str(folder)!r} or its folders; {WHAT_TO_GIVE}")
    return found


def settled_in(
    path: str | os.PathLike[str], read: Callable[[str | os.PathLike[str]], Iterable[Measurement]]
) -> tuple[tuple[Measurement, ...], tuple[str, ...]]:
    """Return the measurements of a file that count, and notes on those that do not.

    Raises:
        ValueError: it is no file of measurements, or holds none yet.
        OSError: it cannot be read.
    """
    try:
        kept, notes = settle(read(path))
    except ValueError as error:
        raise ValueError(f"{error}; {WHAT_TO_GIVE}") from error
    if not kept:
        raise ValueError(
            f"no measurement in {str(path)!r}: no step has been measured yet, it was cut short, or it is not what "
            f"spectral_monitor writes; {WHAT_TO_GIVE}"
        )
    return kept, notes


def settle(measurements: Iterable[Measurement]) -> tuple[tuple[Measurement, ...], tuple[str, ...]]:
    """Return the measurements that count, and notes on the others.

    A run that is resumed goes some steps back and measures them again, and a script that is run again begins again: the
    later ones count. If the layers change, as where another model was trained into the same folder, those before are
    left out.

    Example:
        >>> kept, notes = settle(Measurement(step, (), {}, {}) for step in (10, 20, 30, 20, 30, 40))
        >>> [measurement.step for measurement in kept]
        [10, 20, 30, 40]
        >>> print(notes[0].partition(";")[0])
        2 measurements were taken again, after a resumption or by another run into the same file
    """
    kept: list[Measurement] = []
    others = again = 0
    for measurement in measurements:
        if kept and kept[-1].layers != measurement.layers:
            others, again, kept = others + again + len(kept), 0, []
        while kept and kept[-1].step >= measurement.step:
            kept.pop()
            again += 1
        kept.append(measurement)
    notes = []
    if others:
        notes.append(f"{others} earlier measurements are of other layers and left out.")
    if again:
        why = "after a resumption or by another run into the same file"
        notes.append(f"{again} measurements were taken again, {why}; the later ones are shown.")
    return tuple(kept), tuple(notes)
