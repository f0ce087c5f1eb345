"""Gradient clipping: what it took away, so that contributions are those of the loss's own gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from spectral_monitor.engine.weights.gradients import gradient_norms

UNEVEN = 1e-4
"""Two norms whose ratio is off by more were not multiplied by one factor."""
UNEVEN_HALF = 0.01
"""The same of gradients in half precision, where each entry is rounded to three digits."""
SAME = 0.1
"""Of that: gradients whose norm has changed by a smaller part were left alone."""


@dataclass(frozen=True)
class Clipping:
    """The effect of clipping on the gradients of an optimizer's parameters, scalars on their device.

    Attributes:
        factor: by which gradients were larger before.
        uneven: 1 where no factor says it, for gradients were clipped entry by entry or are others than before, else 0.
    """

    factor: Tensor
    uneven: Tensor


@dataclass(frozen=True)
class Unclipped:
    """Norms of what is here of an optimizer's gradients before they are clipped.

    A factor is the same in every process, so each finds it by what it holds.

    Attributes:
        parameters: whose gradients these are.
        norms: of them.
        by_value: whether their entries are clipped one by one.
        whole: whether they are all that the optimizer had; else there may be others, of which nothing is known.
    """

    parameters: tuple[Tensor, ...]
    norms: Tensor
    by_value: bool = False
    whole: bool = True

    @classmethod
    def of(cls, optimizer: Optimizer, by_value: bool) -> Unclipped:
        """Return those of now; ``by_value``: whether entries are clipped one by one."""
        parameters = tuple(p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        return cls(parameters, gradient_norms(parameters), by_value)

    def compared(self, parameters: Sequence[Tensor], norms: Tensor) -> Clipping | None:
        """Return what was done since; ``None`` where there are no gradients, or nothing is known of any.

        Args:
            parameters: those with a gradient now, in any order: a correction splits groups, and so exchanges them.
            norms: of these gradients.
        """
        if not parameters:
            return None
        places = {id(p): place for place, p in enumerate(self.parameters)}
        both = [(places[id(p)], place) for place, p in enumerate(parameters) if id(p) in places]
        alike = len(both) == len(places) == len(parameters)
        if self.whole and not alike:
            return Clipping(torch.ones_like(norms[0]), torch.ones_like(norms[0]))
        if not both:
            return None
        then = self.norms.to(norms)
        if not (alike and all(i == j for i, j in both)):  # else a device would wait for the order
            then, norms = then[[i for i, _ in both]], norms[[j for _, j in both]]
        uneven = UNEVEN_HALF if any(p.grad is not None and p.grad.itemsize < 4 for p in parameters) else UNEVEN
        factor = torch.linalg.vector_norm(then) / torch.linalg.vector_norm(norms)
        # NaN and inf speak for themselves.
        factor = torch.where(factor.isfinite() & ((factor - 1).abs() > SAME * uneven), factor, 1.0)
        off = norms < then if self.by_value else (then - factor * norms).abs() > uneven * then
        return Clipping(factor, off.any().float())
