"""Gradients of parameters in this process, and what clipping took away from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectral_monitor.functional import contribution
from spectral_monitor.linalg import compute_dtype
from spectral_monitor.sharding.shard_region import extent_of
from spectral_monitor.state.dtensor import is_distributed, local_part

CHUNK = 1 << 18
"""Entries of an update that are there at a time."""
SUMMED = "its gradient has yet to be summed over processes (sequence parallelism)"
UNEVEN = 1e-4
"""Two norms whose ratio is off by more were not multiplied by one factor."""
UNEVEN_HALF = 0.01
"""The same of gradients in half precision, where each entry is rounded to three digits."""
SAME = 0.1
"""Of that: gradients whose norm has changed by a smaller part were left alone."""


def _dense(gradient: Tensor) -> Tensor:
    """Return a gradient that an embedding left sparse as the optimizers see it; any other unchanged."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def gradient_here(p: Tensor) -> Tensor | None:
    """Return the local part of a gradient, with the same entries as the local part of its parameter; ``None`` if there
    is none.

    Raises:
        ValueError: entries of the gradient lie elsewhere, or have yet to be summed.
    """
    if p.grad is None:
        return None
    gradient = _dense(local_part(p.grad))
    if not is_distributed(p.grad) or p.grad.placements == p.placements:  # type: ignore[attr-defined]
        return gradient
    # Tensor parallelism may leave a whole gradient to a parameter that is split.
    mine, there = extent_of(p), extent_of(p.grad)
    if any(a < c or b > d for (a, b), (c, d) in zip(mine.box, there.box, strict=True)):
        raise ValueError(f"a gradient lies elsewhere ({there.placement}) than its parameter ({mine.placement})")
    gradient = gradient.reshape([b - a for a, b in there.box])
    return gradient[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(mine.box, there.box, strict=True))]


def summed_over(p: Tensor) -> list[int]:
    """Dimensions of its mesh whose processes all hold the same of a parameter, but a summand each of its gradient.

    Sequence parallelism leaves such gradients to norms. None where the gradient is not placed as the parameter else.
    """
    if p.grad is None or not is_distributed(p.grad):
        return []
    pairs = list(enumerate(zip(p.placements, p.grad.placements, strict=True)))  # type: ignore[attr-defined]
    found = [k for k, (held, placed) in pairs if held.is_replicate() and placed.is_partial("sum")]
    return found if all(k in found or held == placed for k, (held, placed) in pairs) else []


def gradient_norms(parameters: Sequence[Tensor]) -> Tensor:
    """Norms of what is here of the gradients, -1 for those that are gone."""
    if not parameters:
        return torch.empty(0, device="cpu")
    gradients = [None if p.grad is None else _dense(local_part(p.grad)) for p in parameters]
    there = [g for g in gradients if g is not None]
    doubles = any(g.dtype in (torch.float64, torch.complex128) for g in there)
    dtype = torch.float64 if doubles else torch.float32
    gone = torch.full((), -1.0, dtype=dtype, device=local_part(parameters[0]).device)
    norms = iter(torch._foreach_norm(there) if there else ())
    return torch.stack([gone if g is None else next(norms).to(gone) for g in gradients])


def contribution_here(p: Tensor, old: Tensor) -> Tensor:
    """Return the first-order effect on the loss of the step of a local part; the mean over all processes that hold the
    same part.
    """
    new, summed = local_part(p), summed_over(p)
    gradient = _dense(local_part(p.grad)) if summed else gradient_here(p)  # type: ignore[arg-type]
    assert gradient is not None
    if new.is_complex():  # torch's gradient is that of the real and imaginary parts
        gradient, new, old = (torch.view_as_real(x.resolve_conj()) for x in (gradient, new, old))
    if not new.ndim:
        gradient, new, old = gradient.reshape(1), new.reshape(1), old.reshape(1)
    # A few rows at a time: the difference of all would be another copy.
    rows = max(1, CHUNK * len(new) // max(new.numel(), 1))
    parts = zip(gradient.split(rows), new.split(rows), old.split(rows), strict=True)
    dtype = compute_dtype(new.dtype)
    total: Tensor = torch.stack([contribution(g, a.to(dtype) - b.to(a.device, dtype)) for g, a, b in parts]).sum()
    summands: int = math.prod([p.grad.device_mesh.size(k) for k in summed])  # type: ignore[union-attr]
    return total * summands


@dataclass(frozen=True)
class Clipping:
    """The effect of clipping on the gradients of an optimizer's parameters, scalars on their device."""

    factor: Tensor  # by which gradients were larger before
    # 1 where no factor says it, for gradients were clipped entry by entry or are others than before, else 0
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
