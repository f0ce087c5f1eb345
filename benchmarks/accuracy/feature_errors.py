"""Whether few samples say what all of them say: features at the defaults against all rows of the whole batch.

    python -m benchmarks.accuracy.feature_errors                     # held-out recipes, some ten minutes on 2 cores
    python -m benchmarks.accuracy.feature_errors --half development  # the half that standard errors were tried on

Two probes watch the same steps of every recipe, one at the defaults, one with ``max_rows=None`` and
``replay_samples=None``. A difference counts as held if it is within three of the standard errors that the first one
gives. Stable ranks have no standard error: of them the page says how far they were off.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from benchmarks.recipes import development, heldout
from benchmarks.recipes.recipe import Recipe
from spectral_monitor import Measurement, SpectralProbe

STEPS = (1, 2, 4, 8, 16, 32)
KEYS = (
    *("feature_rms", "feature_change", "feature_change_local", "alignment", "update_alignment", "bfa_cos"),
    *("sensitivity", "input_stable_rank", "backward_stable_rank"),
)
PAGE = """# Features from few rows

Features are measured on at most 512 rows, and the forward after the step is run on a few samples
([how](how_it_works.md#the-first-samples-alone)). Each number that is measured this way has a standard error in
`Measurement.errors`. `summary/feature_error` is the largest relative error of `feature_change`. This page tests how far
you can trust these errors.

The test uses recipes that played no part in choosing how many samples to take: language models, transformers,
convolutional networks, perceptrons and autoencoders, under eight optimizers. Two probes watched the same steps, one at
the defaults, one with all rows of the whole batch.

*Within three standard errors*: the share of numbers that differ from those of all rows by three standard errors or
less. *Median error*: the standard error, relative to the number. It is large for `bfa_cos` and `sensitivity` of layers
whose cosine is near zero: there the difference from all rows is most of the number. Small batches are run whole; then
only quantities that are read off inputs use some of the rows.

Made by `benchmarks/accuracy/feature_errors.py --write docs/feature_errors.md`.
"""
ROUNDING = 1e-4
"""Relative difference that comes of rounding, and of spectral norms that are known to a tolerance."""
TOLERANCE = 1e-3


class Pair(NamedTuple):
    """One number twice: what few rows and what all rows say, and the standard error of the first."""

    key: str
    few: float
    every: float
    error: float

    @property
    def within_error(self) -> bool:
        """Return whether the difference is within three standard errors."""
        return abs(self.few - self.every) <= 3 * self.error + (ROUNDING + TOLERANCE) * abs(self.every)

    @property
    def off(self) -> float:
        """Return the relative difference."""
        return abs(self.few / self.every - 1) if self.every else math.inf


def pairs(few: Measurement, every: Measurement) -> list[Pair]:
    """Return the numbers of one step that both have."""
    numbers = []
    for key in KEYS:
        errors = few.errors.get(key, torch.full_like(few.values[key], math.nan))
        rows = zip(few.values[key].tolist(), every.values[key].tolist(), errors.tolist(), strict=True)
        numbers += [Pair(key, *row) for row in rows if math.isfinite(row[0]) and math.isfinite(row[1])]
    return numbers


def watch(recipe: Recipe) -> tuple[list[Pair], float]:
    """Return the numbers of some steps of a recipe, and the share of the batch that was run again."""
    run = recipe.build(0, 1.0)
    shared = {"quantities": list(KEYS), "mode": "observe", "roles": run.roles or None, "tol": TOLERANCE}
    few = SpectralProbe(run.model, run.optimizers, every_n_steps=1, **shared)
    every = SpectralProbe(run.model, run.optimizers, every_n_steps=1, max_rows=None, replay_samples=None, **shared)
    base = [group["lr"] for group in run.groups()]
    numbers: list[Pair] = []
    for step in range(max(STEPS)):
        for group, lr in zip(run.groups(), base, strict=True):
            group["lr"] = lr * run.schedule(step)
        if step + 1 in STEPS:
            with every.step(), few.step():
                run.step()
            if few.latest is not None and every.latest is not None:
                numbers += pairs(few.latest, every.latest)
        else:
            run.step()
        run.after_step()
    samples = few._engine.features.replays.subset
    return numbers, 0.0 if samples.portion is None else samples.portion.samples / samples.portion.batch


def page(pairs_by_recipe: Mapping[str, list[Pair]], shares: Mapping[str, float]) -> str:
    """Return the tables in Markdown."""
    every = [pair for key_pairs in pairs_by_recipe.values() for pair in key_pairs]
    counted = [pair for pair in every if not math.isnan(pair.error)]
    inside = sum(pair.within_error for pair in counted)
    lines = [
        f"{len(counted)} numbers with standard errors, of {len(pairs_by_recipe)} recipes: "
        f"{inside / len(counted):.2%} within three",
        "",
        "| quantity | numbers | within three standard errors | median error | median difference | 95 % are below |",
        "|---|---|---|---|---|---|",
    ]
    for key in KEYS:
        key_pairs = [pair for pair in every if pair.key == key]
        with_error = [pair for pair in key_pairs if not math.isnan(pair.error)]
        inside = sum(pair.within_error for pair in with_error)
        share = f"{inside / len(with_error):.2%}" if with_error else "no standard error"
        sizes = torch.tensor([pair.error / abs(pair.every) for pair in with_error if pair.every] or [math.nan])
        off = torch.tensor([pair.off for pair in key_pairs if math.isfinite(pair.off)])
        size = f"{float(sizes.median()):.1%}" if with_error else ""
        row = (key, len(key_pairs), share, size, f"{float(off.median()):.1%}")
        lines.append(f"| {' | '.join(map(str, row))} | {float(off.quantile(0.95)):.0%} |")
    partial = {name: share for name, share in shares.items() if share}
    lines += ["", f"{len(partial)} of {len(shares)} recipes run a part of the batch again: {_parts(partial)}"]
    return "\n".join(lines)


def _parts(part: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in part.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=("development", "held out"), default="held out")
    parser.add_argument("--only", help="recipes whose name contains this")
    parser.add_argument("--write", type=Path, help="Markdown page to write")
    args = parser.parse_args()
    recipes = heldout.RECIPES if args.half == "held out" else development.RECIPES
    pairs_by_recipe: dict[str, list[Pair]] = defaultdict(list)
    shares: dict[str, float] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for recipe in tqdm([recipe for recipe in recipes if (args.only or "") in recipe.name], unit="recipe"):
            pairs_by_recipe[recipe.name], shares[recipe.name] = watch(recipe)
    text = page(pairs_by_recipe, shares)
    if args.write:
        args.write.write_text(f"{PAGE}\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
