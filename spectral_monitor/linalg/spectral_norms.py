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
LOOKS = (2, 4, 7, 11, 15, 20, 26, 32)
"""Lanczos steps after which is asked what is decided: each is a wait for the device, and costs about a step."""
MAX_STEPS = LOOKS[-1]
PADDED = 2
"""Padding makes a basis that matrices of several sizes share at most this much larger."""
EXACT = 1e-5
"""Tolerance where the Gram matrix of a small matrix cannot be had, for its short side is split over processes."""
DOUBT = 0.01
"""Lanczos stops when a start that hides a value beyond the tolerance is at most this probable."""


@dataclass(frozen=True)
class SpectralEstimate:
    """Largest singular values of a stack of K matrices, with bounds; NaN for those with NaN or inf entries."""

    sigma: Tensor  # (K,) the estimate, a Rayleigh quotient and so a lower bound up to rounding
    sigma_low: Tensor  # (K,) ``sigma`` less the rounding of this computation: never above the truth
    # (K,) *some* singular value lies this close to ``sigma``: the residual of the singular triplet, plus rounding
    error_bound: Tensor
    # (K,) never below the truth: ``sqrt(sigma^2 + (Frobenius norm of what Lanczos has not seen)^2)``, which is at most
    # the Frobenius norm, plus rounding
    sigma_high: Tensor
    fro: Tensor  # (K,) Frobenius norms; inf for a matrix with inf entries
    passes: int  # how often the matrices were read, at most


