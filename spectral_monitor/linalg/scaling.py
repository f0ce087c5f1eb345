"""Frobenius norms, and matrices made safe to square: their entries may be of any size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spectral_monitor.linalg.collectives import Coroutine, gather
from spectral_monitor.linalg.sharded_stack import ShardedStack

SHORT = 72
"""Rows up to this length are summed in float64: a flat float32 sum would be long."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that norms of such matrices are computed in: float32 for half precisions, else the same."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def frobenius(A: Tensor) -> Tensor:
    """Return Frobenius norms of (K, m, n) as (K,): by rows, for a flat float32 sum is off by 6e-4 at 4096 x 4096."""
    if A.shape[2] < SHORT:
        thin: Tensor = torch.linalg.vector_norm(A, dim=(1, 2), dtype=torch.float64).to(A.dtype)
        return thin
    norms: Tensor = torch.linalg.vector_norm(torch.linalg.vector_norm(A, dim=2), dim=1)
    return norms


def tame(stacks: Sequence[ShardedStack]) -> Coroutine[tuple[list[ShardedStack], Tensor, Tensor, int]]:
    """Make stacks safe to square; return them, Frobenius norms (K,), scales (K,) to multiply results with, and passes.

    A scale is 1 but for matrices of extreme entries; a matrix with NaN or inf becomes 0, of norm 1 and scale NaN
    or inf.
    """
    fro = torch.cat((yield from gather([A.combined(frobenius, 2) for A in stacks])))
    limits = torch.finfo(fro.dtype)
    safe = (fro > limits.tiny**0.3) & (fro < limits.max**0.4)  # 4e-12 to 3e15 in float32
    if not any(A.shape[1] and A.shape[2] for A in stacks) or bool(safe.all()):
        return list(stacks), fro, torch.ones_like(fro), 1
    largest = torch.cat((yield from gather([A.combined(_largest, math.inf) for A in stacks])))
    safe |= largest == 0
    if bool(safe.all()):
        return list(stacks), fro, torch.ones_like(fro), 2
    finite = torch.isfinite(largest)
    scale = torch.where(safe, 1.0, largest)
    splits = [x.split([A.shape[0] for A in stacks]) for x in (safe, finite, scale)]
    tamed = [
        A if bool(fine.all()) else A.map(_Tamer(known, divisor))
        for A, fine, known, divisor in zip(stacks, *splits, strict=True)
    ]
    again = torch.cat((yield from gather([A.combined(frobenius, 2) for A in tamed])))
    return tamed, torch.where(finite, again, 1.0), scale, 5


class _Tamer(NamedTuple):
    """Divides matrices by their scale, and replaces those that are not finite by 0."""

    known: Tensor
    divisor: Tensor

    def __call__(self, B: Tensor, members: Tensor | None) -> Tensor:
        known, divisor = self if members is None else (self.known[members], self.divisor[members])
        return torch.where(known[:, None, None], B, 0.0) / torch.where(known, divisor, 1.0)[:, None, None]


def _largest(A: Tensor) -> Tensor:
    size: Tensor = torch.linalg.vector_norm(A, ord=math.inf, dim=(1, 2))
    return size
