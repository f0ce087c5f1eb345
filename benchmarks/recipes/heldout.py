"""The held-out half: recipes and faults on which no rule was found."""

from __future__ import annotations

from recipes import (
    heldout_convs,
    heldout_generative,
    heldout_misc,
    heldout_sequences,
    heldout_text,
    heldout_tuning,
    heldout_vision,
)
from recipes.heldout_faults import FAULTS as FAULTS
from recipes.recipe import Recipe

MODULES = (
    heldout_convs,
    heldout_vision,
    heldout_text,
    heldout_sequences,
    heldout_tuning,
    heldout_misc,
    heldout_generative,
)

RECIPES: tuple[Recipe, ...] = tuple(recipe for module in MODULES for recipe in module.RECIPES)
