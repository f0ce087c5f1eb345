"""Find the files of runs, and select the measurements that count."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from spectral_monitor.measurement import Measurement
from spectral_monitor.reporting.files.records import FURTHER_FILE, RUN_FILE

WHAT_TO_GIVE = "give the folder of a run logged by SpectralMonitor, or a file written by a JSONLinesSink"


def run_file(location: str | os.PathLike[str]) -> tuple[Path, int]:
    """Return a run's file of measurements, and the number of other files there.

    Args:
        location: the file itself, or a folder to search, with the folders in it. The newest run is taken, and the file
            of its first monitor.

    Raises:
        FileNotFoundError: there is none.
    """
    location = Path(location)
    if location.is_file():
        return location, 0
    if not location.is_dir():
        raise FileNotFoundError(f"there is no file or folder {str(location)!r}; {WHAT_TO_GIVE}")
    files = run_files(location)
    newest = max(files, key=lambda path: path.stat().st_mtime).parent
    return min(path for path in files if path.parent == newest), len(files) - 1


def run_files(folder: Path) -> list[Path]:
    """Return every file of measurements in a folder and the folders in it; raise a FileNotFoundError without any."""
    files = [*folder.rglob(RUN_FILE), *folder.rglob(FURTHER_FILE.format("*"))]
    if not files:
        raise FileNotFoundError(f"no {RUN_FILE} in {str(folder)!r} or its folders; {WHAT_TO_GIVE}")
    return files


def settled_in(
    path: str | os.PathLike[str], read: Callable[[str | os.PathLike[str]], Iterable[Measurement]]
) -> tuple[tuple[Measurement, ...], tuple[str, ...]]:
    """Return the measurements of a file that count, and notes on those that do not.

    Raises:
        ValueError: the file holds no measurements.
        OSError: it cannot be read.
    """
    try:
        measurements, notes = settle(read(path))
    except ValueError as error:
        raise ValueError(f"{error}; {WHAT_TO_GIVE}") from error
    if not measurements:
        raise ValueError(
            f"no measurement in {str(path)!r}: no step has been measured yet, the file was cut short, or "
            f"spectral_monitor did not write it; {WHAT_TO_GIVE}"
        )
    return measurements, notes


def settle(measurements: Iterable[Measurement]) -> tuple[tuple[Measurement, ...], tuple[str, ...]]:
    """Return the measurements that count, and notes on the others.

    A resumed run goes back some steps and measures them again, and a script that runs twice begins again: the later
    measurements count. If the layers change, because another model was logged to the same folder, earlier measurements
    are left out.

    Example:
        >>> kept, notes = settle(Measurement(step, (), {}, {}) for step in (10, 20, 30, 20, 30, 40))
        >>> [measurement.step for measurement in kept]
        [10, 20, 30, 40]
        >>> print(notes[0].partition(";")[0])
        2 measurements were repeated, after a resumption or by another run into the same file
    """
    kept: list[Measurement] = []
    of_other_layers = repeated = 0
    for measurement in measurements:
        if kept and kept[-1].layers != measurement.layers:
            of_other_layers, repeated, kept = of_other_layers + repeated + len(kept), 0, []
        while kept and kept[-1].step >= measurement.step:
            kept.pop()
            repeated += 1
        kept.append(measurement)
    notes = []
    if of_other_layers:
        notes.append(f"{of_other_layers} earlier measurements belong to other layers and are left out.")
    if repeated:
        notes.append(
            f"{repeated} measurements were repeated, after a resumption or by another run into the same file; the "
            "later ones are shown."
        )
    return tuple(kept), tuple(notes)
