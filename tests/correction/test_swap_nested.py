"""Steps inside steps: subclasses that call their parent's, and optimizers that work through others."""

from __future__ import annotations

import pytest
import torch

from spectral_monitor.capture.hooks.optimizer import OptimizerCapture
from spectral_monitor.correction.override.lr_override import LRMultiplierOverride
from tests.correction.native import (
    POWERS,
    UNEVEN,
    armed,
    assert_same_training,
    by_parameter,
    closure_for,
    everything,
    hooks,
    make_model,
    native_groups,
    pair,
    take_step,
)
from tests.noninterference.nested import CallsGrandparent, CallsParent, RunsClosureItself

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}


class ThenDecays(torch.optim.SGD):
    """After the parent's step the groups are still needed."""

    def step(self, closure=None):
        loss = super().step(closure)
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(1 - group["lr"] * 0.01)
        return loss


class ClosureTwice(torch.optim.SGD):
    """Steps, looks again, steps: in between the closure is to see one group."""

    def step(self, closure=None):
        if closure is None:
            return super().step()
        with torch.enable_grad():
            loss = closure()
        super().step()
        with torch.enable_grad():
            closure()
        super().step()
        return loss


class Ascends(torch.optim.SGD):
    """Moves up along the gradient and back, in the manner of SAM; the size of that is not a learning rate."""

    def step(self, closure=None):
        closure = closure or (lambda: None)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            moved = [(p, 0.05 * p.grad) for group in self.param_groups for p in group["params"]]
            for p, by in moved:
                p.add_(by)
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for p, by in moved:
                p.sub_(by)
        super().step()
        return loss


@pytest.mark.parametrize("kind", [CallsParent, CallsGrandparent, RunsClosureItself, ThenDecays, ClosureTwice, Ascends])
def test_a_step_inside_a_step_is_part_of_it(kind):
    torch.optim.SGD(make_model().parameters())  # from now on torch calls hooks around the parent's step too
    models, optimizers = pair(kind, SGD)
    armed(optimizers[0], models[0])
    assert_same_training(models, optimizers, steps=6)


def test_a_closure_that_is_called_again_sees_one_group():
    model = make_model()
    optimizer = ClosureTwice(model.parameters(), **SGD)
    armed(optimizer, model)
    (group,), seen = optimizer.param_groups, []

    def closure():
        seen.append(list(optimizer.param_groups))
        return closure_for(model, optimizer)()

    optimizer.step(closure)
    assert len(seen) == 2
    assert all(len(groups) == 1 and groups[0] is group for groups in seen)


@pytest.mark.parametrize("rate", [float, torch.tensor], ids=["float", "tensor"])
def test_a_learning_rate_set_by_a_later_closure_call_counts_from_then_on(rate):
    """In a tensor it is set in place, as schedulers do."""
    models, optimizers = pair(ClosureTwice, {"lr": 0.1}, POWERS)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate(group["lr"])
    armed(optimizers[0], models[0], POWERS)
    for model, optimizer in zip(models, optimizers, strict=True):

        def closure(model=model, optimizer=optimizer):
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            return closure_for(model, optimizer)()

        optimizer.step(closure)
    assert everything(models[0], optimizers[0]) == everything(models[1], optimizers[1])
    assert optimizers[0].param_groups[0]["lr"] == rate(0.1) / 4


class Slow(torch.optim.Optimizer):
    """Works through another optimizer, with its groups; with a step of its own after it."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(1 - group["lr"] * 0.01)
        return loss


class OwnList(Slow):
    """The same groups in a list of its own."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.param_groups = list(optimizer.param_groups)


class Old(Slow):
    """As wrappers were written when there were no hooks: only the inner optimizer went through torch."""

    def __init__(self, optimizer):
        self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self, closure=None):
        return self.optimizer.step(closure)


class Several(torch.optim.Optimizer):
    """Optimizers in a list; the groups are put together whenever they are asked for."""

    def __init__(self, optimizers):
        self.optimizers = optimizers

    @property
    def param_groups(self):
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    @property
    def state(self):
        return {p: state for optimizer in self.optimizers for p, state in optimizer.state.items()}

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss


@pytest.mark.parametrize("kind", [Slow, OwnList, Old])
@pytest.mark.parametrize("listed", ["alone", "with the inner one"])
def test_an_optimizer_that_works_through_another(kind, listed):
    models, optimizers = pair(torch.optim.SGD, SGD, build=kind)
    inner = optimizers[0].optimizer
    given = [optimizers[0]] if listed == "alone" else [optimizers[0], inner]
    swap = LRMultiplierOverride(given, by_parameter(models[0], UNEVEN))
    swap.arm()
    for i in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            take_step(model, optimizer, i, with_closure=i % 2 == 0)
        assert everything(models[0], inner) == everything(models[1], optimizers[1].optimizer)
    assert len(inner.param_groups) == len(optimizers[0].param_groups) == 1
    swap.disarm()
    assert hooks(inner) == 0


def test_several_optimizers_behind_one():
    models, optimizers = [make_model(), make_model()], []
    for model, build in zip(models, (lambda p, m: p, lambda p, m: native_groups(p, m, SGD)), strict=True):
        parts = [torch.optim.SGD(build(list(model[i].parameters()), UNEVEN[i : i + 2]), **SGD) for i in (0, 2)]
        optimizers.append(Several(parts))
    armed(optimizers[0], models[0])
    assert_same_training(models, optimizers, steps=4)


def test_a_hook_that_takes_a_step_of_its_own_finds_no_hook_moved():
    """torch goes through them meanwhile, and refuses to go on if they change."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    steps, sizes = [], []

    def step_before(optimizer, args, kwargs):
        steps.append(len(optimizer.param_groups))
        if len(steps) == 1:
            optimizer.step()

    def look(optimizer):
        sizes.append(len(optimizer.param_groups))

    def nothing(*arguments):
        pass

    for hook in (step_before, nothing, nothing):
        optimizer.register_step_pre_hook(hook)
    swap = armed(optimizer, model)
    capture = OptimizerCapture([optimizer], nothing, nothing, look, nothing)
    capture.arm()
    closure_for(model, optimizer)()
    optimizer.step()
    assert steps == [1, 1]
    assert sizes == [len(set(UNEVEN))] * 2
    capture.disarm()
    swap.disarm()
    assert list(optimizer._optimizer_step_pre_hooks.values()) == [step_before, nothing, nothing]
