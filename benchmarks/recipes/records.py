"""Runs of recipes and faults, kept in a folder, so that judging them again takes no training."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from benchmarks.recipes.recipe import Fault, Half, Recipe
from benchmarks.recipes.run import Record, Run, train


def suite(half: Half) -> tuple[tuple[Recipe, ...], tuple[Fault, ...]]:
    """Return the recipes and the faults of one half."""
    if half == "development":
        from benchmarks.recipes import development as chosen
    else:
        from benchmarks.recipes import heldout as chosen
    return chosen.RECIPES, chosen.FAULTS


def healthy(recipe: Recipe, seed: int, width: float = 1.0) -> Run:
    """Return a fresh healthy run."""
    torch.manual_seed(seed)
    return recipe.build(seed, width)


def faulty(fault: Fault, recipes: Iterable[Recipe], seed: int) -> Run:
    """Return a fresh run with the fault planted."""
    recipe = next(recipe for recipe in recipes if recipe.name == fault.recipe)
    run = healthy(recipe, seed, fault.width)
    fault.plant(run)
    return run


def recorded(folder: Path, key: str, make: Callable[[], Run]) -> Record:
    """Return what a run left behind, from the folder if it is there."""
    path = folder / (key.replace("/", "_").replace(" ", "_") + ".pickle")
    if path.exists():
        return pickle.loads(path.read_bytes())
    record = train(make())
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(record))
    part.replace(path)
    return record
