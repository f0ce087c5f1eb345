"""Largest singular values of a stack of matrices, with bounds on both sides."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from spectral_monitor.linalg.collectives import Coroutine, gather, run_local
from spectral_monitor.linalg.host_to_device import to_device
from spectral_monitor.linalg.lanczos import KrylovSpace, ritz
from spectral_monitor.linalg.scaling import compute_dtype, tame
from spectral_monitor.linalg.sharded_stack import ShardedStack

SMALL = 72
"""Up to this min(m, n) the Gram matrix is diagonalized: cheaper than Lanczos, and exact."""
CHECK_STEPS = (2, 4, 7, 11, 15, 20, 26, 32)
"""Lanczos steps after which convergence is checked. A check waits for the device, and costs about as much as a step."""
MAX_STEPS = CHECK_STEPS[-1]
MAX_PADDING = 2
"""Limit of the size of a basis that matrices of several sizes share, over its size without padding."""
EXACT_TOL = 1e-5
"""Tolerance for small matrices without a Gram matrix, because their short side is split over processes."""
MAX_MISS_PROBABILITY = 0.01
"""Lanczos stops once it is at most this probable that the start hides a singular value beyond the tolerance."""


@dataclass(frozen=True)
class SpectralEstimate:
    """Largest singular values of a stack of K matrices, with bounds; NaN for those with NaN or inf entries."""

    sigma: Tensor  # (K,) the estimate, a lower bound up to rounding (it is a Rayleigh quotient)
    sigma_low: Tensor  # (K,) ``sigma`` less the rounding of this computation: never above the true value
    # (K,) *some* singular value lies this close to ``sigma``: the residual of the singular triplet, plus rounding
    error_bound: Tensor
    # (K,) never below the true value: ``sqrt(sigma^2 + |what is outside the Krylov space|_F^2)``, which is at most the
    # Frobenius norm, plus rounding
    sigma_high: Tensor
    fro: Tensor  # (K,) Frobenius norms; inf for a matrix with inf entries
    passes: int  # the largest number of times that a matrix was read


@torch.no_grad()
def spectral_estimate(A: Tensor, *, tol: float = 0.01, exact: bool = False) -> SpectralEstimate:
    """Return the largest singular value of each matrix of a stack.

    Block Lanczos (two passes a step, at most 32 steps) runs on a matrix until 99 % of random starts would have shown a
    singular value above ``(1 + tol)`` times the estimate. The start is fixed, and each matrix stops at its own last
    step. So the result depends neither on the global random state nor, beyond rounding, on other matrices of the stack.

    Products of float32 matrices follow ``torch.get_float32_matmul_precision()``: below "highest" results and bounds are
    off by up to about 0.1 %.

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
    with torch.autocast(A.device.type, enabled=False):
        (estimate,) = run_local(spectral_estimates([ShardedStack.whole(converted)], tol, exact))
    return replace(estimate, passes=estimate.passes + int(converted.dtype != A.dtype))


def spectral_estimates(
    stacks: Sequence[ShardedStack], tol: float, exact: bool = False, bounds: bool = True
) -> Coroutine[list[SpectralEstimate]]:
    """Return estimates of several stacks in one solve, local ones or some that are split over processes.

    Results are the same in every process.

    Args:
        stacks: not empty, and of the dtypes they are measured in.
        exact: use a float64 SVD; for local stacks.
        bounds: whether to compute bounds, which take a while for small matrices; they are NaN without.
    """
    groups: dict[object, list[int]] = defaultdict(list)
    for k, A in enumerate(stacks):
        unsplit = A.exchange is not None and not any(A.split)
        groups["unsplit" if unsplit else (A.like.dtype, A.like.device)].append(k)
    routines = []
    for kind, indices in groups.items():
        group = [stacks[k] for k in indices]
        routines.append(_unsplit(group, tol, bounds) if kind == "unsplit" else _solve(group, tol, exact, bounds))
    results: dict[int, SpectralEstimate] = {}
    for indices, estimates in zip(groups.values(), (yield from gather(routines)), strict=True):
        results.update(zip(indices, estimates, strict=True))
    return [results[k] for k in range(len(stacks))]


def _unsplit(stacks: Sequence[ShardedStack], tol: float, bounds: bool) -> Coroutine[list[SpectralEstimate]]:
    """Return estimates of stacks each of whose matrices is complete in one process, which sends its result."""
    parts = [(k, part) for k, A in enumerate(stacks) for part in A.parts]
    local = [ShardedStack.whole(part.A) for _, part in parts]
    estimates = run_local(spectral_estimates(local, tol, bounds=bounds)) if local else []
    columns = [A.like.new_zeros(5, A.shape[0]) for A in stacks]
    passes = [0] * len(stacks)
    for (k, part), e in zip(parts, estimates, strict=True):
        values = torch.stack([e.sigma, e.sigma_low, e.error_bound, e.sigma_high, e.fro])
        columns[k][:, part.at(values.device)] = values
        passes[k] = max(passes[k], e.passes)
    columns = yield columns
    return [
        SpectralEstimate(sigma, low, error, high, fro, reads)
        for (sigma, low, error, high, fro), reads in zip(columns, passes, strict=True)
    ]


