"""What others find when an update fails, and what hooks of others find before it."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import warnings
import weakref

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

from spectral_monitor.capture.hooks.optimizer import OptimizerCapture
from tests.correction.native import (
    UNEVEN,
    armed,
    assert_same_training,
    closure_for,
    everything,
    hooks,
    make_model,
    pair,
    take_step,
)

OPTIONS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}


class Fails(torch.optim.SGD):
    """Out of memory in the middle of some of its steps, with the weights updated."""

    broken = False

    def step(self, closure=None):
        loss = super().step(closure)
        if self.broken:
            raise MemoryError
        return loss


def fail(model, optimizer, step=None, closure=False):
    optimizer.broken = True
    given = closure_for(model, optimizer)
    if not closure:
        given()
    with pytest.raises(MemoryError) as caught:
        (step or optimizer.step)(given if closure else None)
    optimizer.broken = False
    return caught  # with which the frames of the step live on


SCHEDULES = [lambda o: ExponentialLR(o, 0.5), lambda o: LambdaLR(o, lambda i: 1 / (1 + i))]


@pytest.mark.parametrize("closure", [False, True])
def test_a_failed_update_leaves_the_groups_to_the_user(closure):
    model = make_model()
    optimizer = Fails(model.parameters(), **OPTIONS)
    held, (group,), options = optimizer.param_groups, optimizer.param_groups, dict(optimizer.param_groups[0])
    armed(optimizer, model)
    caught = fail(model, optimizer, closure=closure)
    assert caught.value.__traceback__ is not None
    assert optimizer.param_groups is held
    assert held[0] is group
    assert len(held) == 1
    assert group == options
    Fails(make_model().parameters(), **OPTIONS).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("early", [True, False])
def test_a_schedule_goes_on_after_a_failed_update(schedule, early):
    models, optimizers = pair(Fails, OPTIONS)
    schedulers = [schedule(optimizer) for optimizer in optimizers] if early else []
    armed(optimizers[0], models[0])
    schedulers = schedulers or [schedule(optimizer) for optimizer in optimizers]
    for i in range(4):
        for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
            if i == 1:
                fail(model, optimizer)
            else:
                take_step(model, optimizer, i, with_closure=False)
            scheduler.step()
        assert everything(models[0], optimizers[0]) == everything(models[1], optimizers[1])
        assert schedulers[0].get_last_lr() == [optimizers[0].param_groups[0]["lr"]]
        rates = [optimizers[0].param_groups[0]["lr"] * m for m in dict.fromkeys(UNEVEN)]
        assert [group["lr"] for group in optimizers[1].param_groups] == pytest.approx(rates)


class LowersThenFails(Fails):
    """Writes its learning rate before it fails."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] *= 0.5
        return super().step(closure)


@pytest.mark.parametrize(("then", "lr"), [("step", 0.05), ("disarm", 0.1)])
def test_what_a_failed_step_wrote_is_gone_later(then, lr):
    """Also where the class's function was called, whose exceptions nobody sees."""
    model = make_model()
    optimizer = LowersThenFails(model.parameters(), **OPTIONS)
    swap = armed(optimizer, model)
    fail(model, optimizer, step=lambda closure: LowersThenFails.step(optimizer, closure))
    if then == "step":
        take_step(model, optimizer, 1, with_closure=False)
    else:
        swap.disarm()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(lr)


