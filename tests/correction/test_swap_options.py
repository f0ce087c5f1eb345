"""What optimizers write into their groups, and what is refused."""

from __future__ import annotations

import pytest
import torch

from spectral_monitor.correction.override.group_split import decay_option
from spectral_monitor.correction.override.lr_override import LRMultiplierOverride
from tests.correction.native import (
    POWERS,
    UNEVEN,
    Descends,
    assert_same_training,
    by_parameter,
    groups_of_updates,
    make_model,
    pair,
    take_step,
)


class Counts(Descends):
    """As schedule-free optimizers do."""

    extra = {"k": 0}  # noqa: RUF012

    def rate(self, group):
        group["k"] += 1
        return group["lr"] / group["k"]


class StartsToCount(Descends):
    """As fused ones of other makers do: a key that is not there at first."""

    def rate(self, group):
        group["step"] = group["step"] + 1 if "step" in group else 1
        return group["lr"] / group["step"]


class CountsInATensor(Descends):
    """In place, in a tensor that the first step makes."""

    def rate(self, group):
        if "step" in group:
            group["step"] += 1
        else:
            group["step"] = torch.ones(())
        return group["lr"] / group["step"]


class OwnSchedule(Descends):
    """Lowers its learning rate at every step."""

    def rate(self, group):
        group["lr"] *= 0.7
        return group["lr"]


@pytest.mark.parametrize("kind", [Counts, StartsToCount, CountsInATensor, OwnSchedule])
def test_what_an_optimizer_writes_is_there_at_the_next_step(kind):
    models, optimizers = pair(kind, {"lr": 0.1}, POWERS)
    LRMultiplierOverride(optimizers[:1], by_parameter(models[0], POWERS)).arm()
    (group,) = optimizers[0].param_groups

    def then(i):
        native = next(one for one in optimizers[1].param_groups if one["lr"] == group["lr"])  # of multiplier 1
        assert {**native, "params": None} == {**group, "params": None}

    assert_same_training(models, optimizers, then=then)
    assert optimizers[0].param_groups == [group]


@pytest.mark.parametrize("multipliers", [UNEVEN, (0.37, 2.3, 0.37, 3.3)], ids=["with a 1", "without"])
def test_taking_the_multiplier_out_again_rounds_no_more_than_it_must(multipliers):
    model = make_model()
    optimizer, alone = OwnSchedule(model.parameters()), OwnSchedule(make_model().parameters())
    LRMultiplierOverride([optimizer], by_parameter(model, multipliers)).arm()
    for _ in range(20):
        for p in (*model.parameters(), *alone.param_groups[0]["params"]):
            p.grad = torch.zeros_like(p)
        optimizer.step()
        alone.step()
    found, expected = optimizer.param_groups[0]["lr"], alone.param_groups[0]["lr"]
    assert found == expected if 1.0 in multipliers else found == pytest.approx(expected, rel=1e-14)


def test_one_multiplier_for_all_is_taken_out_too():
    model = make_model()
    optimizer = OwnSchedule(model.parameters())
    LRMultiplierOverride([optimizer], dict.fromkeys(model.parameters(), 3.0)).arm()
    take_step(model, optimizer, 0, with_closure=True)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.07)


class WritesTheSame(Descends):
    """Reads its options and writes them back."""

    def rate(self, group):
        group["lr"] = group["lr"] * 1.0
        return group["lr"]


def test_what_is_written_back_unchanged_is_not_rounded():
    model = make_model()
    optimizer = WritesTheSame(model.parameters())
    multiplier = next(m / 100 for m in range(2, 100) if 0.1 * (m / 100) / (m / 100) != 0.1)
    LRMultiplierOverride([optimizer], dict.fromkeys(model.parameters(), multiplier)).arm()
    take_step(model, optimizer, 0, with_closure=True)
    assert optimizer.param_groups[0]["lr"] == 0.1


