"""Block Lanczos for many matrices at once: the largest singular value of each.

The Krylov space of ``A^T A`` grows from four random directions at once (Golub and Underwood 1977), and its largest
Ritz value approaches the largest squared singular value from below. One read of ``A`` serves all four. A single
direction is now and then almost orthogonal to the leading singular vector, and then a lesser singular value passes
for the largest; four at once hardly ever are, and how improbable it is can be computed. Nothing is kept between calls.

This differs from the textbook in three ways:

1. Matrices of all shapes share one basis ``V`` (K, rows, n), shorter ones padded with zero columns, which stay zero. So
   each small operation is one call for the whole network. Only the products with the matrices go shape by shape.
2. A block is orthogonalized twice against all earlier ones, so ``T`` is a full projection and needs no recurrence.
3. A matrix that is decided takes no part in later products, and leaves the basis once a quarter of it is decided.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

from spectral_monitor.linalg.collectives import Coroutine
from spectral_monitor.linalg.host_to_device import to_device
from spectral_monitor.linalg.sharded_stack import ShardedStack

BLOCK = 4
"""Directions that grow together."""
ROOM = 12
"""Steps the basis has room for at first."""
MORE_ROOM = 6
"""Steps that room is made for when that is not enough."""
TINY = 1e-30
"""In place of the leading Ritz value of a zero matrix."""


@lru_cache(maxsize=256)
def start_block(size: int, block: int) -> Tensor:
    """Return fixed random orthonormal rows, (block, size) float64 on the CPU, 0 if there are no more.

    The global generator is not touched.
    """
    generator = torch.Generator("cpu").manual_seed(0x5EC7 + size)
    columns = torch.randn(size, block, generator=generator, dtype=torch.float64, device="cpu")
    rows = torch.zeros(block, size, dtype=torch.float64, device="cpu")
    rows[: min(size, block)] = torch.linalg.qr(columns).Q.mT
    return rows


def orthonormal(rows: Tensor, basis: Tensor, one: Tensor) -> Tensor:
    """Return orthonormal rows for what (K, b, n) rows span outside an orthonormal basis (K, k, n); 0 for rounding.

    ``one`` is the unit matrix (K, b, b).
    """
    eps, tiny = torch.finfo(rows.dtype).eps, torch.finfo(rows.dtype).tiny
    # What the first round makes of a row in the span of the others is far shorter than 1.
    rounding = torch.linalg.vector_norm(rows, dim=2, keepdim=True).mul_(16 * eps).clamp_(min=tiny)
    for floor in (rounding, 0.1):
        rows = torch.baddbmm(rows, torch.bmm(rows, basis.mT), basis, alpha=-1)
        length = torch.linalg.vector_norm(rows, dim=2, keepdim=True)
        rows = rows / length.masked_fill_(length <= floor, math.inf)
        lower, _ = torch.linalg.cholesky_ex(torch.baddbmm(one, rows, rows.mT, beta=16 * eps))
        # The inverse of so small a triangle, and a product: far faster than solving for long rows.
        rows = torch.bmm(torch.linalg.solve_triangular(lower, one, upper=False), rows)
    return rows


@dataclass(frozen=True)
class Run:
    """Consecutive undecided matrices of one stack."""

    A: ShardedStack  # (k, m, n) the matrices
    at: slice  # where they lie in the basis

    @property
    def size(self) -> int:
        """Columns of the matrices, the rest of the basis being padding."""
        return self.A.shape[2]


class KrylovSpace:
    """Growing orthonormal bases ``V`` (K, rows, n) of the Krylov spaces of K matrices, and what they see of each.

    ``T`` (K, rows, rows - b) is ``V (A^T A) V^T / unit^2``. Every process has all of both, whatever rectangles of the
    matrices it holds.

    Attributes:
        members: which K matrices, counted over all stacks.
        undecided: places among them of those that are still multiplied.
        first: which member is the first of each stack.
        runs: the undecided matrices.
        split, across: whether anything, or columns, lie in several processes.
        steps: blocks whose images are known; ``V`` has one block more.
    """

    def __init__(self, stacks: Sequence[ShardedStack], units: Tensor, max_steps: int) -> None:
        """Start from random directions.

        Args:
            stacks: matrices (k, m, n), of one dtype and on one device.
            units: (K,) the size of each matrix, which takes its scale out of all that follows.
            max_steps: that will be made at most.
        """
        self._stacks = stacks
        self.across, self.split = any(A.split[1] for A in stacks), any(any(A.split) for A in stacks)
        self._max_steps, room, self.steps = max_steps, min(max_steps, ROOM), 0
        counts = [A.shape[0] for A in stacks]
        self.first = [sum(counts[:k]) for k in range(len(stacks))]
        self.members = list(range(sum(counts)))
        self.undecided = list(self.members)
        self._scale = units.reciprocal().nan_to_num(posinf=0.0)[:, None, None]
        sizes = [A.shape[2] for A in stacks]
        self._sizes = [size for size, count in zip(sizes, counts, strict=True) for _ in range(count)]
        like = stacks[0].like
        self.V = like.new_empty(sum(counts), (room + 1) * BLOCK, max(sizes))
        begin = torch.zeros(len(stacks), BLOCK, max(sizes), dtype=like.dtype, device="cpu")
        for k, size in enumerate(sizes):
            begin[k, :, :size] = start_block(size, BLOCK)
        begin = to_device(begin, like.device)
        for k, (first, count) in enumerate(zip(self.first, counts, strict=True)):
            self.V[first : first + count, :BLOCK] = begin[k]
        self.T = like.new_zeros(sum(counts), (room + 1) * BLOCK, room * BLOCK)
        self._one = torch.eye(BLOCK, dtype=like.dtype, device=like.device).expand(sum(counts), -1, -1)
        self.runs = list(self._undecided_runs())

    def step(self, rider: Tensor) -> Coroutine[Tensor]:
        """Add one more block: the image under ``A^T A`` of the newest, what is new in it, and its components.

        Args:
            rider: is summed over processes besides, if any sum is asked for.

        Returns:
            The rider's sum; the rider itself, if there was no sum.
        """
        start, end = self.steps * BLOCK, (self.steps + 1) * BLOCK
        newest = self.V[:, start:end] * self._scale  # squares of a small unit might be 0
        # y = A x, (k, b, m): to be summed where columns lie in several processes.
        images = [run.A.times(newest[run.at, :, : run.size]) for run in self.runs]
        if self.across:
            images, rider = yield from _summed(images, [run.A.split[1] for run in self.runs], rider)
        # A^T y, (k, b, n): to be summed where anything lies in several processes.
        images = [run.A.mT.times(y) for run, y in zip(self.runs, images, strict=True)]
        split = [any(run.A.split) for run in self.runs]
        if any(split):
            images, rest = yield from _summed(images, split, rider[:0] if self.across else rider)
            rider = rider if self.across else rest
        image = self._joined(images) * self._scale
        # The new block and T's new columns.
        if end + BLOCK > self.V.shape[1]:  # most matrices are decided before that
            self._make_room()
        self.V[:, end : end + BLOCK] = orthonormal(image, self.V[:, :end], self._one)
        self.T[:, : end + BLOCK, start:end] = torch.bmm(self.V[:, : end + BLOCK], image.mT)
        self.steps += 1
        return rider

    def decide(self, places: Collection[int]) -> None:
        """Multiply the matrices at these places (indices into :attr:`members`) no more."""
        done = set(places)
        left = self.undecided = [place for place in self.undecided if place not in done]
        if left and len(left) <= 0.75 * len(self.members):  # less is not worth the copy
            here = to_device(torch.tensor(left, device="cpu"), self.V.device)
            self.V, self.T, self._scale = self.V[here], self.T[here], self._scale[here]
            self.members, self._one = [self.members[place] for place in left], self._one[: len(left)]
            self.undecided = list(range(len(left)))
        self.runs = list(self._undecided_runs())

    def projected(self) -> Tensor:
        """Return ``T`` of the undecided and, below it, its coupling to the newest block.

        (undecided, end + b, end), float64 on the CPU: one copy from the device.
        """
        end = self.steps * BLOCK
        T = self.T[:, : end + BLOCK, :end].to("cpu").double()
        return T if len(self.undecided) == len(T) else T[self.undecided]

    def doubt(self, T: Tensor, tol: float) -> tuple[Tensor, Tensor]:
        """Return a bound on how probable a start is that hides a singular value above ``(1 + tol) sigma``; and sigma.

        The components of its vector along the first block are a known b x b matrix G times those along the newest
        block, which are below 1. That b Gaussians of variance 1/n come out that small, shorter than ``|G|``, has a
        probability of at most ``(n/2)^(b/2) / Gamma(b/2 + 1) |G|^b``. (For b = 1: Hochstenbach 2013.)

        Args:
            T: as :meth:`projected` returns it.
            tol: relative tolerance.
        """
        b, end = BLOCK, T.shape[2]
        square = torch.linalg.eigvalsh(T[:, :end])[:, -1].clamp(min=TINY)  # reads the lower triangle
        beyond = (1 + tol) ** 2 * square[:, None, None] * torch.eye(end, dtype=T.dtype, device="cpu") - T[:, :end]
        lower, _ = torch.linalg.cholesky_ex(beyond)
        G = torch.cholesky_solve(T[:, end:].mT, lower)[:, :b]
        n = torch.tensor(
            [self._sizes[self.members[place]] for place in self.undecided], dtype=torch.float64, device="cpu"
        )
        bound = (n / 2) ** (b / 2) / math.gamma(b / 2 + 1) * torch.linalg.vector_norm(G, dim=(1, 2)) ** b
        return bound, square.sqrt()

    def _undecided_runs(self) -> Iterator[Run]:
        """Yield undecided matrices of each stack, those side by side together.

        What is side by side in a stack is so in the basis, which leaves out members but keeps their order.
        """
        members = [self.members[place] for place in self.undecided]
        for k, A in enumerate(self._stacks):
            first = self.first[k]
            mine = [(p, j - first) for p, j in zip(self.undecided, members, strict=True) if 0 <= j - first < A.shape[0]]
            for _, some in groupby(enumerate(mine), lambda item: item[1][1] - item[0]):
                (_, (place, index)), *more = some
                count = 1 + len(more)
                matrices = A if count == A.shape[0] else A.select(index, index + count)
                yield Run(matrices, slice(place, place + count))

    def _joined(self, images: Sequence[Tensor]) -> Tensor:
        """Return images of runs as those of all matrices (K, b, n), 0 for what is decided and for padding."""
        K, _, n = self.V.shape
        parts, end = [], 0
        for run, image in zip(self.runs, images, strict=True):
            if decided := run.at.start - end:
                parts.append(image.new_zeros(decided, BLOCK, n))
            parts.append(image if run.size == n else torch.nn.functional.pad(image, (0, n - run.size)))
            end = run.at.stop
        if decided := K - end:
            parts.append(self.V.new_zeros(decided, BLOCK, n))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _make_room(self) -> None:
        K, rows, size = self.V.shape
        more = min(MORE_ROOM * BLOCK, (self._max_steps + 1) * BLOCK - rows)
        self.V = torch.cat([self.V, self.V.new_empty(K, more, size)], dim=1)
        self.T = torch.nn.functional.pad(self.T, (0, more, 0, more))


def ritz(T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return sigma, residual and seen of projected matrices (K, end + b, end).

    * sigma: the root of the leading Ritz value, in units.
    * residual: ``|A^T u - sigma w|`` in units, for ``w`` the leading Ritz vector and ``u = A w / sigma``.
    * seen: ``|A V^T|_F^2``, in units squared.
    """
    end = T.shape[2]
    values, vectors = torch.linalg.eigh(T[:, :end])
    square = values[:, -1].clamp(min=TINY)
    residual = torch.linalg.vector_norm(torch.bmm(T[:, end:], vectors[:, :, -1:]), dim=(1, 2)) / square.sqrt()
    return square.sqrt(), residual, values.sum(1)


def _summed(images: list[Tensor], split: list[bool], rider: Tensor) -> Coroutine[tuple[list[Tensor], Tensor]]:
    """Sum images over processes where they are ``split``, and the rider."""
    *sums, rider = yield [*(image for image, some in zip(images, split, strict=True) if some), rider]
    summed = iter(sums)
    return [next(summed) if some else image for image, some in zip(images, split, strict=True)], rider
