"""When the groups are expanded and when not: closures, steps inside steps, exceptions, hooks, what others hold."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch

from spectral_monitor.correction.override.lr_override import LRMultiplierOverride
from tests.correction.native import (
    UNEVEN,
    armed,
    assert_same_training,
    by_parameter,
    closure_for,
    everything,
    hooks,
    loss_of,
    make_model,
    native_groups,
    pair,
    take_step,
)

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}


def test_inside_the_closure_and_after_the_step_there_are_the_groups_there_have_always_been():
    model = make_model()
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.1)
    held, groups, copies = (
        optimizer.param_groups,
        list(optimizer.param_groups),
        [dict(g) for g in optimizer.param_groups],
    )
    swap, seen = armed(optimizer, model), []

    def closure():
        seen.append(list(optimizer.param_groups))
        return closure_for(model, optimizer)()

    optimizer.step(closure)
    optimizer.step(closure=closure)
    closure_for(model, optimizer)()
    optimizer.step()
    for found in (*seen, optimizer.param_groups):
        assert all(one is other for one, other in zip(found, groups, strict=True))
    assert optimizer.param_groups is held
    assert groups == copies
    swap.disarm()
    assert hooks(optimizer) == 0


def test_hooks_of_others_see_the_groups_they_know():
    """Before the update and after it, registered earlier or later."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    sizes = []

    def look(o, args, kwargs):
        sizes.append(len(o.param_groups))

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    armed(optimizer, model)
    optimizer.register_step_post_hook(look)
    take_step(model, optimizer, 0, with_closure=False)
    optimizer.register_step_pre_hook(look)
    take_step(model, optimizer, 0, with_closure=True)
    assert sizes == [1] * 7


def test_a_learning_rate_set_inside_the_closure_counts():
    """A scheduler that is stepped by the training step, say."""
    models, optimizers = pair(torch.optim.SGD, SGD)
    armed(optimizers[0], models[0])
    for i in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):

            def closure(model=model, optimizer=optimizer, i=i):
                for group in optimizer.param_groups:
                    group["lr"] *= 0.5
                return closure_for(model, optimizer, i)()

            optimizer.step(closure)
        assert everything(models[0], optimizers[0]) == everything(models[1], optimizers[1])
    assert optimizers[0].param_groups[0]["lr"] == 0.1 / 8


def test_multipliers_set_inside_the_closure_count_for_its_step():
    models, optimizers = pair(torch.optim.SGD, SGD)
    swap = armed(optimizers[0], models[0], (1.0,) * 4)

    def closure():
        swap.multipliers = by_parameter(models[0], UNEVEN)
        return closure_for(models[0], optimizers[0])()

    optimizers[0].step(closure)
    take_step(models[1], optimizers[1], 0, with_closure=True)
    assert everything(models[0], optimizers[0]) == everything(models[1], optimizers[1])


def test_a_group_without_parameters_stays():
    model = make_model()
    optimizer = torch.optim.SGD([{"params": list(model.parameters())}, {"params": []}], **SGD)
    groups = list(optimizer.param_groups)
    armed(optimizer, model)
    take_step(model, optimizer, 0, with_closure=False)
    assert all(one is other for one, other in zip(optimizer.param_groups, groups, strict=True))


def test_groups_added_later_are_expanded_too():
    models = [make_model(), make_model()]
    plain = torch.optim.SGD(models[0][0].parameters(), **SGD)
    native = torch.optim.SGD(native_groups(models[1][0].parameters(), UNEVEN[:2], SGD), **SGD)
    armed(plain, models[0])
    assert_same_training(models, (plain, native), steps=2)
    plain.add_param_group({"params": list(models[0][2].parameters())})
    for group in native_groups(models[1][2].parameters(), UNEVEN[2:], SGD):
        native.add_param_group(group)
    assert_same_training(models, (plain, native), steps=2)


def test_saved_state_has_the_groups_of_an_uncorrected_run_and_loads_either_way():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    armed(optimizer, model)
    take_step(model, optimizer, 0, with_closure=True)
    saved = optimizer.state_dict()
    assert [len(group["params"]) for group in saved["param_groups"]] == [4]
    torch.optim.AdamW(make_model().parameters(), lr=0.1).load_state_dict(saved)
    models, optimizers = pair(torch.optim.SGD, SGD)
    armed(optimizers[0], models[0])
    take_step(models[0], optimizers[0], 0, with_closure=False)
    take_step(models[1], optimizers[1], 0, with_closure=False)
    for optimizer in optimizers:
        optimizer.load_state_dict(optimizer.state_dict())  # which makes new groups in a new list
    assert_same_training(models, optimizers, steps=2)


