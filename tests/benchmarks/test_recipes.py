"""The recipe suite: its runs train, its faults are planted, and the judge says of them what it should."""

import math

import pytest
import torch

from benchmarks.recipes.advice import change, follow
from benchmarks.recipes.judged import judged, right
from benchmarks.recipes.outcome import Share
from benchmarks.recipes.records import faulty, healthy, suite
from benchmarks.recipes.run import train

RECIPES, FAULTS = suite("development")


def recipe(name):
    return next(one for one in RECIPES if one.name == name)


def fault(recipe, name):
    return next(one for one in FAULTS if (one.recipe, one.name) == (recipe, name))


def test_the_suite_is_as_large_as_it_says_and_every_fault_has_its_recipe():
    for half, least in (("development", (25, 60)), ("held out", (30, 70))):
        recipes, faults = suite(half)
        assert (len(recipes), len(faults)) >= least
        assert len({one.name for one in recipes}) == len(recipes)
        assert {one.recipe for one in faults} <= {one.name for one in recipes}
        assert len({(one.recipe, one.name) for one in faults}) == len(faults)
        assert {one.half for one in (*recipes, *faults)} == {half}


def test_a_run_follows_from_its_seed_and_evaluating_changes_nothing():
    ends = []
    for looks in (1, 3):
        run = healthy(recipe("MLP, Adam"), 0)
        for _ in range(looks):
            run.evaluate()
        ends.append(train(run, steps=20).end)
    assert ends[0] == ends[1] != train(healthy(recipe("MLP, Adam"), 1), steps=20).end


def test_a_healthy_run_is_not_flagged_and_ends_well():
    record = train(healthy(recipe("MLP, Adam"), 0))
    assert judged(record) == []
    assert record.end < 0.1 * record.begin


@pytest.mark.parametrize("name", ["all rates x30", "layers.2 at 100 times the rate"])
def test_a_fault_is_named_and_its_advice_is_followed(name):
    planted = fault("MLP, Adam", name)
    told = judged(train(faulty(planted, RECIPES, 0)))
    found = right(planted, told)
    assert found is not None
    assert found.step <= 8
    run = faulty(planted, RECIPES, 0)
    before = [group["lr"] for group in run.groups()]
    assert follow(found.verdict, planted, run)
    assert [group["lr"] for group in run.groups()] != before
    if "100" in name:
        assert {round(group["lr"], 9) for group in run.groups()} == {0.002}, "the recipe's own"


def test_advice_that_cannot_be_followed_is_none():
    planted = fault("MLP, Adam", "all rates x30")
    told = judged(train(faulty(planted, RECIPES, 0), steps=16))
    run = faulty(planted, RECIPES, 0)
    without = type(told[0].verdict)(**{**vars(told[0].verdict), "remedy": None})
    assert not follow(without, planted, run)


def test_a_share_has_its_exact_interval():
    """Clopper and Pearson's intervals of 0 of 10 and of 5 of 10, from tables."""
    assert Share("", 0, 10, "").interval == pytest.approx((0.0, 0.3085), abs=1e-4)
    assert Share("", 5, 10, "").interval == pytest.approx((0.1871, 0.8129), abs=1e-4)


def test_changes_of_losses_that_are_not_finite():
    assert change(2.0, 3.0) == 0.5
    assert change(math.inf, 1.0) == -math.inf
    assert change(math.inf, math.inf) == 0.0


def healthy_ones():
    for i, one in enumerate(RECIPES):
        yield pytest.param(one.name, marks=pytest.mark.exhaustive if i % 3 else pytest.mark.slow)


@pytest.mark.parametrize("name", healthy_ones())
def test_healthy_recipes_of_the_development_half_are_not_flagged(name):
    torch.set_num_threads(1)
    assert [(one.step, one.verdict.layer, one.verdict.cause) for one in judged(train(healthy(recipe(name), 2)))] == []