class _Norms(NamedTuple):
    """Norms of the K matrices of some stacks, one after the other, before rounding is accounted for."""

    sigma: Tensor  # (K,) the norm
    error: Tensor  # (K,) its residual
    remainder: Tensor  # (K,) squared Frobenius norm of what is outside the Krylov space
    passes: list[int]  # how often each stack was read

    @classmethod
    def exact(cls, sigma: Tensor, passes: list[int]) -> _Norms:
        """Return norms without error and remainder."""
        return cls(sigma, torch.zeros_like(sigma), torch.zeros_like(sigma), passes)

    def split(self, counts: Sequence[int]) -> list[_Norms]:
        """Return the norms of each stack, which have ``counts`` matrices."""
        columns = (x.split(list(counts)) for x in self[:3])
        rows = zip(*columns, self.passes, strict=True)
        return [_Norms(sigma, error, remainder, [passes]) for sigma, error, remainder, passes in rows]


def _solve(stacks: Sequence[ShardedStack], tol: float, exact: bool, bounds: bool) -> Coroutine[list[SpectralEstimate]]:
    """Return estimates of stacks of one dtype on one device."""
    tamed, fro, scale, read = yield from tame(stacks)
    counts = [A.shape[0] for A in tamed]
    fros = fro.split(counts)
    # Choose a method for each stack.
    norms: dict[int, _Norms] = {}
    small: dict[int, ShardedStack] = {}
    large: dict[float, dict[int, ShardedStack]] = defaultdict(dict)  # by tolerance
    for k, A in enumerate(tamed):
        short = A if A.shape[1] < A.shape[2] else A.mT  # its rows are the short side
        if short.shape[1] == 1:
            norms[k] = _Norms.exact(fros[k], [0])
        elif exact or (short.shape[1] <= SMALL and not short.split[0]):
            small[k] = short
        elif short.shape[1] <= SMALL:  # nearly exact, like that of a small matrix which is not split
            large[EXACT_TOL][k] = short.mT if short.split[1] else short
        else:
            large[tol][k] = short.mT
    solves: list[tuple[Iterable[int], Coroutine[_Norms]]] = []
    if small:
        solves.append((small, (_svd if exact else _gram)(list(small.values()))))
    for tolerance, group in large.items():
        for basis in _bases(group):
            solves.append((basis, _lanczos(list(basis.values()), [fros[k] for k in basis], tolerance, bounds)))
    results = yield from gather(routine for _, routine in solves)
    # Put the results in the order of the stacks.
    for (indices, _), result in zip(solves, results, strict=True):
        norms.update(zip(indices, result.split([counts[k] for k in indices]), strict=True))
    ordered = [norms[k] for k in range(len(tamed))]
    columns = _bounded(tamed, ordered, fro, scale) if bounds else _unbounded(ordered, fro, scale)
    passes = [first + sum(norm.passes) for first, norm in zip(read, ordered, strict=True)]
    return [SpectralEstimate(*row) for row in zip(*(x.split(counts) for x in columns), passes, strict=True)]


def _unbounded(norms: Sequence[_Norms], fro: Tensor, scale: Tensor) -> list[Tensor]:
    """Return the columns of an estimate of tamed stacks, with NaN for bounds."""
    unknown = torch.full_like(fro, math.nan)
    sigma = torch.cat([norm.sigma for norm in norms]) * torch.where(scale.isfinite(), scale, math.nan)
    return [sigma, unknown, unknown, unknown, fro * scale]


def _bounded(stacks: Sequence[ShardedStack], norms: Sequence[_Norms], fro: Tensor, scale: Tensor) -> list[Tensor]:
    """Return the columns of an estimate of tamed stacks, with bounds that hold in spite of rounding."""
    slack = torch.cat([fro.new_full((A.shape[0],), _slack(A)) for A in stacks])
    sigma, error, remainder = (torch.cat(column) for column in zip(*(norm[:3] for norm in norms), strict=True))
    high = torch.minimum(torch.sqrt(sigma.square() + remainder), fro) * (1 + slack)
    values = torch.stack([sigma, sigma * (1 - slack), error + slack * sigma, torch.maximum(high, sigma)])
    sigma, low, error, high = values * torch.where(scale.isfinite(), scale, math.nan)
    # The scaling rounds, too, where results are tiny: move the bounds outwards by one last digit.
    low = torch.nextafter(low, torch.zeros_like(low))
    error, high = (torch.where(fro.bool(), torch.nextafter(x, torch.full_like(x, math.inf)), x) for x in (error, high))
    return [sigma, low, error, high, fro * scale]


def _slack(A: ShardedStack) -> float:
    """Return a limit of the relative rounding of products, which is about sqrt(max(m, n)) eps; 8 leaves a margin."""
    return 8 * torch.finfo(A.like.dtype).eps * math.sqrt(max(A.shape[1:]))


