"""The user's models and optimizers inside the wrappers of training frameworks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from spectral_monitor.layers.naming import PARALLEL
from spectral_monitor.messages import joined


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the user's module inside a wrapper, or the module itself if it is no wrapper.

    Wrappers are torch's parallel modules, and modules whose class has a *property* ``module`` (Fabric's); a user's
    child of that name is no property. A wrapper holds no parameters of its own.

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
    """Return the optimizer whose ``step`` has torch's hooks: this one, or the one that it wraps as ``optimizer``.

    Fabric's and Accelerate's wrappers derive from ``Optimizer``, but do not run its ``__init__``. An optimizer that
    does is not unwrapped, even if it steps another one (Lookahead, for example).

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> unwrap_optimizer(sgd) is sgd
        True
    """
    while not getattr(getattr(type(optimizer), "step", None), "hooked", False):  # set by torch
        inside = getattr(optimizer, "optimizer", None)
        if not isinstance(inside, Optimizer) or inside is optimizer:
            break
        optimizer = inside
    return optimizer


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def unwrap_optimizers(optimizer: Any, model: nn.Module) -> list[Optimizer]:
    """Return the optimizers of a model, one or several, without their wrappers.

    Raises:
        TypeError: an item is no optimizer, or there is none.
        ValueError: an optimizer is given twice, none holds a parameter of the model, or one holds a parameter on the
            meta device.
    """
    optimizers = [unwrap_optimizer(item) for item in (optimizer if isinstance(optimizer, Iterable) else [optimizer])]
    if not optimizers or not all(isinstance(item, Optimizer) for item in optimizers):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or a list of them, got {optimizer!r}")
    for i, item in enumerate(optimizers):
        if any(item is other for other in optimizers[:i]):
            raise ValueError(f"optimizer: the same {type(item).__name__} is listed twice; list each optimizer once")
    names = {id(p): name for name, p in model.named_parameters()}
    optimized = [p for item in optimizers for p in parameters_of(item) if id(p) in names]
    if names and not optimized:
        kind = type(model).__name__
        raise ValueError(
            f"the optimizer holds no parameter of the model ({kind}): it was made for another model, or for a copy"
        )
    if empty := [names[id(p)] for p in optimized if p.is_meta]:
        listed = joined(empty, 3)
        raise ValueError(f"{listed}: on the meta device, without values; initialize them before you make the optimizer")
    return optimizers
