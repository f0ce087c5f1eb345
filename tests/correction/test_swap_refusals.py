"""What is refused, at once or at the step that shows it, by name and with the reason."""

from __future__ import annotations

import math

import pytest
import torch

from spectral_monitor.correction.override.lr_override import LRMultiplierOverride
from tests.correction.native import (
    POWERS,
    UNEVEN,
    Descends,
    assert_same_training,
    by_parameter,
    closure_for,
    everything,
    make_model,
    pair,
    take_step,
)


def descent_without_rate(parameters):
    optimizer = Descends(parameters)
    del optimizer.param_groups[0]["lr"]
    return optimizer


class Renewed(Descends):
    """Groups that are copies whenever they are asked for."""

    def __init__(self, parameters):
        self.kept = []
        super().__init__(parameters)

    def add_param_group(self, group):
        self.kept.append({**self.defaults, "params": list(group["params"])})

    @property
    def param_groups(self):
        return [dict(group) for group in self.kept]

    @param_groups.setter
    def param_groups(self, groups):
        pass


class NeverSetUp(torch.optim.Optimizer):
    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters), "lr": 0.1}]

    def step(self, closure=None):
        pass


class Copied(NeverSetUp):
    """Has what another optimizer has, hooks included, but torch calls none around its step."""

    def __init__(self, parameters):
        self.__dict__.update(vars(torch.optim.SGD(parameters, lr=0.1)))


class Quasi(torch.optim.LBFGS):
    pass


def sharded(parameters):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return object.__new__(ZeroRedundancyOptimizer)  # setting it up takes processes


REFUSED = [
    (torch.optim.LBFGS, "LBFGS .* it reads one group before it knows the gradient, .*; use SGD, Adam or another "),
    (Quasi, "Quasi .* it reads one group before it knows the gradient"),
    (torch.optim.Rprop, "Rprop .* it reads its learning rate only at the first step; use SGD, Adam or another "),
    (sharded, "ZeroRedundancyOptimizer .* every process has its own groups"),
    (descent_without_rate, "group 0 of Descends has no learning rate to multiply: lr must be a number, got None"),
    (lambda p: Descends(p, lr=None), "group 0 of Descends has no learning rate to multiply"),
    (lambda p: Descends(p, lr=torch.ones(2)), "group 0 of Descends has no learning rate to multiply"),
    (lambda p: Descends(p, lr=torch.ones(0)), "group 0 of Descends has no learning rate to multiply"),
    (Renewed, "Renewed.param_groups is a new list at every access"),
    (Copied, "Copied did not call torch.optim.Optimizer.__init__"),
    (NeverSetUp, "NeverSetUp did not call torch.optim.Optimizer.__init__"),
]


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize(("build", "message"), REFUSED)
def test_an_optimizer_that_cannot_be_corrected_is_refused_by_name(build, message):
    model = make_model()
    with pytest.raises(ValueError, match=message):
        LRMultiplierOverride([torch.optim.SGD(model[0].parameters()), build(model[2].parameters())], {})


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan, True, "2", None])
def test_multipliers_are_positive_numbers(value):
    model = make_model()
    swap = LRMultiplierOverride([torch.optim.SGD(model.parameters())], {model[0].bias: 2})
    with pytest.raises(ValueError, match=r"of a parameter of shape \(7, 5\) must be a positive number, got"):
        swap.multipliers = {model[0].weight: value}
    assert swap.multipliers == {model[0].bias: 2}


def test_what_is_no_optimizer_or_no_parameter_is_refused():
    model = make_model()
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, got Sequential"):
        LRMultiplierOverride([model], {})
    with pytest.raises(TypeError, match=r"multipliers must map parameters to numbers, got '0.weight'"):
        LRMultiplierOverride([torch.optim.SGD(model.parameters())], {"0.weight": 2.0})


def test_parameters_that_no_optimizer_holds_may_be_named():
    models = [make_model(), make_model()]
    plain, other = (torch.optim.SGD(model[2].parameters(), lr=0.1) for model in models)
    LRMultiplierOverride([plain], {models[0][0].weight: 3.0}).arm()
    closure_for(models[0], plain)()
    plain.step()
    take_step(models[1], other, 0, with_closure=False)
    assert everything(models[0], plain) == everything(models[1], other)


# -------------------------------------------------------------------------------- what one group cannot hold