def test_two_optimizers_and_one_that_steps_inside_the_closure_of_the_other():
    models = [make_model(), make_model()]
    plain = [torch.optim.SGD(models[0][i].parameters(), **SGD) for i in (0, 2)]
    native = [torch.optim.SGD(native_groups(models[1][i].parameters(), UNEVEN[i : i + 2], SGD), **SGD) for i in (0, 2)]
    swap = LRMultiplierOverride(plain, by_parameter(models[0], UNEVEN))
    swap.arm()
    for i in range(3):
        for model, (inner, outer) in zip(models, (plain, native), strict=True):

            def closure(model=model, inner=inner, outer=outer, i=i):
                outer.zero_grad()
                inner.zero_grad()
                loss = loss_of(model, i)
                loss.backward()
                inner.step()
                return loss

            outer.step(closure)
        assert [everything(models[0], o) for o in plain] == [everything(models[1], o) for o in native]
    swap.disarm()
    assert [hooks(optimizer) for optimizer in plain] == [0, 0]


class Batch:
    pass


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_closure_holds_is_free_after_the_step(fails):
    """Without waiting for the garbage collector; after an exception, once the groups are put back."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    swap = armed(optimizer, model)

    def step():
        batch = Batch()
        inner = failing if fails else closure_for(model, optimizer)
        with contextlib.suppress(BoomError):
            optimizer.step(lambda: (batch, inner())[1])
        return weakref.ref(batch)

    gc.disable()
    try:
        held = step()
        if fails:
            swap.disarm()
        assert held() is None
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------------ exceptions


class BoomError(Exception):
    pass


class FailsMidway(torch.optim.SGD):
    broken = True

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        if self.broken:
            raise BoomError
        return loss


def failing():
    raise BoomError


def broken_step(model, optimizer, fails_in):
    closure = {"closure": failing, "step": closure_for(model, optimizer), "step without closure": None}[fails_in]
    if closure is None:
        closure_for(model, optimizer)()
    with pytest.raises(BoomError):
        optimizer.step(closure)


@pytest.mark.parametrize("fails_in", ["closure", "step", "step without closure"])
def test_an_exception_puts_the_groups_back(fails_in):
    model = make_model()
    optimizer = FailsMidway(model.parameters(), **SGD)
    (group,), options = optimizer.param_groups, dict(optimizer.param_groups[0])
    swap = armed(optimizer, model)
    broken_step(model, optimizer, fails_in)
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0] is group
    assert group == options
    swap.disarm()
    assert hooks(optimizer) == 0


@pytest.mark.parametrize("fails_in", ["closure", "step", "step without closure"])
def test_after_an_exception_the_next_step_is_as_if_the_groups_had_been_put_back(fails_in):
    models, optimizers = pair(FailsMidway, SGD)
    armed(optimizers[0], models[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        broken_step(model, optimizer, fails_in)
        optimizer.broken = False
    assert_same_training(models, optimizers, steps=4)
    assert len(optimizers[0].param_groups) == 1


def test_disarming_inside_a_closure_leaves_the_step_uncorrected():
    models = [make_model(), make_model()]
    plain, other = (torch.optim.SGD(model.parameters(), **SGD) for model in models)
    swap = armed(plain, models[0])

    def closure():
        swap.disarm()
        return closure_for(models[0], plain)()

    plain.step(closure)
    take_step(models[1], other, 0, with_closure=True)
    assert everything(models[0], plain) == everything(models[1], other)
    assert hooks(plain) == 0


def test_arming_twice_is_arming_once_and_disarming_is_for_good():
    models, optimizers = pair(torch.optim.SGD, SGD)
    swap = armed(optimizers[0], models[0])
    swap.arm()
    assert hooks(optimizers[0]) == 2
    assert_same_training(models, optimizers, steps=2)
    swap.disarm()
    swap.disarm()
    assert hooks(optimizers[0]) == 0
    take_step(models[0], optimizers[0], 0, with_closure=False)
    take_step(models[1], optimizers[1], 0, with_closure=False)
    assert everything(models[0], optimizers[0]) != everything(models[1], optimizers[1])
