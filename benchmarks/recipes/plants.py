"""What faults of both halves do to a run."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.recipes.run import Run

Plant = Callable[[Run], None]


def both(*plants: Plant) -> Plant:
    def plant(run: Run) -> None:
        for part in plants:
            part(run)

    return plant


def options(**values: object) -> Plant:
    return lambda run: run.set_option(**values)


def setting(**values: object) -> Plant:
    """Set attributes of the run."""

    def plant(run: Run) -> None:
        for key, value in values.items():
            setattr(run, key, value)

    return plant


def times(factor: float) -> Plant:
    """Multiply the training loss."""

    def plant(run: Run) -> None:
        loss = run.loss
        run.loss = lambda: factor * loss()

    return plant