class OwnDecay(torch.optim.AdamW):
    """Lowers its weight decay at every step."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            group["weight_decay"] *= 0.5
        return loss


def test_a_decay_that_the_optimizer_lowers_is_taken_over_without_the_multiplier():
    options = {"lr": 0.1, "weight_decay": 0.5}
    models, optimizers = pair(OwnDecay, options, POWERS, "weight_decay")
    LRMultiplierOverride(optimizers[:1], by_parameter(models[0], POWERS)).arm()
    assert_same_training(models, optimizers, steps=4)
    assert optimizers[0].param_groups[0]["weight_decay"] == 0.5**5


class CountsWhereUsed(Descends):
    """As some do: a group without a gradient is passed over."""

    def step(self, closure=None):
        for group in self.param_groups:
            if any(p.grad is not None for p in group["params"]):
                group["k"] = group.get("k", 0) + 1


def test_a_count_that_some_parts_leave_out_is_that_of_the_others():
    model = make_model()
    optimizer = CountsWhereUsed(model.parameters())
    LRMultiplierOverride([optimizer], by_parameter(model, UNEVEN)).arm()
    for _ in range(3):
        model[0].weight.grad = torch.zeros_like(model[0].weight)
        optimizer.step()
    assert optimizer.param_groups[0]["k"] == 3


class CountsTwice(Counts):
    """A closure call between two updates."""

    def step(self, closure=None):
        super().step(closure)
        return super().step(closure)


def test_what_is_written_before_the_closure_is_called_again_stays():
    models, optimizers = pair(CountsTwice, {"lr": 0.1}, POWERS)
    LRMultiplierOverride(optimizers[:1], by_parameter(models[0], POWERS)).arm()
    assert_same_training(models, optimizers, steps=3, ways=(True,))
    assert optimizers[0].param_groups[0]["k"] == 6


def test_a_counting_tensor_stays_the_object_it_is():
    model = make_model()
    optimizer = CountsInATensor(model.parameters())
    LRMultiplierOverride([optimizer], by_parameter(model, UNEVEN)).arm()
    take_step(model, optimizer, 0, with_closure=True)
    counter = optimizer.param_groups[0]["step"]
    take_step(model, optimizer, 1, with_closure=True)
    assert optimizer.param_groups[0]["step"] is counter
    assert counter.item() == 2


def test_a_learning_rate_in_a_tensor_that_the_optimizer_lowers_in_place():
    rate = torch.tensor(0.125)
    model, other = make_model(), make_model()
    optimizer = OwnSchedule(model.parameters(), lr=rate)
    LRMultiplierOverride([optimizer], by_parameter(model, POWERS)).arm()
    for i in range(3):
        take_step(model, optimizer, i, with_closure=False)
    lowered = torch.tensor(0.125).mul_(0.7).mul_(0.7).mul_(0.7)
    assert optimizer.param_groups[0]["lr"] is rate
    assert torch.equal(rate, lowered)
    native = OwnSchedule([{"params": [p], "lr": 0.125 * m} for p, m in zip(other.parameters(), POWERS, strict=True)])
    for group in native.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    for i in range(3):
        take_step(other, native, i, with_closure=False)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


class ListsAnew(Descends):
    """Puts another list of the same parameters into its groups, in another order."""

    def rate(self, group):
        group["params"] = group["params"][::-1]
        return group["lr"]


def test_lists_of_parameters_are_not_taken_over():
    models, optimizers = pair(ListsAnew, {"lr": 0.1})
    held = optimizers[0].param_groups[0]["params"]
    LRMultiplierOverride(optimizers[:1], by_parameter(models[0], UNEVEN)).arm()
    assert_same_training(models, optimizers, steps=2)
    assert optimizers[0].param_groups[0]["params"] is held
    assert len(held) == 4


def test_options_of_single_parameters_go_with_them():
    model = make_model()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    LRMultiplierOverride([optimizer], by_parameter(model, UNEVEN)).arm()
    seen = groups_of_updates(optimizer)
    take_step(model, optimizer, 0, with_closure=False)
    assert [group["param_names"] for group in seen] == [["0.weight", "2.bias"], ["0.bias"], ["2.weight"]]
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]


# ------------------------------------------------------------------------------------------------------- decays


class ByItsGroup(torch.optim.Adam):
    pass


DECAYS = [
    (torch.optim.SGD, {"weight_decay": 0.1}, ""),
    (torch.optim.Adam, {"weight_decay": 0.1}, ""),
    (torch.optim.RMSprop, {"weight_decay": 0.1}, ""),
    (ByItsGroup, {"weight_decay": 0.1}, ""),
    (ByItsGroup, {"weight_decay": 0.1, "decoupled_weight_decay": True}, "weight_decay"),
    (torch.optim.AdamW, {}, "weight_decay"),
    (type("Mine", (torch.optim.AdamW,), {}), {}, "weight_decay"),
    (torch.optim.Adafactor, {}, "weight_decay"),
    (torch.optim.ASGD, {"weight_decay": 0.1}, "lambd"),
    (Descends, {}, ""),
]


@pytest.mark.parametrize(("kind", "options", "expected"), DECAYS)
def test_which_decays_are_apart_from_the_gradient(kind, options, expected):
    optimizer = kind(make_model().parameters(), lr=0.1, **options)
    assert decay_option(optimizer.param_groups[0], [optimizer]) == expected
    assert decay_option(optimizer.param_groups[0], [Descends(make_model().parameters()), optimizer]) == expected


def test_a_group_that_does_not_say_is_judged_by_the_class():
    optimizer = torch.optim.AdamW(make_model().parameters())  # before torch 2.7 its groups said nothing
    del optimizer.param_groups[0]["decoupled_weight_decay"]
    assert decay_option(optimizer.param_groups[0], [optimizer]) == "weight_decay"
