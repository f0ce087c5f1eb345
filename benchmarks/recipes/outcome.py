"""Outcomes of a half of the suite: what was flagged, found, named and mended, one row for each run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from scipy.stats import beta
from tqdm import tqdm

from benchmarks.recipes.advice import change, follow
from benchmarks.recipes.judged import ReportedRoot, judged, right
from benchmarks.recipes.recipe import Fault, Half, Recipe
from benchmarks.recipes.records import faulty, healthy, recorded, suite
from benchmarks.recipes.run import Record
from spectral_monitor.condition import SpectralCondition, save_profile

SEEDS = (0, 1)
"""Of healthy runs; faults are planted in the first."""
MORE = (1, 2, 3, 4)
"""Further seeds for advice that made it worse with the first."""
RUINS, COSTS = 0.10, 0.03
"""Loss at the end, relative to that of the healthy run, from which a fault ruins or costs."""
WORSE = 0.03
"""Advice makes it worse where the loss ends higher than without it by more than this part."""


@dataclass(frozen=True)
class Healthy:
    """A healthy run."""

    recipe: Recipe
    seed: int
    record: Record
    roots: Sequence[ReportedRoot]


@dataclass(frozen=True)
class Faulty:
    """A run with a fault.

    Attributes:
        cost: loss at the end relative to the healthy run's, minus 1.
        right_root: the first root with a right cause; ``None`` if there is none.
        advised: loss with the advice of the first root followed, relative to that without, minus 1; NaN without advice;
            where it made things worse, the mean of five seeds.
    """

    fault: Fault
    record: Record
    cost: float
    roots: Sequence[ReportedRoot]
    right_root: ReportedRoot | None
    advised: float

    @property
    def kind(self) -> str:
        """``"ruins"``, ``"costs"`` or ``"harmless"``."""
        return "ruins" if self.cost > RUINS else "costs" if self.cost > COSTS else "harmless"


def healthy_runs(half: Half, folder: Path) -> list[Healthy]:
    """Return every healthy run of a half, trained unless the folder has its record."""
    recipes, _ = suite(half)
    runs = []
    for recipe, seed in tqdm([(r, s) for r in recipes for s in SEEDS], desc=f"healthy, {half}", unit="run"):
        record = recorded(folder, f"healthy/{recipe.name}/{seed}", lambda r=recipe, s=seed: healthy(r, s))
        runs.append(Healthy(recipe, seed, record, judged(record)))
    return runs


def faulty_runs(half: Half, folder: Path, base: Sequence[Healthy]) -> list[Faulty]:
    """Return every faulty run of a half, its advice followed in a run of its own."""
    recipes, faults = suite(half)
    ends = {run.recipe.name: run.record for run in base if run.seed == SEEDS[0]}
    runs = []
    for fault in tqdm(faults, desc=f"faults, {half}", unit="fault"):
        key = f"fault/{fault.recipe}--{fault.name}"
        record = recorded(folder, key, lambda f=fault: faulty(f, recipes, SEEDS[0]))
        condition = SpectralCondition()
        if fault.width != 1:  # a narrow run's profile is what tells of width
            condition = SpectralCondition(reference=_profile(folder, fault.recipe, ends[fault.recipe]))
        roots = judged(record, condition)
        cost = change(ends[fault.recipe].end, record.end)
        advised = _advised(folder, key, roots[0], fault, recipes, record) if roots else math.nan
        if advised > WORSE:  # by chance? Then other seeds will not have it
            others = [recorded(folder, f"{key}--{s}", lambda f=fault, s=s: faulty(f, recipes, s)) for s in MORE]
            repeated = [
                _advised(folder, key, roots[0], fault, recipes, r, s) for r, s in zip(others, MORE, strict=True)
            ]
            advised = fmean([advised, *repeated])
        runs.append(Faulty(fault, record, cost, roots, right(fault, list(roots)), advised))
    return runs


def _advised(
    folder: Path,
    key: str,
    root: ReportedRoot,
    fault: Fault,
    recipes: Iterable[Recipe],
    record: Record,
    seed: int = SEEDS[0],
) -> float:
    """Return how the loss changes where the first root's advice is followed; NaN if it gives none."""
    run = faulty(fault, recipes, seed)
    if not follow(root.verdict, fault, run):
        return math.nan
    remedy = root.verdict.remedy
    key = f"{key}--{root.verdict.cause}--{remedy.action if remedy else ''}--{remedy.value if remedy else 0:.3g}"
    key += "--spared" if remedy is not None and remedy.spared else ""
    key += f"--{seed}" if seed != SEEDS[0] else ""
    return change(record.end, recorded(folder, key, lambda: run).end)


