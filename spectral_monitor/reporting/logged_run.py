"""A logged run, read from its file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

from spectral_monitor.measurement import Measurement, counted
from spectral_monitor.reporting.files.runs import run_file, settled_in
from spectral_monitor.reporting.run import MeasuredRun


class Run(MeasuredRun):
    """A logged run; iterating over it yields its measurements, steps rising.

    Attributes:
        notes: sentences on measurements that were left out.
    """

    def __init__(self, measurements: Iterable[Measurement], notes: Sequence[str] = ()) -> None:
        self._measurements = tuple(measurements)
        self.notes = self._notes = tuple(notes)

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Return all measurements; they are of the same layers."""
        return self._measurements

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self._measurements)

    def __len__(self) -> int:
        return len(self._measurements)

    def __repr__(self) -> str:
        if not self._measurements:
            return "Run(measurements=0)"
        first, last = self._measurements[0], self._measurements[-1]
        return f"Run(measurements={len(self)}, steps={first.step} to {last.step}, {counted(last.layers)})"


def load(run: str | os.PathLike[str]) -> Run:
    """Read a run that ``SpectralMonitor`` or a ``JSONLinesSink`` has logged.

    Args:
        run: the folder that it was logged to, or one above it, in which the newest run is taken; or the file itself.

    Raises:
        ValueError: the file was not written by spectral_monitor, or has no measurement yet.
        OSError: there is no such file or folder, or it cannot be read.

    Example:
        >>> load("lightning_logs/version_9999")
        Traceback (most recent call last):
        ...
        FileNotFoundError: there is no file or folder 'lightning_logs/version_9999'; give the folder of a run logged \
by SpectralMonitor, or a file written by a JSONLinesSink
    """
    return read_run(run_file(run)[0])


def read_run(path: str | os.PathLike[str]) -> Run:
    """Return the run in a file: the measurements that count, see :func:`~spectral_monitor.reporting.files.runs.settle`.

    Raises:
        ValueError: the file holds no measurements.
        OSError: the file cannot be read.
    """
    from spectral_monitor.reporting.files.jsonlines import read_measurements  # with torch

    return Run(*settled_in(path, read_measurements))