class RemembersItsRate(Descends):
    """As schedule-free optimizers do: what a group holds depends on its learning rate."""

    extra = {"lr_max": -1.0}  # noqa: RUF012

    def rate(self, group):
        group["lr_max"] = max(group["lr_max"], group["lr"])
        return group["lr_max"]


class SetsItsRate(Descends):
    """Its learning rate is what it says, whatever it was."""

    def rate(self, group):
        group["lr"] = 0.01
        return group["lr"]


class WarmsUp(torch.optim.SGD):
    """Rates of its own, by place; set before the parent's step, and before a closure."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.steps, self.base_lrs = 0, [group["lr"] for group in self.param_groups]

    def step(self, closure=None):
        self.steps += 1
        for group, lr in zip(self.param_groups, self.base_lrs, strict=False):
            group["lr"] = lr * min(1, self.steps / 4)
        return super().step(closure)


class ByPlace(Descends):
    """A list beside the groups: what is beyond its end does not train."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.base_lrs = [group["lr"] for group in self.param_groups]

    def step(self, closure=None):
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group, _ in zip(self.param_groups, self.base_lrs, strict=False):
                for p in group.get("params"):
                    p.add_(p.grad, alpha=-group["lr"])
        return loss


class FirstGroup(Descends):
    """One group is all it knows."""

    def step(self, closure=None):
        loss = None if closure is None else closure()
        options = {**self.param_groups[0]}
        with torch.no_grad():
            for p in options["params"]:
                p.add_(p.grad, alpha=-options["lr"])
        return loss


class CountsApart(Descends):
    """A tensor in every group, or a number in the first: what one group cannot hold."""

    def rate(self, group):
        first = group is self.param_groups[0]
        group["seen"] = torch.tensor(1.0 if first else 2.0)
        return group["lr"]


class TensorOrNumber(Descends):
    def rate(self, group):
        group["seen"] = 1.0 if group is self.param_groups[0] else torch.tensor(1.0)
        return group["lr"]


IMPOSSIBLE = [
    (CountsApart, r"CountsApart cannot be .*: its step leaves 'seen' at tensor\(1.\), tensor\(2.\), tensor\(2.\)"),
    (TensorOrNumber, r"TensorOrNumber cannot be .*: its step leaves 'seen' at 1.0, tensor\(1.\), tensor\(1.\)"),
    (RemembersItsRate, "RemembersItsRate cannot be .*: its step leaves 'lr_max' at 0.037.*, 0.1, 0.2"),
    (SetsItsRate, "SetsItsRate cannot be .*: its step leaves 'lr' at 0.01, 0.01, 0.01, which one group cannot hold"),
    (WarmsUp, "WarmsUp cannot be .*: its step leaves 'lr' at 0.025, 0.1, 0.2"),
    (ByPlace, "ByPlace cannot be .*: of 3 groups for a step it read only 1"),
    (FirstGroup, "FirstGroup cannot be .*: of 3 groups for a step it read only 1"),
]


@pytest.mark.parametrize(("kind", "message"), IMPOSSIBLE)
def test_a_step_that_one_group_cannot_hold_ends_in_an_error_that_says_why(kind, message):
    model = make_model()
    optimizer = kind(model.parameters(), lr=0.1)
    (group,), (keys) = optimizer.param_groups, list(optimizer.param_groups[0])
    swap = LRMultiplierOverride([optimizer], by_parameter(model, UNEVEN))
    swap.arm()
    with pytest.raises(RuntimeError, match=f"the learning rates of {message}"):
        take_step(model, optimizer, 0, with_closure=False)
    assert optimizer.param_groups[0] is group
    assert list(group) == keys
    swap.multipliers = {}
    take_step(model, optimizer, 1, with_closure=False)


class NotKnown(Descends):
    """Says of every group that something is not known."""

    def rate(self, group):
        group["seen"] = math.nan
        return group["lr"]


def test_groups_may_all_hold_nan():
    model = make_model()
    optimizer = NotKnown(model.parameters(), lr=0.1)
    LRMultiplierOverride([optimizer], by_parameter(model, UNEVEN)).arm()
    take_step(model, optimizer, 0, with_closure=False)
    assert math.isnan(optimizer.param_groups[0]["seen"])


class Outer(ByPlace):
    """Its step is not that of the optimizer it holds, which has the same groups."""

    def __init__(self, params):
        super().__init__(params)
        self.base_optimizer = torch.optim.SGD(self.param_groups)
        self.base_optimizer.param_groups = self.param_groups


