"""Text on its way to the console."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from spectral_monitor.callbacks.lightning_packages import package_of, rank_zero_only
from spectral_monitor.engine.schedule import Timetable
from spectral_monitor.layers import Anatomy
from spectral_monitor.measurement import Measurement
from spectral_monitor.messages import in_lines
from spectral_monitor.reporting.text.console import in_words, nothing_measured, page_command, rendered
from spectral_monitor.reporting.text.role_table import role_rows
from spectral_monitor.reporting.text.table import measurement_rows

if TYPE_CHECKING:
    import lightning.pytorch as pl


NO_LOGGER = (
    "spectral monitor: the Trainer has no logger: measurements are kept in monitor.measurements, and the last one is "
    "printed at the end"
)


@rank_zero_only
def show(text: str) -> None:
    """Print, on the first process."""
    print(f"\n{text}\n", flush=True)


@rank_zero_only
def tell(trainer: pl.Trainer, text: str) -> None:
    """Print a sentence among Lightning's lines."""
    logging.getLogger(f"{package_of(trainer).__name__}.spectral_monitor").info(in_lines(text))


def shortest_path(folder: Path) -> str:
    """Return the relative path of a folder, or the full path if that is shorter."""
    try:
        relative = os.path.relpath(folder)
    except ValueError:  # another drive
        return str(folder)
    return min(relative, str(folder), key=len)


def checked_verbose(verbose: object) -> int:
    """Return the setting as an integer; raise a ValueError if it is none of 0, 1 and 2."""
    if verbose not in (0, 1, 2):
        raise ValueError(f"verbose must be 0, 1 or 2, got {verbose!r}")
    return int(verbose)


class ConsoleReport:
    """Text about a fit: the roles of layers, the last table, and the cost of measuring.

    Args:
        verbose: 0 for no text; 1 for tables in which a layer of every block shares one row; 2 for a row per matrix.
        steps: schedule of measurements, as the user gave it.
        timetable: the same for each quantity.
    """

    def __init__(self, verbose: int, steps: object, timetable: Timetable) -> None:
        self._verbose, self._steps, self._timetable = verbose, steps, timetable
        self.begin()

    def begin(self, step: int = 0) -> None:
        """Start the clock when training begins, or goes on after ``step`` optimizer steps."""
        self._started, self._spent, self._first = perf_counter(), 0.0, step

    def spend(self, seconds: float) -> None:
        """Add to the time spent on measuring."""
        self._spent += seconds

    def tell(self, trainer: pl.Trainer, text: str) -> None:
        """Print a sentence among Lightning's lines."""
        if self._verbose:
            tell(trainer, text)

    def show_roles(self, anatomy: Anatomy) -> None:
        """Print the table of layers and their roles."""
        if self._verbose:
            show(rendered(role_rows(anatomy, folded=self._verbose < 2, when=in_words(self._steps))))

    def end(self, trainer: pl.Trainer, measurements: Sequence[Measurement], folder: Path | None) -> None:
        """Print the last table, if anything was measured, and the cost of measuring.

        ``folder``: of the run, if there is one.
        """
        if not self._verbose:
            return
        steps = trainer.global_step
        if not measurements:
            following = self._timetable.after(steps) if trainer.lightning_module.automatic_optimization else 0
            show(nothing_measured(steps - self._first, self._first, self._steps, following))
            return
        latest = measurements[-1]
        show(rendered(measurement_rows(latest, folded=self._verbose < 2, earlier=measurements, steps=steps)))
        share = self._spent / max(perf_counter() - self._started, 1e-9)
        self.tell(trainer, f"spectral monitor: measuring took {100 * share:.2g} % of training time")
        if folder is not None:
            self.tell(trainer, page_command(shortest_path(folder)))