def _bases(stacks: Mapping[int, ShardedStack]) -> list[dict[int, ShardedStack]]:
    """Group stacks into as few bases as the limit of padding allows, the widest first."""
    bases: list[dict[int, ShardedStack]] = []
    widest = padded = entries = 0
    for k, A in sorted(stacks.items(), key=lambda item: item[1].shape[2], reverse=True):
        padded, entries = padded + A.shape[0] * widest, entries + A.shape[0] * A.shape[2]
        if not bases or padded > MAX_PADDING * entries:
            bases.append({})
            widest, padded = A.shape[2], A.shape[0] * A.shape[2]
            entries = padded
        bases[-1][k] = A
    return bases


def _svd(stacks: Sequence[ShardedStack]) -> Coroutine[_Norms]:
    """Return norms by float64 SVD."""
    yield from ()
    matrices = [part.A for A in stacks for part in A.parts]
    sigma = [torch.linalg.svdvals(A.double())[:, 0].to(A.dtype) for A in matrices]
    return _Norms.exact(torch.cat(sigma), [1 + int(A.dtype != torch.float64) for A in matrices])


def _gram(stacks: Sequence[ShardedStack]) -> Coroutine[_Norms]:
    """Return exact norms of stacks (k, s, n) with few rows, by one eigenvalue call for each number of rows."""
    grams = [A.gram() for A in stacks]
    if any(A.split[1] for A in stacks):
        summed = iter((yield [gram for A, gram in zip(stacks, grams, strict=True) if A.split[1]]))
        grams = [next(summed) if A.split[1] else gram for A, gram in zip(stacks, grams, strict=True)]
    norms: dict[int, Tensor] = {}
    for size in {A.shape[1]: None for A in stacks}:
        same_size = [k for k, A in enumerate(stacks) if A.shape[1] == size]
        squares = torch.linalg.eigvalsh(torch.cat([grams[k] for k in same_size]).double())
        sigma = squares[:, -1].sqrt().to(grams[0].dtype)
        norms.update(zip(same_size, sigma.split([stacks[k].shape[0] for k in same_size]), strict=True))
    return _Norms.exact(torch.cat([norms[k] for k in range(len(stacks))]), [1] * len(stacks))


class _Check(NamedTuple):
    """A check of the convergence of the undecided matrices."""

    T: Tensor  # projected
    sigma: Tensor  # their norms, in units
    done: Tensor  # whether each has converged


def _lanczos(stacks: Sequence[ShardedStack], fros: Sequence[Tensor], tol: float, bounds: bool) -> Coroutine[_Norms]:
    """Return norms of stacks (k, m, n) by block Lanczos on their n columns.

    All processes stop at the same step. Each makes the checks, but that of rank 0 counts, which the others get with the
    sums of the next step.
    """
    counts, fro = [A.shape[0] for A in stacks], torch.cat(list(fros))
    space = KrylovSpace(stacks, fro, MAX_STEPS)
    exchange = stacks[0].exchange
    is_first_rank = float(exchange is None or not exchange.rank)
    values = torch.zeros(3, len(fro), dtype=torch.float64, device="cpu")  # sigma, error, remainder; in units
    reads: dict[int, int] = {}
    message = empty = fro.new_zeros(0)
    check: _Check | None = None
    while space.undecided:
        message = yield from space.step(message)
        if check is not None:  # made at the last step; now rank 0's has arrived
            check = check._replace(done=message.to("cpu").bool())
        elif space.steps in CHECK_STEPS:
            check = _check(space, tol)
            if space.split and space.steps < MAX_STEPS:
                message = check.done.to(fro) * is_first_rank
                continue
        if check is None:
            continue
        positions = _decided(space, check)
        decided = [space.members[position] for position in positions]
        values[:, decided] = ritz(check.T[check.done]) if bounds else torch.stack([check.sigma[check.done]] * 3)
        reads.update(dict.fromkeys(decided, 2 * space.steps))
        space.decide(positions)
        check, message = None, empty
    values[2] += 2 * torch.repeat_interleave(
        torch.tensor([_slack(A) for A in stacks], device="cpu"), torch.tensor(counts, device="cpu")
    )
    sigma, error, remainder = to_device(values.to(fro.dtype), fro.device) * fro
    passes = [max(reads[start + k] for k in range(count)) for start, count in zip(space.first, counts, strict=True)]
    return _Norms(sigma, error, remainder * fro, passes)


def _check(space: KrylovSpace, tol: float) -> _Check:
    T = space.projected()
    probability, sigma = space.miss_probability(T, tol)
    return _Check(T, sigma, (probability <= MAX_MISS_PROBABILITY) | (space.steps == MAX_STEPS))


def _decided(space: KrylovSpace, check: _Check) -> list[int]:
    return [position for position, done in zip(space.undecided, check.done.tolist(), strict=True) if done]
