"""Frobenius norms, and matrices rescaled so that their squares neither overflow nor underflow."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from spectral_monitor.linalg.collectives import Coroutine, gather
from spectral_monitor.linalg.sharded_stack import ShardedStack

SHORT = 72
"""Rows shorter than this are summed in float64, for a float32 sum over the whole matrix is inaccurate."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that norms of such matrices are computed in: float32 for half precisions, else the same."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def frobenius(A: Tensor) -> Tensor:
    """Return the Frobenius norms (K,) of (K, m, n), by rows: a flat float32 sum is off by 6e-4 at 4096 x 4096."""
    if A.shape[2] < SHORT:
        thin: Tensor = torch.linalg.vector_norm(A, dim=(1, 2), dtype=torch.float64).to(A.dtype)
        return thin
    norms: Tensor = torch.linalg.vector_norm(torch.linalg.vector_norm(A, dim=2), dim=1)
    return norms


def tame(stacks: Sequence[ShardedStack]) -> Coroutine[tuple[list[ShardedStack], Tensor, Tensor, list[int]]]:
    """Make stacks safe to square; return them, Frobenius norms (K,), scales (K,) to multiply results by, and passes.

    A scale is 1 unless a matrix has extreme entries. A matrix with NaN or inf becomes 0, with norm 1 and a scale of NaN
    or inf.
    """
    fro = torch.cat((yield from gather([A.combined(frobenius, 2) for A in stacks])))
    limits = torch.finfo(fro.dtype)
    safe = (fro > limits.tiny**0.3) & (fro < limits.max**0.4)  # 4e-12 to 3e15 in float32
    counts = [A.shape[0] for A in stacks]
    tamed, fros, passes = list(stacks), list(fro.split(counts)), [1] * len(stacks)
    scales = [torch.ones_like(norms) for norms in fros]
    # Only stacks with an extreme matrix are read again. The host waits once for each check, not once for each stack.
    suspects = [k for k in _failing_stacks(safe, counts) if stacks[k].shape[1] and stacks[k].shape[2]]
    largest_entry = partial(torch.linalg.vector_norm, ord=math.inf, dim=(1, 2))
    largest = yield from gather([stacks[k].combined(largest_entry, math.inf) for k in suspects])
    for k, size in zip(suspects, largest, strict=True):
        scales[k] = torch.where(safe.split(counts)[k] | (size == 0), 1.0, size)
        passes[k] = 2
    extreme = _failing_stacks(torch.cat(scales) == 1, counts) if suspects else []
    finite = {k: torch.isfinite(scales[k]) for k in extreme}
    for k in extreme:
        tamed[k] = stacks[k].map(partial(_tamed, finite[k], scales[k]))
        passes[k] = 5
    rescaled = yield from gather([tamed[k].combined(frobenius, 2) for k in extreme])
    for k, norms in zip(extreme, rescaled, strict=True):
        fros[k] = torch.where(finite[k], norms, 1.0)
    return tamed, torch.cat(fros), torch.cat(scales), passes


def _failing_stacks(passed: Tensor, counts: Sequence[int]) -> list[int]:
    """Return the stacks, of ``counts`` matrices, with a matrix that has not passed a check."""
    if bool(passed.all()):  # nearly always
        return []
    ends = list(itertools.accumulate(counts))
    return sorted({bisect.bisect_right(ends, index) for index in (~passed).nonzero().flatten().tolist()})


def _tamed(finite: Tensor, divisor: Tensor, A: Tensor, members: Tensor | None) -> Tensor:
    """Return matrices divided by their divisors, and 0 for those that are not finite."""
    if members is not None:
        finite, divisor = finite[members], divisor[members]
    return torch.where(finite[:, None, None], A, 0.0) / torch.where(finite, divisor, 1.0)[:, None, None]
