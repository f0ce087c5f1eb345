"""Gradients of parameters in this process, and the effect of clipping on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectral_monitor.functional import contribution
from spectral_monitor.linalg import compute_dtype
from spectral_monitor.sharding.shard_region import extent_of
from spectral_monitor.state.dtensor import is_distributed, local_part, local_tensor

CHUNK = 1 << 18
"""Entries of an update that are computed at a time."""
SUMMED = "its gradient has yet to be summed over processes (sequence parallelism)"
UNEVEN = 1e-4
"""Relative difference above which two norms were not multiplied by the same factor."""
UNEVEN_HALF = 0.01
"""The same for gradients in half precision, whose entries are rounded to three digits."""
UNCHANGED = 0.1
"""Share of that: if the norm of all gradients has changed by less, they were not clipped."""


def _dense(gradient: Tensor) -> Tensor:
    """Return a dense gradient; embeddings may leave sparse ones."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def local_gradient(p: Tensor) -> Tensor | None:
    """Return the gradient of the local part of a parameter; ``None`` if there is none.

    Raises:
        ValueError: entries of the gradient are in another process, or have yet to be summed.
    """
    if p.grad is None:
        return None
    gradient = _dense(local_part(p.grad))
    if not is_distributed(p.grad) or p.grad.placements == p.placements:  # type: ignore[attr-defined]
        return gradient
    # With tensor parallelism a split parameter may have a full gradient.
    needed, available = extent_of(p), extent_of(p.grad)
    if any(a < c or b > d for (a, b), (c, d) in zip(needed.box, available.box, strict=True)):
        raise ValueError(
            f"a gradient is placed differently ({available.placement}) from its parameter ({needed.placement})"
        )
    gradient = gradient.reshape([b - a for a, b in available.box])
    return gradient[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(needed.box, available.box, strict=True))]


def unsummed_dims(p: Tensor) -> list[int]:
    """Return the mesh dimensions along which a parameter is replicated, but its gradient has yet to be summed.

    Sequence parallelism leaves such gradients to the parameters of norms. The list is empty if gradient and parameter
    differ in placement otherwise.
    """
    if p.grad is None or not is_distributed(p.grad):
        return []
    pairs = list(enumerate(zip(p.placements, p.grad.placements, strict=True)))  # type: ignore[attr-defined]
    dims = [k for k, (own, gradient) in pairs if own.is_replicate() and gradient.is_partial("sum")]
    return dims if all(k in dims or own == gradient for k, (own, gradient) in pairs) else []


def gradient_norms(parameters: Sequence[Tensor]) -> Tensor:
    """Return the norms of the local parts of gradients, -1 for those that are ``None``."""
    if not parameters:
        return torch.empty(0, device="cpu")
    gradients = [None if p.grad is None else _dense(local_tensor(p.grad)) for p in parameters]
    present = [g for g in gradients if g is not None]
    doubles = any(g.dtype in (torch.float64, torch.complex128) for g in present)
    dtype = torch.float64 if doubles else torch.float32
    missing = torch.full((), -1.0, dtype=dtype, device=local_tensor(parameters[0]).device)
    norms = iter(torch._foreach_norm(present) if present else ())
    return torch.stack([missing if g is None else next(norms).to(missing) for g in gradients])


def local_contribution(p: Tensor, old: Tensor) -> Tensor:
    """Return the first-order effect on the loss of the step of a local part; ``old``: its entries before the step.

    The effect is the mean over all processes that hold the same part.
    """
    new, unsummed = local_part(p), unsummed_dims(p)
    gradient = _dense(local_part(p.grad)) if unsummed else local_gradient(p)  # type: ignore[arg-type]
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
    summands: int = math.prod([p.grad.device_mesh.size(k) for k in unsummed])  # type: ignore[union-attr]
    return total * summands


@dataclass(frozen=True)
class Clipping:
    """The effect of clipping on the gradients of an optimizer's parameters, scalars on their device."""

    factor: Tensor  # the size of gradients before clipping over that after it
    uneven: Tensor  # 1 if gradients were clipped entry by entry, or replaced, so that no factor describes it; else 0


def clipping_since(
    arrived: tuple[Sequence[Tensor], Tensor], parameters: Sequence[Tensor], norms: Tensor
) -> Clipping | None:
    """Return how an optimizer's gradients have changed since the backward pass; ``None`` if no parameter is known.

    The factor is the same in every process, so each finds it from the parts that it holds.

    Args:
        arrived: parameters, and norms of the local parts of their gradients after the backward pass.
        parameters: those with a gradient now, in any order: a correction splits groups, and so reorders them.
        norms: of their gradients.
    """
    positions = {id(p): i for i, p in enumerate(arrived[0])}
    pairs = [(positions[id(p)], j) for j, p in enumerate(parameters) if id(p) in positions]
    if not pairs:
        return None
    then = arrived[1].to(norms)
    if not len(pairs) == len(positions) == len(parameters) or any(i != j for i, j in pairs):
        then, norms = then[[i for i, _ in pairs]], norms[[j for _, j in pairs]]  # only if needed: the host waits
    halves = any(p.grad is not None and p.grad.itemsize < 4 for p in parameters)
    uneven = UNEVEN_HALF if halves else UNEVEN
    factor = torch.linalg.vector_norm(then) / torch.linalg.vector_norm(norms)
    # NaN and inf are reported as such.
    factor = torch.where(factor.isfinite() & ((factor - 1).abs() > UNCHANGED * uneven), factor, 1.0)
    return Clipping(factor, ((then - factor * norms).abs() > uneven * then).any().float())
