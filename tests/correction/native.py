"""The oracle: groups made before training, one for each multiplier, and everything they leave behind."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from spectral_monitor.correction.override.lr_override import LRMultiplierOverride
from tests.noninterference.recorder import leaves

DECOUPLED = {"AdamW": "weight_decay", "Adafactor": "weight_decay", "Muon": "weight_decay", "ASGD": "lambd"}
"""Written down again from the sources of torch 2.13."""
UNEVEN = (0.37, 1.0, 2.3, 0.37)
POWERS = (0.25, 1.0, 8.0, 0.25)
"""By parameter. With powers of two a schedule is multiplied without rounding, before or after."""


def make_model(bias=True, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7, bias=bias), nn.Tanh(), nn.Linear(7, 3, bias=bias))


def loss_of(model, step=0):
    generator = torch.Generator().manual_seed(step)
    return model(torch.randn(6, 5, generator=generator)).sub(0.5).square().mean()


def closure_for(model, optimizer, step=0):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        return loss

    return closure


def by_parameter(model, multipliers):
    return dict(zip(model.parameters(), multipliers, strict=False))


def native_groups(parameters, multipliers, options, decay=""):
    """The parameters in groups of one multiplier, in order of their first."""
    parameters = list(parameters)
    groups = {}
    for p, m in zip(parameters, multipliers, strict=False):
        scaled = {"lr": options["lr"] * m}
        if decay in options:
            scaled[decay] = options[decay] / m
        groups.setdefault(m, {"params": [], **scaled})["params"].append(p)
    return list(groups.values())


def pair(kind, options, multipliers=UNEVEN, decay="", bias=True, build=lambda optimizer: optimizer):
    """Two equal models: one optimizer with one group, and one with groups of its own for every multiplier."""
    models = [make_model(bias), make_model(bias)]
    plain = kind(models[0].parameters(), **options)
    native = kind(native_groups(models[1].parameters(), multipliers, options, decay), **options)
    return models, (build(plain), build(native))


def everything(model, optimizer):
    """Weights, gradients and optimizer state of every parameter, as bits."""
    record = {}
    for i, p in enumerate(model.parameters()):
        record.update(leaves(f"weight/{i}", p))
        record.update(leaves(f"gradient/{i}", p.grad))
        record.update(leaves(f"state/{i}", dict(optimizer.state.get(p, {}))))
    return record


def take_step(model, optimizer, step, with_closure):
    """One step in one of the two ways."""
    closure = closure_for(model, optimizer, step)
    if with_closure:
        return optimizer.step(closure)
    closure()
    return optimizer.step()


def assert_same_training(models, optimizers, steps=12, ways=(True, False), then=lambda i: None):
    """Both train alike, bit for bit, after every step; a closure is given in every other one."""
    for i in range(steps):
        for model, optimizer in zip(models, optimizers, strict=True):
            take_step(model, optimizer, i, ways[i % len(ways)])
        some, other = (everything(m, o) for m, o in zip(models, optimizers, strict=True))
        assert some == other, f"step {i}: {[key for key in other if some.get(key) != other[key]]}"
        then(i)
    assert any("state/" in key or "weight/" in key for key in some)


def armed(optimizer, model, multipliers=UNEVEN):
    swap = LRMultiplierOverride([optimizer], by_parameter(model, multipliers))
    swap.arm()
    return swap


def groups_of_updates(optimizer):
    """The groups that the updates of an optimizer of torch find from now on, one after the other."""
    found, start = [], optimizer._init_group

    def look(group, *rest):
        found.append(group)
        return start(group, *rest)

    optimizer._init_group = look
    return found


def hooks(optimizer):
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


class Descends(torch.optim.Optimizer):
    """Plain descent; what it keeps in its groups is up to those below. Runs the closure first."""

    extra: dict = {}  # noqa: RUF012

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, **self.extra})

    def rate(self, group):
        return group["lr"]

    def step(self, closure=None):
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                rate = self.rate(group)
                for p in group["params"]:
                    p.add_(p.grad, alpha=-float(rate))
        return loss


class SizesItsSteps(Descends):
    """As Adafactor with ``relative_step``, whose groups have no learning rate."""

    def __init__(self, params):
        super().__init__(params, None)

    def rate(self, group):
        return 0.01


UNFIT = {"Optimizer", "LBFGS", "Rprop"}
SPARSE = "SparseAdam"
SPECIAL = [
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
    ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
    ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("AdamW", {"weight_decay": 0.3, "amsgrad": True}),
    ("AdamW", {"weight_decay": 0.3, "maximize": True, "foreach": False}),
    ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {"weight_decay": 0.1}),
    ("RMSprop", {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.1}),
    ("Adadelta", {"weight_decay": 0.1}),
    ("Adamax", {"weight_decay": 0.1}),
    ("Adafactor", {"weight_decay": 0.1}),
    ("ASGD", {"lambd": 0.05, "t0": 4, "weight_decay": 0.1}),
    ("Muon", {"weight_decay": 0.1, "nesterov": False}),
]


def variants():
    """Every optimizer of torch as a plain loop, over lists of tensors and fused, and with options that matter."""
    kinds = {
        name: kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and name not in {*UNFIT, SPARSE}
    }
    found = []
    for name, kind in kinds.items():
        accepted = inspect.signature(kind).parameters
        flags = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}]
        found += [(name, flag) for flag in flags if set(flag) <= set(accepted)]
    for name, options in [*found, *SPECIAL]:
        written = ",".join(f"{key}={value}" for key, value in options.items())
        yield pytest.param(name, options, id=f"{name}({written})")


def full_options(name, options):
    """With a learning rate, and the default of the decay that is apart from the gradient, if there is one."""
    kind = getattr(torch.optim, name)
    decay = "weight_decay" if options.get("decoupled_weight_decay") else DECOUPLED.get(name, "")
    options = {"lr": 0.05, **options}
    if decay:
        options.setdefault(decay, inspect.signature(kind).parameters[decay].default)
    return kind, options, decay
