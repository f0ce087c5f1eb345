"""Sinks: the receivers of measurements. A sink that fails does not stop a run."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from spectral_monitor.measurement import Measurement
from spectral_monitor.messages import WarnOnce

ROOM = 1 << 22
"""Bytes that must be free on a disk before something is written to it: others want to go on writing too."""


@runtime_checkable
class Sink(Protocol):
    """Takes measurements; any class with these two methods will do.

    Both run in the training process, on the first of several. What they raise becomes a warning.
    """

    def write(self, measurement: Measurement) -> None:
        """Take the next measurement."""

    def close(self) -> None:
        """End the run: training is over or has stopped on an error; another run may follow."""


class Sinks:
    """Several sinks; one that fails costs a warning and what it was to be given, nothing else.

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
        """Give all of them the next measurement."""
        self._each(lambda sink: sink.write(measurement), "did not take the measurement ({}); training goes on")

    def close(self) -> None:
        """Tell all of them that it is over."""
        self._each(lambda sink: sink.close(), "was not closed ({})")

    def _each(self, do: Callable[[Sink], None], otherwise: str) -> None:
        for sink in self._sinks:
            try:
                do(sink)
            except Exception as error:
                name = getattr(sink, "name", "") or type(sink).__name__
                self._warn(f"{name} {otherwise.format(f'{type(error).__name__}: {error}')}", error)

    def __len__(self) -> int:
        return len(self._sinks)


def checked_sinks(sinks: Sequence[Sink]) -> tuple[Sink, ...]:
    """Return the sinks, checked.

    Raises:
        TypeError: one has no ``write`` or no ``close``.
    """
    if isinstance(sinks, (Sink, str)) or not isinstance(sinks, Iterable):
        raise TypeError(f"sinks must be a list, such as [JSONLinesSink('run.jsonl')], got {sinks!r}")
    for sink in sinks:
        if not isinstance(sink, Sink):
            raise TypeError(f"a sink must have the methods write(measurement) and close(), got {sink!r}")
    return tuple(sinks)


def need_room(folder: str | os.PathLike[str]) -> None:
    """Leave a disk alone that is nearly full; a folder of another machine (``s3://...``) is not looked at.

    Raises:
        OSError: fewer than 4 MiB are free, or there is no such folder.
    """
    if not is_remote(folder) and shutil.disk_usage(folder).free < ROOM:
        raise OSError(errno.ENOSPC, "no space left to write measurements", str(Path(folder)))


def is_remote(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder is on another machine.

    Example:
        >>> is_remote("s3://bucket/logs"), is_remote("logs")
        (True, False)
    """
    return "://" in str(folder)
