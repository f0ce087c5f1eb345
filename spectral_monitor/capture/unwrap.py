"""Models and optimizers of the user inside the wrappers of training frameworks."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


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
    wraps = isinstance(model, _PARALLEL) or isinstance(getattr(type(model), "module", None), property)
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
