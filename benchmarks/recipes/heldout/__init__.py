"""The held-out half: recipes and faults on which no rule was found."""

from __future__ import annotations

from benchmarks.recipes.heldout import (
    convs,
    generative,
    misc,
    sequences,
    text,
    tuning,
    vision,
)
from benchmarks.recipes.heldout.faults import FAULTS as FAULTS
from benchmarks.recipes.recipe import Recipe

MODULES = (
    convs,
    vision,
    text,
    sequences,
    tuning,
    misc,
    generative,
)

RECIPES: tuple[Recipe, ...] = tuple(recipe for module in MODULES for recipe in module.RECIPES)
