"""A healthy recipe and a planted fault, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from benchmarks.recipes.run import Run

Half = Literal["development", "held out"]


@dataclass(frozen=True)
class Recipe:
    """A model, its data and the hyper-parameters that practitioners publish for it.

    Attributes:
        name: short, unique.
        build: seed and width factor (1 for the recipe's own width) -> run. Everything random follows from the seed.
        half: whether rules may be found on it.
        source: where the hyper-parameters are from, in a few words.
        deliberate: why a verdict would be right although the run is healthy; empty for most.
    """

    name: str
    build: Callable[[int, float], Run]
    half: Half
    source: str = ""
    deliberate: str = ""


@dataclass(frozen=True)
class Fault:
    """A recipe with one thing wrong.

    Attributes:
        name: short, unique.
        recipe: name of the healthy one.
        plant: changes a fresh run.
        causes: codes of causes that are right; the first is the best.
        layers: patterns of the layers to blame; empty where the fault is the network's.
        factor: of a single layer's learning rate, for the table of those; 0 for other faults.
        width: factor on the width before the fault is planted; other than 1, a profile of the healthy run is given
            to the judge.
        mend: what a knowing user would do on reading the right cause, if that is no setting the verdict can name:
            changes a run in which the fault has been planted already, before its first step.
    """

    name: str
    recipe: str
    half: Half
    plant: Callable[[Run], None]
    causes: tuple[str, ...]
    layers: tuple[str, ...] = ()
    factor: float = 0.0
    width: float = 1.0
    mend: Callable[[Run], None] | None = None
