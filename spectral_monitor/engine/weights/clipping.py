"""Gradient clipping: what it took away, so that contributions are those of the loss's own gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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


def clipping_since(
    arrived: tuple[Sequence[Tensor], Tensor], parameters: Sequence[Tensor], norms: Tensor
) -> Clipping | None:
    """Return what was done to an optimizer's gradients since they arrived; ``None`` where nothing is known of any.

    A factor is the same in every process, so each finds it by what it holds.

    Args:
        arrived: parameters, and norms of what is here of the gradients that arrived there.
        parameters: those with a gradient now, in any order: a correction splits groups, and so exchanges them.
        norms: of these gradients.
    """
    places = {id(p): place for place, p in enumerate(arrived[0])}
    both = [(places[id(p)], place) for place, p in enumerate(parameters) if id(p) in places]
    if not both:
        return None
    then = arrived[1].to(norms)
    if not len(both) == len(places) == len(parameters) or any(i != j for i, j in both):
        then, norms = then[[i for i, _ in both]], norms[[j for _, j in both]]  # a device waits for the order
    halves = any(p.grad is not None and p.grad.itemsize < 4 for p in parameters)
    uneven = UNEVEN_HALF if halves else UNEVEN
    factor = torch.linalg.vector_norm(then) / torch.linalg.vector_norm(norms)
    # NaN and inf speak for themselves.
    factor = torch.where(factor.isfinite() & ((factor - 1).abs() > SAME * uneven), factor, 1.0)
    return Clipping(factor, ((then - factor * norms).abs() > uneven * then).any().float())
