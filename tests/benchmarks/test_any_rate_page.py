"""The benchmark of learning rates put right: its table against closed forms, and one recipe for real."""

from __future__ import annotations

import math

import pytest

from benchmarks.rates import any_rate
from benchmarks.rates.any_rate import Losses, one, table
from benchmarks.recipes.records import suite


@pytest.fixture
def losses(tmp_path):
    found = Losses(tmp_path / "losses.jsonl")
    for seed in (0, 1):
        for exponent, loss in ((-1, 1.2), (0, 1.1), (1, 1.0), (2, math.inf)):
            found.add(("a", "plain", 2.0**exponent, seed), loss + 0.02 * seed)
            found.add(("b", "plain", 2.0**exponent, seed), 4 * loss)
        for start, loss in ((1.0, 0.9), (100.0, 0.9), (0.01, 0.918)):
            found.add(("a", "corrected", start, seed), loss + 0.02 * seed)
            found.add(("b", "corrected", start, seed), 5 * loss)
        found.add(("a", "Prodigy", 1.0, seed), 2.02)
        found.add(("b", "Prodigy", 1.0, seed), math.nan)
    return found


def test_the_table_is_what_the_losses_make_of_it(losses, tmp_path):
    assert losses.best("a", 2) == (1, pytest.approx(1.01))
    assert losses.best("b", 1) == (1, 4.0)
    lines = table(losses, ["a", "b"], 2)
    a, b = ([cell.strip() for cell in line.split("|")] for line in lines[2:4])
    assert a[1:10] == ["a", "x 2", "1.01", "1.099", "0.91", "0.91", "0.928", "**0.901**", "2.000"]
    assert (b[8], b[9]) == ("**1.125**", ""), "it cannot stand in there"
    told = " ".join(lines[4:])
    assert f"geometric mean **{math.sqrt(0.91 / 1.01 * 1.125):.3f}**" in told
    assert "worst **1.125** (b), 1 of 2 at most 1.03" in told
    assert "end within 2.0% of each other" in told
    assert "Prodigy on the 1 recipes where it can stand in: 2.000 of the best" in told
    again = Losses(tmp_path / "losses.jsonl")
    assert table(again, ["a", "b"], 2) == lines, "from its file"


def test_the_recipes_are_of_the_half_that_says_so():
    for half, names in any_rate.RECIPES.items():
        assert set(names) <= {recipe.name for recipe in suite(half)[0]}
        assert len(names) >= 14


@pytest.mark.slow
def test_a_recipe_ends_alike_from_any_rate():
    ends = [one(("MLP, SGD", "corrected", start, 0), "development")[1] for start in any_rate.STARTS]
    assert max(ends) / min(ends) < 1.05
    far = [one(("MLP, SGD", "plain", start, 0), "development")[1] for start in (1.0, 0.01)]
    assert far[1] > 1.2 * far[0], "which is not so by itself"
    # Without the larger data digits are learnt by heart, and ratios of what little loss is left say nothing.
    assert ends[0] - far[0] < 0.1 * (far[1] - far[0])