def test_under_a_gradient_scaler_too():
    model = make_model()
    optimizer = Fails(model.parameters(), **OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    armed(optimizer, model)
    optimizer.broken = True
    scaler.scale(model(torch.ones(2, 5)).sum()).backward()
    with pytest.raises(MemoryError):
        scaler.step(optimizer)
    assert len(optimizer.param_groups) == 1


class GoesOn(Fails):
    """Catches what goes wrong in its parent's step, and decays the weights then."""

    def step(self, closure=None):
        return recover(super().step, closure, self.param_groups)


class Through(torch.optim.Optimizer):
    """Does the same with the optimizer it holds."""

    def __init__(self, parameters, **options):
        self.base = Fails(parameters, **options)
        self.base.broken = True
        super().__init__(self.base.param_groups, {})
        self.param_groups, self.state = self.base.param_groups, self.base.state

    def step(self, closure=None):
        return recover(self.base.step, closure, self.param_groups)


def test_an_optimizer_that_works_through_one_that_fails_gets_its_groups_back():
    model = make_model()
    optimizer = Through(model.parameters(), **OPTIONS)
    optimizer.step = optimizer.base.step
    (group,), options = optimizer.param_groups, dict(optimizer.param_groups[0])
    armed(optimizer, model)
    closure_for(model, optimizer)()
    with pytest.raises(MemoryError):
        optimizer.step()
    assert optimizer.param_groups == [group]
    assert group == options


def recover(step, closure, groups):
    try:
        return step(closure)
    except MemoryError:
        with torch.no_grad():
            for group in groups:
                for p in group["params"]:
                    p.mul_(1 - group["lr"])


@pytest.mark.parametrize("kind", [GoesOn, Through])
def test_a_step_that_catches_it_is_corrected_to_its_end(kind):
    Fails(make_model().parameters(), **OPTIONS)  # by which torch puts its hooks around the parent's step
    models, optimizers = pair(kind, OPTIONS)
    armed(optimizers[0], models[0])
    for optimizer in optimizers:
        optimizer.broken = True
    assert_same_training(models, optimizers, steps=4)
    assert len(optimizers[0].param_groups) == 1


# ------------------------------------------------------------------------------------------------ nothing is left


def wrapped(optimizer):
    """By something that keeps the method it found."""
    found = optimizer.step
    optimizer.step = lambda *args, **kwargs: found(*args, **kwargs)


AROUND = {"nothing": lambda o: None, "a schedule": SCHEDULES[0], "a wrapper": wrapped}


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("around", AROUND)
def test_disarming_takes_the_step_away_again(around, failed):
    model = make_model()
    optimizer = Fails(model.parameters(), **OPTIONS)
    AROUND[around](optimizer)
    take_step(model, optimizer, 0, with_closure=False)
    optimizer.broken = False
    before = dict(vars(optimizer))
    swap = armed(optimizer, model)
    if failed:
        fail(model, optimizer)
    for _ in range(3):
        swap.arm()
    swap.disarm()
    assert vars(optimizer).get("step") is before.get("step")
    assert vars(optimizer) == before
    assert hooks(optimizer) == 0


@pytest.mark.parametrize("around", ["a schedule", "a wrapper"])
def test_what_was_put_around_it_meanwhile_stays_and_works(around):
    models, optimizers = pair(Fails, OPTIONS)
    swap = armed(optimizers[0], models[0])
    AROUND[around](optimizers[0])
    theirs = optimizers[0].step
    assert_same_training(models, optimizers, steps=2)
    fail(models[0], optimizers[0])
    assert len(optimizers[0].param_groups) == 1
    swap.disarm()
    assert optimizers[0].step is theirs
    twins = [make_model(), make_model()]
    plain = [Fails(model.parameters(), **OPTIONS) for model in twins]
    swap = armed(plain[0], twins[0])
    AROUND[around](plain[0])
    swap.disarm()
    assert_same_training(twins, plain, steps=2)


@pytest.mark.parametrize("early", [True, False])
def test_the_optimizer_is_free_once_it_is_let_go(early):
    """Without waiting for the garbage collector, though a schedule keeps the step it found."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), **OPTIONS)
    if early:
        ExponentialLR(optimizer, 0.5)
    swap = armed(optimizer, model)
    if not early:
        ExponentialLR(optimizer, 0.5)
    take_step(model, optimizer, 0, with_closure=False)
    swap.disarm()
    held = weakref.ref(optimizer)
    gc.collect()
    gc.disable()
    try:
        del optimizer, swap
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"])
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_copy_of_an_armed_optimizer_is_an_ordinary_one(duplicate, scheduled):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), **OPTIONS)
    if scheduled:
        ExponentialLR(optimizer, 0.5)
    armed(optimizer, model)
    other = duplicate(optimizer)
    assert "step" not in vars(other)
    assert hooks(other) == 0
    before = [p.detach().clone() for p in model.parameters()]
    (parameters,) = (group["params"] for group in other.param_groups)
    for p in parameters:
        p.grad = torch.ones_like(p)
    other.step()
    for p, q, was in zip(parameters, model.parameters(), before, strict=True):
        torch.testing.assert_close(p, was - 0.1 * (1 + 0.1 * was))
        assert torch.equal(q, was)


def test_the_step_takes_what_that_of_the_class_takes():
    model = make_model()
    for around in AROUND.values():
        optimizer = torch.optim.SGD(model.parameters(), **OPTIONS)
        expected = inspect.signature(optimizer.step)  # where gradient scalers look
        around(optimizer)
        armed(optimizer, model)
        assert inspect.signature(optimizer.step) == expected


@pytest.mark.parametrize("early", [True, False])
def test_a_schedule_has_nothing_to_warn_of(early):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), **OPTIONS)
    scheduler = ExponentialLR(optimizer, 0.5) if early else None
    armed(optimizer, model)
    scheduler = scheduler or ExponentialLR(optimizer, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take_step(model, optimizer, 0, with_closure=False)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("then", ["disarm", "step"])
def test_a_step_taken_from_the_optimizer_before_is_corrected_and_put_right_later(then):
    models, optimizers = pair(Fails, OPTIONS)
    taken = optimizers[0].step
    swap = armed(optimizers[0], models[0])
    fail(models[0], optimizers[0], taken)
    fail(models[1], optimizers[1])
    assert everything(models[0], optimizers[0]) == everything(models[1], optimizers[1])
    if then == "disarm":
        swap.disarm()
    else:
        assert_same_training(models, optimizers, steps=2)
    assert len(optimizers[0].param_groups) == 1


# ----------------------------------------------------------------------------------------------- hooks of others


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("ways", [(False,), (True,), (True, False)])
def test_a_warm_up_in_a_hook_is_that_of_the_groups_the_user_made(late, ways):
    models, optimizers = pair(torch.optim.SGD, OPTIONS)
    sizes, taken = [], [0, 0]

    def warms_up(which, rates):
        def warm_up(optimizer, args, kwargs):
            taken[which] += 1
            sizes.append(len(optimizer.param_groups))
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * min(1, taken[which] / 4)

        return warm_up

    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    if not late:
        optimizers[0].register_step_pre_hook(warms_up(0, rates[0]))
    armed(optimizers[0], models[0])
    if late:
        optimizers[0].register_step_pre_hook(warms_up(0, rates[0]))

    def native(optimizer, args, kwargs):
        taken[1] += 1
        for group, m in zip(optimizer.param_groups, dict.fromkeys(UNEVEN), strict=True):
            group["lr"] = rates[0][0] * min(1, taken[1] / 4) * m

    optimizers[1].register_step_pre_hook(native)
    assert_same_training(models, optimizers, steps=6, ways=ways)
    assert sizes == [1] * 6
    assert optimizers[0].param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("closure", [False, True])
def test_the_measurement_finds_the_learning_rates_of_the_update(closure):
    """Which a hook of the user's may have set, registered after both."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), **OPTIONS)
    found, sizes = [], []

    def ready(optimizer):
        found.append([group["lr"] for group in optimizer.param_groups])

    def warm_up(optimizer, args, kwargs):
        sizes.append(len(optimizer.param_groups))
        optimizer.param_groups[0]["lr"] = 0.5

    def nothing(optimizer):
        pass

    swap = armed(optimizer, model)
    capture = OptimizerCapture([optimizer], nothing, nothing, ready, nothing)
    capture.arm()
    optimizer.register_step_pre_hook(warm_up)
    for i in range(2):
        take_step(model, optimizer, i, with_closure=closure)
    assert found == [[0.5 * m for m in dict.fromkeys(UNEVEN)]] * 2
    assert sizes == [1, 1]
    capture.disarm()
    swap.disarm()
    assert list(optimizer._optimizer_step_pre_hooks.values()) == [warm_up]
