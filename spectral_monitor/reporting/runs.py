"""A run's measurements from its folder: which file, and what of it counts."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from spectral_monitor.measurement import Measurement
from spectral_monitor.reporting.jsonlines import FURTHER_FILE, RUN_FILE, read_measurements

WHAT_TO_GIVE = "give the folder of a run that SpectralMonitor has logged, or a file that a JSONLinesSink wrote"


@dataclass(frozen=True)
class Run:
    """What was measured, steps rising.

    Attributes:
        measurements: of the same layers all.
        notes: what was left out, in sentences.
    """

    measurements: tuple[Measurement, ...]
    notes: tuple[str, ...] = ()


def run_file(place: str | os.PathLike[str]) -> tuple[Path, int]:
    """The file of measurements that is meant, and how many others there are.

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
    found = [*place.rglob(RUN_FILE), *place.rglob(FURTHER_FILE.format("*"))]
    if not found:
        raise FileNotFoundError(f"no {RUN_FILE} in {str(place)!r} or its folders; {WHAT_TO_GIVE}")
    newest = max(found, key=lambda path: path.stat().st_mtime).parent
    return min(path for path in found if path.parent == newest), len(found) - 1


def read_run(path: str | os.PathLike[str]) -> Run:
    """What a file of measurements says in the end, see :func:`settled`.

    Raises:
        ValueError: it is no such file, or holds no measurement yet.
        OSError: it cannot be read.
    """
    try:
        run = settled(read_measurements(path))
    except ValueError as error:
        raise ValueError(f"{error}; {WHAT_TO_GIVE}") from error
    if not run.measurements:
        raise ValueError(
            f"no measurement in {str(path)!r}: no step has been measured yet, it was cut short, or it is not what "
            f"spectral_monitor writes; {WHAT_TO_GIVE}"
        )
    return run


def settled(measurements: Iterable[Measurement]) -> Run:
    """The measurements that count.

    A run that is resumed goes some steps back and measures them again, and a script that is run again begins anew: the
    later ones count. If the layers change, as where another model was trained into the same folder, those before are
    left out.

    Example:
        >>> run = settled(Measurement(step, (), {}, {}) for step in (10, 20, 30, 20, 30, 40))
        >>> [measurement.step for measurement in run.measurements]
        [10, 20, 30, 40]
        >>> print(run.notes[0].partition(";")[0])
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
    return Run(tuple(kept), tuple(notes))
