"""Ways to spoil a run and to mend it again, from which the development faults are made."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.recipes.plants import Plant, setting
from benchmarks.recipes.recipe import Fault
from benchmarks.recipes.run import Run


def fault(
    name: str,
    recipe: str,
    causes: tuple[str, ...],
    plant: Plant,
    layers: tuple[str, ...] = (),
    *,
    factor: float = 0.0,
    width: float = 1.0,
    mend: Plant | None = None,
) -> Fault:
    return Fault(name, recipe, "development", plant, causes, layers, factor, width, mend)


def one_rate(recipe: str, layer: str, factor: float) -> Fault:
    """Make the fault of one layer, weight and bias, with a rate of its own."""
    if factor > 1:
        name = f"{layer} at {factor:g} times the rate"
        causes = ("lr_too_large", "exploding") if factor >= 10 else ("lr_too_large",)
    else:
        name, causes = f"{layer} at 1/{1 / factor:g} of the rate", ("lr_too_small",)
    return fault(name, recipe, causes, rate(f"{layer}*", factor), (f"{layer}*",), factor=factor)


def rate(pattern: str, factor: float) -> Plant:
    return lambda run: run.scale_rate(pattern, factor)


def rates(factor: float) -> Plant:
    return lambda run: run.scale_rates(factor)


def weights(factor: float, *patterns: str) -> Plant:
    def plant(run: Run) -> None:
        for pattern in patterns:
            run.scale_weight(pattern, factor)

    return plant


def filled(value: float, *patterns: str) -> Plant:
    def plant(run: Run) -> None:
        with torch.no_grad():
            for pattern in patterns:
                for _, p in run.parameters(pattern):
                    p.fill_(value)

    return plant


def reset(name: str) -> Plant:
    """Draw the weights of a layer anew, without disturbing the generator of anything else."""

    def mend(run: Run) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            run.model.get_submodule(name).reset_parameters()

    return mend


def inputs(factor: float) -> Plant:
    """Multiply what the model is given."""

    def plant(run: Run) -> None:
        run.model.register_forward_pre_hook(lambda module, args: (args[0] * factor, *args[1:]))

    return plant


def bfloat16(run: Run) -> None:
    """Keep the weights themselves in bfloat16; the loss is still computed in float32."""
    cast(run, torch.bfloat16)


def float32(run: Run) -> None:
    cast(run, torch.float32)


def cast(run: Run, dtype: torch.dtype) -> None:
    def into(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(x.to(dtype) if x.is_floating_point() else x for x in args)

    run.model.to(dtype)
    run.model.register_forward_pre_hook(into)
    run.model.register_forward_hook(lambda module, args, output: output.float())


def without_norms(run: Run) -> None:
    """Replace every batch norm by the identity; its parameters stay with the optimizer, without gradients."""
    for module in list(run.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.Identity())


def restarts(period: int, peak: float) -> Plant:
    """Let the rate fall from a peak to 0 again and again."""
    return setting(schedule=lambda step: peak * (1 - step % period / period))


def adapters(factor: float) -> Plant:
    def plant(run: Run) -> None:
        for module in run.model.modules():
            if hasattr(module, "scaling"):
                module.scaling *= factor

    return plant