def test_an_optimizer_that_holds_another_is_the_one_that_is_named():
    model = make_model()
    optimizer = Outer(model.parameters())
    LRMultiplierOverride([optimizer], by_parameter(model, UNEVEN)).arm()
    with pytest.raises(RuntimeError, match="the learning rates of Outer cannot"):
        take_step(model, optimizer, 0, with_closure=False)


def test_a_group_that_needs_nothing_is_not_overlooked_either():
    """One that is expanded before it takes its place in the list beside."""
    model = make_model()
    optimizer = ByPlace([{"params": model[0].parameters()}, {"params": model[2].parameters()}])
    LRMultiplierOverride([optimizer], by_parameter(model, (0.37, 2.3, 1.0, 1.0))).arm()
    with pytest.raises(RuntimeError, match="of 3 groups for a step it read only 2"):
        take_step(model, optimizer, 0, with_closure=True)
    assert len(optimizer.param_groups) == 2


def test_what_is_set_before_the_closure_is_set_in_the_groups_there_are():
    models = [make_model(), make_model()]
    plain = WarmsUp(models[0].parameters(), lr=0.1)
    native = WarmsUp([{"params": [p], "lr": 0.1 * m} for p, m in zip(models[1].parameters(), POWERS, strict=True)])
    LRMultiplierOverride([plain], by_parameter(models[0], POWERS)).arm()
    assert_same_training(models, (plain, native), steps=6, ways=(True,))


class InTurn(Descends):
    """A closure call for every group, which is counted."""

    early = False
    extra = {"k": 0}  # noqa: RUF012

    def step(self, closure=None):
        if not self.early:
            closure()
        for group in self.param_groups:
            closure()
            group["k"] += 1
            group["params"][0].grad.mul_(group["k"])
            with torch.no_grad():
                for p in group["params"]:
                    p.add_(p.grad, alpha=-group["lr"])


class InTurnFromTheStart(InTurn):
    early = True


def test_a_closure_call_for_every_group_leaves_each_its_turn_and_its_count():
    models, optimizers = pair(InTurn, {"lr": 0.1})
    LRMultiplierOverride(optimizers[:1], by_parameter(models[0], UNEVEN)).arm()
    assert_same_training(models, optimizers, steps=4, ways=(True,))
    assert optimizers[0].param_groups[0]["k"] == 4


def test_a_group_taken_before_the_first_closure_call_is_found_out():
    """It is the whole group: what it is used for is not corrected."""
    model = make_model()
    optimizer = InTurnFromTheStart(model.parameters())
    LRMultiplierOverride([optimizer], by_parameter(model, UNEVEN)).arm()
    with pytest.raises(RuntimeError, match="of 3 groups for a step it read only 2"):
        take_step(model, optimizer, 0, with_closure=True)
    assert len(optimizer.param_groups) == 1


READ = {
    "[]": lambda group: group["params"],
    "get": lambda group: group.get("params"),
    "items": lambda group: next(value for key, value in group.items() if key == "params"),
    "keys": lambda group: [dict.get(group, key) for key in group.keys()][0],  # noqa: RUF015, SIM118
    "iter": lambda group: [dict.get(group, key) for key in group][0],  # noqa: RUF015
    "copy": lambda group: group.copy()["params"],
    "dict": lambda group: dict(group)["params"],
    "**": lambda group: {**group}["params"],
}


@pytest.mark.parametrize("way", READ)
def test_a_group_is_looked_at_however_it_is_read(way):
    """The last of three in this way, the others as usual."""

    class Reads(Descends):
        def step(self, closure=None):
            *others, last = self.param_groups
            return [group["params"] for group in others], READ[way](last)

    model = make_model()
    optimizer = Reads(model.parameters())
    LRMultiplierOverride([optimizer], by_parameter(model, UNEVEN)).arm()
    _, last = optimizer.step()
    assert [id(p) for p in last] == [id(model[2].weight)]


def test_an_optimizer_that_skips_a_step_has_overlooked_nothing():
    class EveryOther(Descends):
        calls = 0

        def step(self, closure=None):
            self.calls += 1
            return super().step(closure) if self.calls % 2 == 0 else None

    Descends(make_model().parameters())  # hooks around the parent's step
    models, optimizers = pair(EveryOther, {"lr": 0.1})
    LRMultiplierOverride(optimizers[:1], by_parameter(models[0], UNEVEN)).arm()
    assert_same_training(models, optimizers, steps=4, ways=(False,))
