"""Biases, gains and other parameters without a measured matrix that no optimizer holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from torch.optim import Optimizer

UNREGISTERED = "unregistered parameter"
"""The name of a parameter that no module of the model has begins so."""


class Forgotten:
    """Finds parameters that get gradients although no optimizer holds them and nothing has changed them.

    Args:
        parameters: all parameters to watch, by name.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 2)
        >>> forgotten = Forgotten(dict(model.named_parameters()))
        >>> model(torch.ones(2)).sum().backward()
        >>> forgotten.names([torch.optim.SGD([model.weight])])
        ('bias',)
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._at_start: dict[str, tuple[nn.Parameter, int]] = {}
        self.watch(parameters)

    def watch(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Watch these parameters too, from now on."""
        self._at_start |= {name: (p, p._version) for name, p in parameters.items()}

    def names(self, optimizers: Iterable[Optimizer]) -> tuple[str, ...]:
        """Return their names, in the order in which they were given; only reads."""
        optimized = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        # Code that changes a parameter in place, such as an update written by hand, counts as an optimizer.
        return tuple(
            name
            for name, (p, version) in self._at_start.items()
            if p.requires_grad and p.grad is not None and id(p) not in optimized and p._version == version
        )
