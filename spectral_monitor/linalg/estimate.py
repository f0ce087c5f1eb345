"""Largest singular values of a stack of matrices, with bounds on both sides."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from spectral_monitor.linalg.lanczos import BLOCK, KrylovSpace

SMALL = 64
"""Up to this min(m, n) the Gram matrix is diagonalized: cheaper than Lanczos, and exact."""
CACHE_ENTRIES = 1 << 22
"""Stacks of up to this many entries are measured together on a CPU."""
MAX_STEPS = 32
DOUBT = 0.01
"""Lanczos stops when a start that hides a value beyond the tolerance is at most this probable."""


@dataclass(frozen=True)
class SpectralEstimate:
    """What is known about the largest singular values of a stack of K matrices; NaN for those with NaN or inf entries.

    Attributes:
        sigma: (K,) the estimate, a Rayleigh quotient and so a lower bound up to rounding.
        sigma_low: (K,) ``sigma`` less the rounding of this computation: never above the truth.
        error_bound: (K,) *some* singular value lies this close to ``sigma``: the residual of the singular triplet,
            plus rounding.
        sigma_high: (K,) never below the truth: ``sqrt(sigma^2 + (Frobenius norm of what Lanczos has not seen)^2)``,
            which is at most the Frobenius norm, plus rounding.
        fro: (K,) Frobenius norms; inf for a matrix with inf entries.
        passes: how often the matrices were read, at most.
    """

    sigma: Tensor
    sigma_low: Tensor
    error_bound: Tensor
    sigma_high: Tensor
    fro: Tensor
    passes: int


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype norms of ``dtype`` matrices are computed in: float32 for half precisions, else the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def frobenius(A: Tensor) -> Tensor:
    """Frobenius norms of (K, m, n) as (K,), by rows first: one flat float32 sum is off by 6e-4 at 4096 x 4096."""
    if A.shape[2] < SMALL:  # rows this short would leave a long flat sum
        thin: Tensor = torch.linalg.vector_norm(A, dim=(1, 2), dtype=torch.float64).to(A.dtype)
        return thin
    norms: Tensor = torch.linalg.vector_norm(torch.linalg.vector_norm(A, dim=2), dim=1)
    return norms


@torch.no_grad()
def spectral_estimate(A: Tensor, *, tol: float = 0.01, exact: bool = False) -> SpectralEstimate:
    """Largest singular value of each matrix of a stack.

    Block Lanczos (two passes a step, at most 32 steps) runs on a matrix until a singular value above ``(1 + tol)``
    times the estimate would have shown, but for one random start in a hundred. The start is fixed and the result is
    that of the matrix's own last step: neither the global random state matters nor, beyond rounding, what else is in
    the stack.

    Products of float32 matrices are made as ``torch.get_float32_matmul_precision()`` says: below "highest" results and
    bounds are off by up to about 0.1 %.

    Args:
        A: (K, m, n), floating point; half precisions are measured in float32.
        tol: relative tolerance, in (0, 1).
        exact: use a float64 SVD.

    Raises:
        ValueError: ``A`` is not a real floating-point stack of matrices, or ``tol`` is out of range.
    """
    if A.ndim != 3 or not A.is_floating_point():
        raise ValueError(f"expected a real floating-point stack (K, m, n), got {A.dtype} of shape {tuple(A.shape)}")
    if not 0 < tol < 1:
        raise ValueError(f"tol must be in (0, 1), got {tol}")
    converted = A.to(compute_dtype(A.dtype))
    if 0 in A.shape:
        zero = converted.new_zeros(len(A))
        return SpectralEstimate(zero, zero, zero, zero, zero, passes=0)
    # What does not fit the processor's cache is read from memory at every pass: large matrices go one by one.
    together = max(1, CACHE_ENTRIES // A[0].numel()) if A.device.type == "cpu" else len(A)
    with torch.autocast(A.device.type, enabled=False):
        parts = [_estimate(part, tol, exact) for part in torch.split(converted, together)]
    columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(SpectralEstimate)}
    passes = max(columns.pop("passes")) + int(converted.dtype != A.dtype)
    return SpectralEstimate(**{name: torch.cat(column) for name, column in columns.items()}, passes=passes)


def _estimate(A: Tensor, tol: float, exact: bool) -> SpectralEstimate:
    """The same for a stack that is measured together, not empty, in the dtype it is measured in."""
    m, n = A.shape[1:]
    # A sum of max(m, n) rounded products is off by about sqrt(max(m, n)) eps; 8 leaves a margin.
    slack = 8 * torch.finfo(A.dtype).eps * math.sqrt(max(m, n))
    A, fro, scale, passes = tame(A)
    error = unseen = torch.zeros_like(fro)
    if exact:
        sigma = torch.linalg.svdvals(A.double())[:, 0].to(fro)
        passes += 1 + int(A.dtype != torch.float64)
    elif min(m, n) <= SMALL:
        gram = torch.bmm(A, A.mT) if m <= n else torch.bmm(A.mT, A)
        sigma = torch.linalg.eigvalsh(gram)[:, -1].clamp(min=0).sqrt()
        passes += 1
    else:
        sigma, error, unseen, reads = _lanczos(A, fro, tol, slack)
        passes += reads

    high = torch.minimum(torch.sqrt(sigma.square() + unseen), fro) * (1 + slack)
    bounds = torch.stack([sigma, sigma * (1 - slack), error + slack * sigma, torch.maximum(high, sigma)])
    sigma, low, error, high = bounds * torch.where(scale.isfinite(), scale, math.nan)
    # Results so small that they are rounded themselves are moved outwards by a last digit.
    low = torch.nextafter(low, torch.zeros_like(low))
    error, high = (torch.where(fro > 0, torch.nextafter(x, torch.full_like(x, math.inf)), x) for x in (error, high))
    return SpectralEstimate(sigma, low, error, high, fro * scale, passes)


def tame(A: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """The stack made safe to square, its Frobenius norms, the scale to multiply results with, passes made.

    The scale is 1 but for matrices of extreme entries; a matrix with NaN or inf becomes 0, of norm 1 and scale NaN
    or inf.
    """
    fro = frobenius(A)
    limits = torch.finfo(A.dtype)
    safe = (fro > limits.tiny**0.3) & (fro < limits.max**0.4)  # 4e-12 to 3e15 in float32
    if not A.numel() or bool(safe.all()):
        return A, fro, torch.ones_like(fro), 1
    largest = torch.linalg.vector_norm(A, ord=math.inf, dim=(1, 2))
    safe |= largest == 0
    if bool(safe.all()):
        return A, fro, torch.ones_like(fro), 2
    finite = torch.isfinite(largest)
    scale = torch.where(safe, 1.0, largest)
    A = torch.where(finite[:, None, None], A, 0.0) / torch.where(finite, scale, 1.0)[:, None, None]
    return A, torch.where(finite, frobenius(A), 1.0), scale, 5


def _lanczos(A: Tensor, fro: Tensor, tol: float, slack: float) -> tuple[Tensor, Tensor, Tensor, int]:
    """sigma, its error bound, the Frobenius norm squared of what Lanczos has not seen, and passes."""
    max_steps = min(MAX_STEPS, min(A.shape[1:]) // BLOCK - 1)
    space = KrylovSpace(A, max_steps, fro)
    found = torch.zeros(3, len(A), dtype=torch.float64)
    undecided = torch.arange(len(A))
    while len(undecided):
        space.step()
        last = space.steps == max_steps
        # A look costs as much as a step of a small matrix, and the more the larger the space is.
        if space.steps < 2 or (space.steps > 6 and space.steps % 2 and not last):
            continue
        T = space.projected(undecided)
        done = (space.doubt(T, tol) <= DOUBT) | last
        if not done.any():
            continue
        sigma, residual, seen = space.ritz(T[done])
        # (u, w) is an eigenvector of [[0, A], [A^T, 0]] up to the residual, and of length sqrt(2).
        ended = torch.stack([sigma, residual / math.sqrt(2), (1 - seen).clamp(min=0) + 2 * slack])
        found[:, undecided[done]] = ended
        undecided = undecided[~done]
    sigma, error, unseen = found.to(fro.dtype).to(fro.device) * fro
    return sigma, error, unseen * fro, space.passes
