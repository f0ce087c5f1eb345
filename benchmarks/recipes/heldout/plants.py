"""What the held-out faults do to a run, and how it is undone."""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from benchmarks.recipes.heldout.data import Supervised
from benchmarks.recipes.plants import Plant
from benchmarks.recipes.run import Run

HANDLES: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()


def rates(factor: float, pattern: str = "") -> Plant:
    """Multiply all rates, or those of parameters that match."""
    return lambda run: run.scale_rate(pattern, factor) if pattern else run.scale_rates(factor)


def weights(factor: float, *patterns: str) -> Plant:
    """Multiply matrices that match; all of them without patterns."""

    def plant(run: Run) -> None:
        done = set()
        for pattern in patterns or ("*",):
            for name, p in run.parameters(pattern):
                if p.ndim > 1 and name not in done:
                    run.scale_weight(name.replace("[", "[[]"), factor)
                    done.add(name)

    return plant


def modules(run: Run, pattern: str) -> list[tuple[str, nn.Module]]:
    """Modules whose name matches.

    Raises:
        ValueError: there are none.
    """
    matches = [(name, module) for name, module in run.model.named_modules() if fnmatchcase(name, pattern)]
    if not matches:
        raise ValueError(f"no module matches {pattern!r}")
    return matches


def inputs(change: Callable[[Tensor], Tensor]) -> Plant:
    """Change the model's first input, in training and evaluation."""
    return lambda run: run.model.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:])) and None


def outputs(pattern: str, change: Callable[[Tensor], Tensor]) -> Plant:
    """Change what modules give."""

    def plant(run: Run) -> None:
        for _, module in modules(run, pattern):
            HANDLES[module] = module.register_forward_hook(lambda _, args, out: change(out))

    return plant


def as_before(pattern: str) -> Plant:
    """Let modules give what they gave before their outputs were changed."""

    def mend(run: Run) -> None:
        for _, module in modules(run, pattern):
            HANDLES.pop(module).remove()

    return mend


def targets(factor: float) -> Plant:
    """Multiply a regression's targets."""

    def plant(run: Run) -> None:
        task = run.loss
        assert isinstance(task, Supervised)
        task.y, task.held_out_y = factor * task.y, factor * task.held_out_y

    return plant


def half_precision(run: Run) -> None:
    """Keep weights in bfloat16; inputs are cast on the way in, outputs on the way out."""
    run.model.bfloat16()

    def into(model: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        kind = next(model.parameters()).dtype
        return tuple(x.to(kind) if x.is_floating_point() else x for x in args)

    run.model.register_forward_pre_hook(into)
    run.model.register_forward_hook(lambda model, args, out: out.float())


def full_precision(run: Run) -> None:
    run.model.float()


def identities(*patterns: str) -> Plant:
    """Leave modules out; their parameters are no optimizer's any more."""

    def plant(run: Run) -> None:
        gone = set()
        for pattern in patterns:
            for name, module in modules(run, pattern):
                gone |= {id(p) for p in module.parameters()}
                parent, _, child = name.rpartition(".")
                setattr(run.model.get_submodule(parent), child, nn.Identity())
        for group in run.groups():
            group["params"] = [p for p in group["params"] if id(p) not in gone]

    return plant


def stopped(pattern: str, matrices: bool = False) -> Plant:
    """Set rates to 0, of all that matches or of its matrices."""

    def plant(run: Run) -> None:
        for name, p in run.parameters(pattern):
            if p.ndim > 1 or not matrices:
                run.scale_rate(name, 0.0)

    return plant


def rates_by_fans(run: Run) -> None:
    """Make rates follow fan-out over fan-in, as they should under SGD."""
    linear = [(name, m) for name, m in run.model.named_modules() if isinstance(m, nn.Linear)]
    for name, module in linear:
        run.scale_rate(f"{name}.weight", module.out_features / module.in_features)


def neural_tangent(run: Run) -> None:
    """Draw hidden weights with a variance of 1 and divide what they give by the root of the fan-in."""
    for _, module in run.model.named_modules():
        if isinstance(module, nn.Linear):
            root = math.sqrt(module.in_features)
            with torch.no_grad():
                module.weight.mul_(root)
                module.bias.mul_(root)
            module.register_forward_hook(lambda _, args, out, root=root: out / root)


def biases(pattern: str, value: float) -> Plant:
    def plant(run: Run) -> None:
        with torch.no_grad():
            for _, p in run.parameters(pattern):
                p.fill_(value)

    return plant


def schedule(factor: Callable[[float], float]) -> Plant:
    """Replace the schedule by a function of the share of steps taken."""

    def plant(run: Run) -> None:
        run.schedule = lambda t: factor(t / run.steps)

    return plant


def adapters(factor: float) -> Plant:
    """Multiply the scaling of all adapters."""

    def plant(run: Run) -> None:
        for _, module in run.model.named_modules():
            if hasattr(module, "scaling"):
                module.scaling = factor * module.scaling

    return plant


def dropped(p: float) -> Plant:
    def plant(run: Run) -> None:
        for _, module in run.model.named_modules():
            if isinstance(module, nn.Dropout):
                module.p = p

    return plant
