"""Largest singular values of a stack of matrices, with bounds on both sides."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from spectral_monitor.linalg.lanczos import BLOCK, KrylovSpace
from spectral_monitor.linalg.pieces import Pieces
from spectral_monitor.linalg.rounds import Routine, alone

SMALL = 72
"""Up to this min(m, n) the Gram matrix is diagonalized: cheaper than Lanczos, and exact."""
CACHE_ENTRIES = 1 << 22
"""Stacks of up to this many entries are measured together on a CPU."""
MAX_STEPS = 32
EXACT = 1e-5
"""Tolerance where the Gram matrix of a small matrix cannot be had, for its short side is split over processes."""
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
    if A.ndim != 3 or not A.is_floating_point() or A.element_size() < 2:  # eight bits have no arithmetic
        raise ValueError(f"expected a real floating-point stack (K, m, n), got {A.dtype} of shape {tuple(A.shape)}")
    if not 0 < tol < 1:
        raise ValueError(f"tol must be in (0, 1), got {tol}")
    converted = A.to(compute_dtype(A.dtype))
    if 0 in A.shape:
        zero = converted.new_zeros(len(A))
        return SpectralEstimate(zero, zero, zero, zero, zero, passes=0)
    stack = Pieces.whole(converted)
    with torch.autocast(A.device.type, enabled=False):
        found = joined_estimates([alone(shared_estimate(part, tol, exact)) for part in in_cache(stack)])
    return replace(found, passes=found.passes + int(converted.dtype != A.dtype))


def in_cache(stack: Pieces) -> list[Pieces]:
    """The stack as one, on a CPU in parts: what does not fit its cache is read from memory at every pass."""
    K, m, n = stack.shape
    size = max(1, m * n // (stack.exchange.size if stack.exchange is not None and any(stack.split) else 1))
    together = max(1, CACHE_ENTRIES // size) if stack.like.device.type == "cpu" else max(K, 1)
    return [stack.select(first, min(first + together, K)) for first in range(0, K, together)]


def joined_estimates(parts: list[SpectralEstimate]) -> SpectralEstimate:
    """Estimates of stacks as that of one."""
    columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(SpectralEstimate)}
    passes = max(columns.pop("passes"))
    return SpectralEstimate(**{name: torch.cat(column) for name, column in columns.items()}, passes=passes)


def shared_estimate(A: Pieces, tol: float, exact: bool = False, bounds: bool = True) -> Routine[SpectralEstimate]:
    """The same for matrices of which every process holds rectangles, with the same result in every process.

    ``A`` is not empty, and of the dtype it is measured in; ``exact`` is for stacks that are all here. Without
    ``bounds``, which take a while for small matrices, those are NaN.
    """
    if A.exchange is None or any(A.split):
        found = yield from _estimate(A, tol, exact, bounds)
        return found
    values = A.like.new_zeros(5, A.shape[0])
    passes = 0
    for part in A.parts:
        found = alone(_estimate(Pieces.whole(part.A), tol, exact, bounds))
        columns = (found.sigma, found.sigma_low, found.error_bound, found.sigma_high, found.fro)
        values[:, part.members if part.members is not None else slice(None)] = torch.stack(columns)
        passes = max(passes, found.passes)
    (values,) = yield [values]
    sigma, low, error, high, fro = values
    return SpectralEstimate(sigma, low, error, high, fro, passes)


def _estimate(A: Pieces, tol: float, exact: bool, bounds: bool) -> Routine[SpectralEstimate]:
    _, m, n = A.shape
    # A sum of max(m, n) rounded products is off by about sqrt(max(m, n)) eps; 8 leaves a margin.
    slack = 8 * torch.finfo(A.like.dtype).eps * math.sqrt(max(m, n))
    A, fro, scale, passes = yield from tame(A)
    error = unseen = torch.zeros_like(fro)
    short = A if m < n else A.mT  # its rows are the short side
    if min(m, n) == 1:
        sigma = fro
    elif exact:
        matrices = A.parts[0].A
        sigma = torch.linalg.svdvals(matrices.double())[:, 0].to(fro)
        passes += 1 + int(matrices.dtype != torch.float64)
    elif min(m, n) <= SMALL and not short.split[0]:
        gram = short.gram()
        if short.split[1]:
            (gram,) = yield [gram]
        # Some builds of LAPACK do not converge on float32 matrices as small as 1e-7.
        unit = torch.where(fro > 0, fro, 1.0).double()
        squares = torch.linalg.eigvalsh(gram.double() / unit.square()[:, None, None])[:, -1]
        sigma = (squares.clamp(min=0).sqrt() * unit).to(fro)
        passes += 1
    else:
        sigma, error, unseen, reads = yield from _lanczos(short.mT, fro, tol, slack, bounds)
        passes += reads

    if not bounds:
        sigma, fro = sigma * torch.where(scale.isfinite(), scale, math.nan), fro * scale
        unknown = torch.full_like(sigma, math.nan)
        return SpectralEstimate(sigma, unknown, unknown, unknown, fro, passes)
    high = torch.minimum(torch.sqrt(sigma.square() + unseen), fro) * (1 + slack)
    values = torch.stack([sigma, sigma * (1 - slack), error + slack * sigma, torch.maximum(high, sigma)])
    sigma, low, error, high = values * torch.where(scale.isfinite(), scale, math.nan)
    # Results so small that they are rounded themselves are moved outwards by a last digit.
    low = torch.nextafter(low, torch.zeros_like(low))
    error, high = (torch.where(fro > 0, torch.nextafter(x, torch.full_like(x, math.inf)), x) for x in (error, high))
    return SpectralEstimate(sigma, low, error, high, fro * scale, passes)


def tame(A: Pieces) -> Routine[tuple[Pieces, Tensor, Tensor, int]]:
    """The stack made safe to square, its Frobenius norms, the scale to multiply results with, passes made.

    The scale is 1 but for matrices of extreme entries; a matrix with NaN or inf becomes 0, of norm 1 and scale NaN
    or inf.
    """
    fro = yield from A.combined(frobenius, 2)
    limits = torch.finfo(A.like.dtype)
    safe = (fro > limits.tiny**0.3) & (fro < limits.max**0.4)  # 4e-12 to 3e15 in float32
    if 0 in A.shape or bool(safe.all()):
        return A, fro, torch.ones_like(fro), 1
    largest = yield from A.combined(lambda B: torch.linalg.vector_norm(B, ord=math.inf, dim=(1, 2)), math.inf)
    safe |= largest == 0
    if bool(safe.all()):
        return A, fro, torch.ones_like(fro), 2
    finite = torch.isfinite(largest)
    scale = torch.where(safe, 1.0, largest)

    def tamed(B: Tensor, members: Tensor | None) -> Tensor:
        known, divisor = (finite, scale) if members is None else (finite[members], scale[members])
        return torch.where(known[:, None, None], B, 0.0) / torch.where(known, divisor, 1.0)[:, None, None]

    A = A.map(tamed)
    again = yield from A.combined(frobenius, 2)
    return A, torch.where(finite, again, 1.0), scale, 5


def _lanczos(
    A: Pieces, fro: Tensor, tol: float, slack: float, bounds: bool
) -> Routine[tuple[Tensor, Tensor, Tensor, int]]:
    """sigma, its error bound, the Frobenius norm squared of what Lanczos has not seen, and passes.

    ``A`` (K, m, n) with m >= n. All processes stop at the same step: each looks for itself, and what the first one
    saw counts, which the others hear with the next sums.
    """
    K, _, n = A.shape
    max_steps = min(MAX_STEPS, n // BLOCK - 1)
    if n <= SMALL:  # elsewhere the norm of such a matrix is exact
        tol, max_steps = EXACT, -(-n // BLOCK) + 1
        A = A.mT if A.split[1] and not A.split[0] else A
    space = KrylovSpace(A, max_steps, fro)
    found = torch.zeros(3, K, dtype=torch.float64)
    undecided = torch.arange(K)
    first = A.exchange is None or A.exchange.rank == 0
    done: Tensor | None = None
    T = torch.empty(0)
    while len(undecided):
        told = fro.new_zeros(0) if done is None else done.to(fro) * first
        told = yield from space.step(undecided, told)
        if done is not None:
            done = told.to("cpu") > 0.5
            found[:, undecided[done]] = _ritz(space, T[done], slack) if bounds else space.square[done].sqrt()
            undecided, done = undecided[~done], None
        last = space.steps == max_steps
        # A look costs about as much as a step, and the more the larger the space is.
        if not len(undecided) or (not last and (space.steps in (1, 3) or (space.steps > 8 and space.steps % 2))):
            continue
        T = space.projected(undecided)
        done = (space.doubt(T, tol) <= DOUBT) | last
        if last or not any(A.split):  # then all processes know it at once
            found[:, undecided[done]] = _ritz(space, T[done], slack) if bounds else space.square[done].sqrt()
            undecided, done = undecided[~done], None
    sigma, error, unseen = found.to(fro.dtype).to(fro.device) * fro
    return sigma, error, unseen * fro, space.passes


def _ritz(space: KrylovSpace, T: Tensor, slack: float) -> Tensor:
    """sigma, its error bound and the share of the squares that has not been seen, in units."""
    sigma, residual, seen = space.ritz(T)
    # (u, w) is an eigenvector of [[0, A], [A^T, 0]] up to the residual, and of length sqrt(2).
    return torch.stack([sigma, residual / math.sqrt(2), (1 - seen).clamp(min=0) + 2 * slack])
