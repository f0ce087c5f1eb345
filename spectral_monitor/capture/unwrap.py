"""Models and optimizers of the user inside the wrappers of training frameworks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from spectral_monitor.layers.naming import PARALLEL
from spectral_monitor.messages import joined


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the user's own module inside a wrapper, the module itself if it is none.

    Wrappers are torch's parallel ones, and those of a class with a *property* ``module`` (Fabric's), which a user's
    child of that name is not; neither may hold parameters besides.

    Example:
        >>> net = nn.Linear(2, 3)
        >>> unwrap_model(nn.DataParallel(net)) is net
        True
    """
    inside = getattr(model, "module", None)
    wraps = isinstance(model, PARALLEL) or isinstance(getattr(type(model), "module", None), property)
    if not wraps or not isinstance(inside, nn.Module) or inside is model:
        return model
    if {id(p) for p in model.parameters()} - {id(p) for p in inside.parameters()}:
        return model
    return unwrap_model(inside)


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer around whose ``step`` torch calls hooks: itself, or the one it holds as ``optimizer``.

    Fabric's and Accelerate's wrappers call themselves optimizers, but never went through ``Optimizer.__init__``. An
    optimizer that did is taken as it is, even if it works through another one (Lookahead, say): its step is the step.

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> unwrap_optimizer(sgd) is sgd
        True
    """
    while not getattr(getattr(type(optimizer), "step", None), "hooked", False):  # torch's own mark
        inside = getattr(optimizer, "optimizer", None)
        if not isinstance(inside, Optimizer) or inside is optimizer:
            break
        optimizer = inside
    return optimizer


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters that an optimizer holds, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def unwrap_optimizers(optimizer: Any, model: nn.Module) -> list[Optimizer]:
    """Return the optimizers of a model, one or several, without their wrappers.

    Raises:
        TypeError: something is no optimizer, or there is none.
        ValueError: an optimizer is given twice, none holds a parameter of the model, or one holds a parameter on the
            meta device.
    """
    found = [unwrap_optimizer(item) for item in (optimizer if isinstance(optimizer, Iterable) else [optimizer])]
    if not found or not all(isinstance(item, Optimizer) for item in found):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or a list of them, got {optimizer!r}")
    for place, item in enumerate(found):
        if any(item is other for other in found[:place]):
            raise ValueError(f"optimizer: the same {type(item).__name__} is given twice; give each optimizer once")
    mine = {id(p): name for name, p in model.named_parameters()}
    held = [p for item in found for p in parameters_of(item) if id(p) in mine]
    if mine and not held:
        kind = type(model).__name__
        raise ValueError(f"the optimizer holds no parameter of the model ({kind}): it is another model's, or a copy's")
    empty = [mine[id(p)] for p in held if p.is_meta]
    if empty:
        names = joined(empty, 3)
        raise ValueError(f"{names}: on the meta device, without values; give them values, then make the optimizer")
    return found