def _profile(folder: Path, name: str, record: Record) -> Path:
    path = folder / f"{name.replace('/', '_')}.json"
    save_profile(record.measurements, path, settings=record.settings[-1])
    return path


@dataclass(frozen=True)
class Share:
    """So many of so many, with a Clopper-Pearson interval of 95 %."""

    name: str
    hits: int
    total: int
    goal: str

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper end."""
        k, n = self.hits, self.total
        low = float(beta.ppf(0.025, k, n - k + 1)) if k else 0.0
        high = float(beta.ppf(0.975, k + 1, n - k)) if k < n else 1.0
        return low, high


def shares(base: Sequence[Healthy], runs: Sequence[Faulty]) -> Iterator[Share]:
    """Yield the figures that the suite is judged by."""
    names = sorted({run.recipe.name for run in base})
    flagged = {run.recipe.name for run in base if run.roots}
    meant = {run.recipe.name for run in base if run.recipe.deliberate}
    yield Share("healthy recipes flagged", len(flagged - meant), len(names), "at most 1 in 20")
    single = [run for run in runs if run.fault.factor]
    for low, high, goal in ((10, 10, "80 %"), (30, 30, "95 %"), (100, 100, "all"), (3, 3, "-")):
        for up in (True, False):
            group = [run for run in single if _is(run.fault.factor, low, high, up)]
            if group:
                sign = "x" if up else "/"
                yield Share(f"one layer's rate {sign}{low} found", sum(bool(r.roots) for r in group), len(group), goal)
    ruins, costs = ([run for run in runs if run.kind == kind] for kind in ("ruins", "costs"))
    yield Share("faults that ruin the run found", sum(bool(run.roots) for run in ruins), len(ruins), "85 %")
    yield Share("faults that cost 3 to 10 % found", sum(bool(run.roots) for run in costs), len(costs), "50 %")
    named = [run for run in runs if run.roots and run.fault.causes != ("unknown",)]
    yield Share(
        "faults found, with a right cause", sum(run.right_root is not None for run in named), len(named), "80 %"
    )
    advised = [run for run in runs if not math.isnan(run.advised)]
    yield Share("advice followed that made it worse", sum(r.advised > WORSE for r in advised), len(advised), "0")
    dead = [run for run in runs if _diverges(run.record) is not None]
    in_time = [run for run in dead if any(root.at <= (_diverges(run.record) or 0) for root in run.roots)]
    yield Share("divergence reported when it shows or before", len(in_time), len(dead), "all")


def first_words(runs: Sequence[Faulty]) -> list[int]:
    """Return the step of the first verdict of every fault that was found."""
    return sorted(run.roots[0].step for run in runs if run.roots)


def _is(factor: float, low: float, high: float, up: bool) -> bool:
    size = factor if up else 1 / factor
    return low * 0.9 < size < high * 1.1


def _diverges(record: Record) -> int | None:
    """Return the number of the first measurement whose weights or updates are not finite; ``None`` if all are."""
    for at, measurement in enumerate(record.measurements, 1):
        matrices = [i for i, info in enumerate(measurement.layers) if info.role != "vector"]
        for key in ("update_fro", "weight_fro"):
            reasons = [measurement.why(key, measurement.layers[i].name) for i in matrices]
            if measurement.values[key][matrices].isinf().any() or any("NaN or inf" in text for text in reasons):
                return at
    return None