@torch.no_grad()
def spectral_estimate(A: Tensor, *, tol: float = 0.01, exact: bool = False) -> SpectralEstimate:
    """Return the largest singular value of each matrix of a stack.

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
    with torch.autocast(A.device.type, enabled=False):
        (found,) = run_local(spectral_estimates([ShardedStack.whole(converted)], tol, exact))
    return replace(found, passes=found.passes + int(converted.dtype != A.dtype))


def spectral_estimates(
    stacks: Sequence[ShardedStack], tol: float, exact: bool = False, bounds: bool = True
) -> Coroutine[list[SpectralEstimate]]:
    """Return the same of several stacks in one solve, whether they are all here or lie in several processes.

    Results are the same in every process.

    Args:
        stacks: not empty, and of the dtypes they are measured in.
        tol: relative tolerance.
        exact: use a float64 SVD; for stacks that are all here.
        bounds: without them, which take a while for small matrices, those are NaN.
    """
    solves: dict[object, list[int]] = defaultdict(list)
    for k, A in enumerate(stacks):
        dealt = A.exchange is not None and not any(A.split)
        solves["dealt" if dealt else (A.like.dtype, A.like.device)].append(k)
    routines = []
    for kind, which in solves.items():
        some = [stacks[k] for k in which]
        routines.append(_dealt(some, tol, bounds) if kind == "dealt" else _solve(some, tol, exact, bounds))
    found = yield from gather(routines)
    results = {
        k: e for which, some in zip(solves.values(), found, strict=True) for k, e in zip(which, some, strict=True)
    }
    return [results[k] for k in range(len(stacks))]


def _dealt(stacks: Sequence[ShardedStack], tol: float, bounds: bool) -> Coroutine[list[SpectralEstimate]]:
    """Return estimates of stacks whose matrices are each whole in one process; the others hear what it found."""
    held = [(k, part) for k, A in enumerate(stacks) for part in A.parts]
    here = [ShardedStack.whole(part.A) for _, part in held]
    estimates = run_local(spectral_estimates(here, tol, bounds=bounds)) if here else []
    columns = [A.like.new_zeros(5, A.shape[0]) for A in stacks]
    passes = [0] * len(stacks)
    for (k, part), e in zip(held, estimates, strict=True):
        found = torch.stack([e.sigma, e.sigma_low, e.error_bound, e.sigma_high, e.fro])
        columns[k][:, part.at(found.device)] = found
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
    unseen: Tensor  # (K,) squared Frobenius norm of what has not been seen
    passes: list[int]  # how often each stack was read

    @classmethod
    def exact(cls, sigma: Tensor, passes: list[int]) -> _Norms:
        """Return norms of which everything has been seen."""
        return cls(sigma, torch.zeros_like(sigma), torch.zeros_like(sigma), passes)

    def split(self, counts: Sequence[int]) -> list[_Norms]:
        """Return those of each stack, of which these are the numbers of matrices."""
        columns = (x.split(list(counts)) for x in (self.sigma, self.error, self.unseen))
        rows = zip(*columns, self.passes, strict=True)
        return [_Norms(sigma, error, unseen, [passes]) for sigma, error, unseen, passes in rows]


def _solve(stacks: Sequence[ShardedStack], tol: float, exact: bool, bounds: bool) -> Coroutine[list[SpectralEstimate]]:
    """Return estimates of stacks of one dtype on one device."""
    tamed, fro, scale, read = yield from tame(stacks)
    counts = [A.shape[0] for A in tamed]
    fros = fro.split(counts)
    # Which stacks are measured how.
    norms: dict[int, _Norms] = {}
    small: dict[int, ShardedStack] = {}
    large: dict[float, dict[int, ShardedStack]] = defaultdict(dict)  # by tolerance
    for k, A in enumerate(tamed):
        short = A if A.shape[1] < A.shape[2] else A.mT  # its rows are the short side
        if short.shape[1] == 1:
            norms[k] = _Norms.exact(fros[k], [0])
        elif exact or (short.shape[1] <= SMALL and not short.split[0]):
            small[k] = short
        elif short.shape[1] <= SMALL:  # elsewhere the norm of such a matrix is exact
            large[EXACT][k] = short.mT if short.split[1] else short
        else:
            large[tol][k] = short.mT
    solves: list[tuple[Iterable[int], Coroutine[_Norms]]] = []
    if small:
        solves.append((small, (_svd if exact else _gram)(list(small.values()))))
    for wanted, some in large.items():
        for basis in _bases(some):
            solves.append((basis, _lanczos(list(basis.values()), [fros[k] for k in basis], wanted, bounds)))
    found = yield from gather(routine for _, routine in solves)
    # Back in the order of the stacks.
    for (which, _), result in zip(solves, found, strict=True):
        norms.update(zip(which, result.split([counts[k] for k in which]), strict=True))
    ordered = [norms[k] for k in range(len(tamed))]
    columns = _certain(tamed, ordered, fro, scale) if bounds else _plain(ordered, fro, scale)
    passes = [first + sum(some.passes) for first, some in zip(read, ordered, strict=True)]
    return [SpectralEstimate(*some) for some in zip(*(x.split(counts) for x in columns), passes, strict=True)]


def _plain(found: Sequence[_Norms], fro: Tensor, scale: Tensor) -> list[Tensor]:
    """Return the columns of an estimate of tamed stacks, NaN for bounds."""
    unknown = torch.full_like(fro, math.nan)
    sigma = torch.cat([some.sigma for some in found]) * torch.where(scale.isfinite(), scale, math.nan)
    return [sigma, unknown, unknown, unknown, fro * scale]


def _certain(stacks: Sequence[ShardedStack], found: Sequence[_Norms], fro: Tensor, scale: Tensor) -> list[Tensor]:
    """Return the columns of an estimate of tamed stacks, with bounds that hold in spite of rounding."""
    slack = torch.cat([fro.new_full((A.shape[0],), _slack(A)) for A in stacks])
    sigma, error, unseen = (torch.cat(column) for column in zip(*(some[:3] for some in found), strict=True))
    high = torch.minimum(torch.sqrt(sigma.square() + unseen), fro) * (1 + slack)
    values = torch.stack([sigma, sigma * (1 - slack), error + slack * sigma, torch.maximum(high, sigma)])
    sigma, low, error, high = values * torch.where(scale.isfinite(), scale, math.nan)
    # Results so small that they are rounded themselves are moved outwards by a last digit.
    low = torch.nextafter(low, torch.zeros_like(low))
    error, high = (torch.where(fro.bool(), torch.nextafter(x, torch.full_like(x, math.inf)), x) for x in (error, high))
    return [sigma, low, error, high, fro * scale]


def _slack(A: ShardedStack) -> float:
    """Return the relative rounding of products: of max(m, n) it is about sqrt(max(m, n)) eps; 8 leaves a margin."""
    return 8 * torch.finfo(A.like.dtype).eps * math.sqrt(max(A.shape[1:]))


def _bases(stacks: Mapping[int, ShardedStack]) -> list[dict[int, ShardedStack]]:
    """Deal stacks to as few bases as padding allows, the widest first."""
    bases: list[dict[int, ShardedStack]] = []
    widest = padded = entries = 0
    for k, A in sorted(stacks.items(), key=lambda some: some[1].shape[2], reverse=True):
        padded, entries = padded + A.shape[0] * widest, entries + A.shape[0] * A.shape[2]
        if not bases or padded > PADDED * entries:
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
    """Return exact norms of stacks (k, s, n) with few rows, by one eigenvalue call for all that have as many."""
    grams = [A.gram() for A in stacks]
    if any(A.split[1] for A in stacks):
        summed = iter((yield [gram for A, gram in zip(stacks, grams, strict=True) if A.split[1]]))
        grams = [next(summed) if A.split[1] else gram for A, gram in zip(stacks, grams, strict=True)]
    found: dict[int, Tensor] = {}
    for size in {A.shape[1]: None for A in stacks}:
        some = [k for k, A in enumerate(stacks) if A.shape[1] == size]
        squares = torch.linalg.eigvalsh(torch.cat([grams[k] for k in some]).double())
        sigma = squares[:, -1].sqrt().to(grams[0].dtype)
        found.update(zip(some, sigma.split([stacks[k].shape[0] for k in some]), strict=True))
    return _Norms.exact(torch.cat([found[k] for k in range(len(stacks))]), [1] * len(stacks))


class _Look(NamedTuple):
    """A look at the undecided matrices."""

    T: Tensor  # projected
    sigma: Tensor  # their norms, in units
    done: Tensor  # which of them are decided


def _lanczos(stacks: Sequence[ShardedStack], fros: Sequence[Tensor], tol: float, bounds: bool) -> Coroutine[_Norms]:
    """Return norms of stacks (k, m, n) by block Lanczos on their n columns.

    All processes stop at the same step. Each looks for itself, and what the first one saw counts, which the others hear
    with the next sums.
    """
    counts, fro = [A.shape[0] for A in stacks], torch.cat(list(fros))
    space = KrylovSpace(stacks, fro, MAX_STEPS)
    exchange = stacks[0].exchange
    speaks = float(exchange is None or not exchange.rank)
    found = torch.zeros(3, len(fro), dtype=torch.float64, device="cpu")  # sigma, error, unseen; in units
    reads: dict[int, int] = {}
    told = nothing = fro.new_zeros(0)
    look: _Look | None = None
    while space.undecided:
        told = yield from space.step(told)
        if look is not None:  # the others have heard of it now
            look = look._replace(done=told.to("cpu").bool())
        elif space.steps in LOOKS:
            look = _look(space, tol)
            if space.split and space.steps < MAX_STEPS:
                told = look.done.to(fro) * speaks
                continue
        if look is None:
            continue
        places = _decided(space, look)
        decided = [space.members[place] for place in places]
        found[:, decided] = _ritz(look) if bounds else torch.stack([look.sigma[look.done]] * 3)
        for member in decided:
            reads[member] = 2 * space.steps
        space.decide(places)
        look, told = None, nothing
    found[2] += 2 * torch.repeat_interleave(
        torch.tensor([_slack(A) for A in stacks], device="cpu"), torch.tensor(counts, device="cpu")
    )
    sigma, error, unseen = to_device(found.to(fro.dtype), fro.device) * fro
    passes = [max(reads[start + k] for k in range(count)) for start, count in zip(space.first, counts, strict=True)]
    return _Norms(sigma, error, unseen * fro, passes)


def _look(space: KrylovSpace, tol: float) -> _Look:
    T = space.projected()
    doubt, sigma = space.doubt(T, tol)
    return _Look(T, sigma, (doubt <= DOUBT) | (space.steps == MAX_STEPS))


def _decided(space: KrylovSpace, look: _Look) -> list[int]:
    return [place for place, done in zip(space.undecided, look.done.tolist(), strict=True) if done]


def _ritz(look: _Look) -> Tensor:
    """Return sigma, its error bound and the share of the squares that has not been seen, in units."""
    sigma, residual, seen = ritz(look.T[look.done])
    # (u, w) is an eigenvector of [[0, A], [A^T, 0]] up to the residual, and of length sqrt(2).
    return torch.stack([sigma, residual / math.sqrt(2), (1 - seen).clamp(min=0)])
