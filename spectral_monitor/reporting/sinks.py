"""Sinks, the receivers of measurements. A sink that fails does not stop a run."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from spectral_monitor.measurement import Measurement
from spectral_monitor.messages import WarnOnce

MIN_FREE_BYTES = 1 << 22
"""Bytes that must be free on a disk before a sink writes to it: the training needs some too."""


@runtime_checkable
class Sink(Protocol):
    """Takes measurements; any class with these two methods is one.

    Both run in the training process, on rank 0 of several. Errors that they raise become warnings.
    """

    def write(self, measurement: Measurement) -> None:
        """Take the next measurement."""

    def close(self) -> None:
        """End the run: training is over or stopped with an error; another run may follow."""


class Sinks:
    """Several sinks; if one fails, it misses a measurement and there is a warning, nothing else.

    Example:
        >>> class Printer:
        ...     def write(self, measurement): print("step", measurement.step)
        ...     def close(self): print("done")
        >>> sinks = Sinks([Printer()])
        >>> sinks.write(Measurement(5, (), {}, {}))
        step 5
        >>> sinks.close()
        done
    """

    def __init__(self, sinks: Iterable[Sink], warn: WarnOnce | None = None) -> None:
        self._sinks = tuple(sinks)
        self._warn = warn or WarnOnce()

    def write(self, measurement: Measurement) -> None:
        """Write a measurement to all sinks."""
        self._each(lambda sink: sink.write(measurement), "did not take the measurement ({}); training goes on")

    def close(self) -> None:
        """Close all sinks."""
        self._each(lambda sink: sink.close(), "was not closed ({})")

    def _each(self, action: Callable[[Sink], None], failure: str) -> None:
        for sink in self._sinks:
            try:
                action(sink)
            except Exception as error:
                name = getattr(sink, "name", "") or type(sink).__name__
                self._warn(f"{name} {failure.format(f'{type(error).__name__}: {error}')}", error)

    def __len__(self) -> int:
        return len(self._sinks)


def checked_sinks(sinks: Sequence[Sink]) -> tuple[Sink, ...]:
    """Return the sinks as a tuple; raise a TypeError if it is no list, or an item lacks ``write`` or ``close``."""
    if isinstance(sinks, (Sink, str)) or not isinstance(sinks, Iterable):
        raise TypeError(f"sinks must be a list, such as [JSONLinesSink('run.jsonl')], got {sinks!r}")
    for sink in sinks:
        if not isinstance(sink, Sink):
            raise TypeError(f"a sink must have the methods write(measurement) and close(), got {sink!r}")
    return tuple(sinks)


def check_free_space(folder: str | os.PathLike[str]) -> None:
    """Raise an OSError if fewer than 4 MiB are free on a folder's disk; remote folders (``s3://...``) always pass."""
    if not is_remote(folder) and shutil.disk_usage(folder).free < MIN_FREE_BYTES:
        raise OSError(errno.ENOSPC, "no space left to write measurements", str(Path(folder)))


def is_remote(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder is on another machine.

    Example:
        >>> is_remote("s3://bucket/logs"), is_remote("logs")
        (True, False)
    """
    return "://" in str(folder)
