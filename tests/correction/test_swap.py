"""Multipliers come to the same, bit for bit, as groups made before training."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from spectral_monitor.correction.override.lr_override import LRMultiplierOverride
from tests.correction.native import (
    POWERS,
    SPARSE,
    UNEVEN,
    UNFIT,
    armed,
    assert_same_training,
    by_parameter,
    closure_for,
    everything,
    full_options,
    groups_of_updates,
    make_model,
    native_groups,
    pair,
    take_step,
    variants,
)

VARIANTS = list(variants())


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_every_optimizer_trains_as_with_groups_of_its_own(name, options):
    kind, options, decay = full_options(name, options)
    bias = name != "Muon"
    multipliers = UNEVEN if bias else UNEVEN[:2]
    models, optimizers = pair(kind, options, multipliers, decay, bias)
    swap = LRMultiplierOverride(optimizers[:1], by_parameter(models[0], multipliers))
    swap.arm()
    assert_same_training(models, optimizers)
    assert len(optimizers[0].param_groups) == 1
    assert not torch.equal(models[0][0].weight, make_model(bias)[0].weight)


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_multipliers_of_one_change_no_bit(name, options):
    kind, options, _ = full_options(name, options)
    bias = name != "Muon"
    models = [make_model(bias), make_model(bias)]
    optimizers = [kind(model.parameters(), **options) for model in models]
    swap = LRMultiplierOverride(optimizers[:1], by_parameter(models[0], (1, 1.0, 1.0, 1.0)))
    swap.arm()
    assert_same_training(models, optimizers, steps=4)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, type("Mine", (torch.optim.AdamW,), {})])
def test_multipliers_of_one_are_a_swap_of_nothing(kind):
    model = make_model()
    optimizer = kind(model.parameters(), lr=0.1)
    swap = LRMultiplierOverride([optimizer], dict.fromkeys(model.parameters(), 1.0))
    (group,) = optimizer.param_groups
    swap.arm()
    seen = groups_of_updates(optimizer)
    take_step(model, optimizer, 0, with_closure=False)
    assert seen[0] is group


def test_every_optimizer_of_torch_is_tried_or_refused():
    tried = {parameter.values[0] for parameter in VARIANTS}
    assert tried | UNFIT | {SPARSE} == {
        name
        for name, item in vars(torch.optim).items()
        if inspect.isclass(item) and issubclass(item, torch.optim.Optimizer)
    }


def test_sparse_gradients():
    def tables():
        torch.manual_seed(0)
        return nn.ModuleList([nn.Embedding(7, 4, sparse=True), nn.Embedding(5, 4, sparse=True)])

    models = [tables(), tables()]
    plain = torch.optim.SparseAdam(models[0].parameters(), lr=0.05)
    native = torch.optim.SparseAdam(native_groups(models[1].parameters(), (0.37, 2.3), {"lr": 0.05}))
    LRMultiplierOverride([plain], by_parameter(models[0], (0.37, 2.3))).arm()
    for _ in range(12):
        for model, optimizer in zip(models, (plain, native), strict=True):
            optimizer.zero_grad()
            sum(table(torch.tensor([1, 3, 3])).square().sum() for table in model).backward()
            optimizer.step()
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(one, other)
            assert all(
                torch.equal(plain.state[one][key], native.state[other][key]) for key in ("exp_avg", "exp_avg_sq")
            )


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_several_groups_are_expanded_each_by_itself(kind):
    """Among them one that needs nothing, which stays the object it is."""
    multipliers = ((1.0, 1.0), (0.37, 2.3))
    models = [make_model(), make_model()]
    options = ({"lr": 0.1, "weight_decay": 0.2}, {"lr": 0.03, "weight_decay": 0.7})
    plain = kind([{"params": models[0][i].parameters(), **o} for i, o in zip((0, 2), options, strict=True)])
    decay = "weight_decay" if kind is torch.optim.AdamW else ""
    natives = [
        group
        for i, o, m in zip((0, 2), options, multipliers, strict=True)
        for group in native_groups(models[1][i].parameters(), m, o, decay)
    ]
    for group, weight_decay in zip(natives, (0.2, 0.7, 0.7), strict=True):
        group.setdefault("weight_decay", weight_decay)
    native = kind(natives)
    swap = LRMultiplierOverride([plain], by_parameter(models[0], sum(multipliers, ())))
    swap.arm()
    first, seen = plain.param_groups[0], groups_of_updates(plain)
    assert_same_training(models, (plain, native), ways=(False,))
    assert len(seen) == 12 * len(natives)
    for groups in zip(seen[::3], seen[1::3], seen[2::3], strict=True):
        assert groups[0] is first
        assert [(g["lr"], g["weight_decay"]) for g in groups] == [(g["lr"], g["weight_decay"]) for g in natives]


def test_multipliers_that_change_between_steps():
    models = [make_model(), make_model()]
    plain = torch.optim.AdamW(models[0].parameters(), lr=0.1, weight_decay=0.2)
    native = torch.optim.AdamW([{"params": [p]} for p in models[1].parameters()], lr=0.1, weight_decay=0.2)
    swap = LRMultiplierOverride([plain], {})
    swap.arm()
    for i in range(12):
        multipliers = [0.5 + 0.3 * ((i // 2 + k) % 3) for k in range(4)]
        swap.multipliers = by_parameter(models[0], multipliers)
        for group, m in zip(native.param_groups, multipliers, strict=True):
            group["lr"], group["weight_decay"] = 0.1 * m, 0.2 / m
        for model, optimizer in zip(models, (plain, native), strict=True):
            take_step(model, optimizer, i, with_closure=i % 2 == 0)
        assert everything(models[0], plain) == everything(models[1], native)
    assert list(swap.multipliers.values()) == multipliers


# ------------------------------------------------------------------------------------------------------ schedules


def one_cycle(optimizer):
    """Which writes momentum into the groups; a peak for every group."""
    peaks = [group["lr"] for group in optimizer.param_groups]
    return schedules.OneCycleLR(optimizer, max_lr=peaks, total_steps=14)


def in_sequence(optimizer):
    warmup = schedules.LinearLR(optimizer, start_factor=0.1, total_iters=4)
    decay = schedules.ExponentialLR(optimizer, gamma=0.8)
    return schedules.SequentialLR(optimizer, [warmup, decay], milestones=[4])


SCHEDULES = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda i: 1 / (1 + i)),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, T_max=10),
    "OneCycleLR": one_cycle,
    "SequentialLR": in_sequence,
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, factor=0.3, patience=1),
}
SCHEDULED = [
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
    ("AdamW", {"weight_decay": 0.3}),
    ("AdamW", {"weight_decay": 0.3, "foreach": False}),
    ("AdamW", {"weight_decay": 0.3, "fused": True}),
    ("Adam", {"weight_decay": 0.3}),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("name", "options"), SCHEDULED, ids=lambda value: str(value))
def test_schedules_go_on_as_ever(name, options, schedule):
    kind, options, decay = full_options(name, options)
    models, optimizers = pair(kind, options, POWERS, decay)
    LRMultiplierOverride(optimizers[:1], by_parameter(models[0], POWERS)).arm()
    schedulers = [SCHEDULES[schedule](optimizer) for optimizer in optimizers]
    rates = []

    def then(i):
        plateau = schedule == "ReduceLROnPlateau"
        for scheduler in schedulers:
            scheduler.step(1.0) if plateau else scheduler.step()
        base, groups = optimizers[0].param_groups[0], optimizers[1].param_groups
        assert [group["lr"] for group in groups] == [base["lr"] * m for m in dict.fromkeys(POWERS)]
        assert schedulers[0].get_last_lr() == [base["lr"]]
        rates.append(base["lr"])

    assert_same_training(models, optimizers, then=then)
    assert len(set(rates)) > 3


# ---------------------------------------------------------------------------------------------------- weight decay


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "Muon", "ASGD"])
def test_a_decay_apart_from_the_gradient_keeps_its_strength(name):
    """Without a gradient only the decay is left: the same with and without a multiplier."""
    kind, options, decay = full_options(name, {"weight_decay": 0.25} if name != "ASGD" else {"lambd": 0.25})
    shrunk = []
    for multiplier in (1.0, 4.0):
        model = make_model(bias=False)
        optimizer = kind(model.parameters(), **options)
        LRMultiplierOverride([optimizer], dict.fromkeys(model.parameters(), multiplier)).arm()
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
        shrunk.append([p.detach().clone() for p in model.parameters()])
        assert optimizer.param_groups[0][decay] == 0.25
    for one, four, start in zip(*shrunk, make_model(bias=False).parameters(), strict=True):
        assert torch.equal(one, four)
        assert four.norm() < 0.99 * start.norm()


def test_a_decay_in_the_gradient_is_scaled_with_it():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, weight_decay=0.25)
    LRMultiplierOverride([optimizer], dict.fromkeys(model.parameters(), 4.0)).arm()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, start in zip(model.parameters(), make_model().parameters(), strict=True):
        assert torch.equal(p, start - 4 * 0.125 * (0.25 * start))


# ---------------------------------------------------------------------------------------- learning rates in tensors


@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": True}], ids=str)
def test_a_learning_rate_in_a_tensor_stays_one(options):
    rates = [torch.tensor(0.05), torch.tensor(0.05)]
    models = [make_model(), make_model()]
    plain = torch.optim.AdamW(models[0].parameters(), lr=rates[0], weight_decay=0.3, **options)
    groups = native_groups(models[1].parameters(), POWERS, {"lr": rates[1], "weight_decay": 0.3}, "weight_decay")
    native = torch.optim.AdamW(groups, lr=rates[1], **options)
    LRMultiplierOverride([plain], by_parameter(models[0], POWERS)).arm()
    schedulers = [schedules.ExponentialLR(optimizer, gamma=0.5) for optimizer in (plain, native)]
    seen = groups_of_updates(plain)

    def then(i):
        for scheduler in schedulers:
            scheduler.step()
        assert plain.param_groups[0]["lr"] is rates[0]

    assert_same_training(models, (plain, native), ways=(False,), then=then)
    found = [group["lr"] for group in seen]
    assert all(isinstance(lr, torch.Tensor) and lr.dtype == torch.float32 for lr in found[:3])
    assert [float(lr) for lr in found[3:6]] == [0.5 * float(torch.tensor(0.05)) * m for m in dict.fromkeys(POWERS)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know", "ignore:.torch.jit.script_method")
def test_a_compiled_step_is_corrected_too():
    models, optimizers = pair(torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.3}, decay="weight_decay")
    LRMultiplierOverride(optimizers[:1], by_parameter(models[0], UNEVEN)).arm()
    steps = [torch.compile(optimizer.step, backend="eager") for optimizer in optimizers]
    for i in range(3):
        for model, optimizer, step in zip(models, optimizers, steps, strict=True):
            closure_for(model, optimizer, i)()
            step()
        assert everything(models[0], optimizers[0]) == everything(models[1], optimizers[1])
    torch._dynamo.reset()


class Halving(torch.optim.AdamW):
    """Halves its decay at each step."""

    def step(self, closure=None):
        found = super().step(closure)
        for group in self.param_groups:
            group["weight_decay"] *= 0.5
        return found


def test_names_of_options_may_come_from_anywhere():
    """Of a file, for instance: equal to those in the source, and other objects."""
    model = make_model()
    optimizer = Halving(model.parameters(), lr=0.1)
    (group,) = optimizer.param_groups
    del group["weight_decay"]
    group["".join(["weight", "_decay"])] = 0.5
    armed(optimizer, model, POWERS)
    take_step(model, optimizer, 0, with_closure=False)
    assert optimizer.param_groups[0]["weight_decay"] == 0.25
