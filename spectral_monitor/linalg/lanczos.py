"""Block Lanczos for many matrices at once: the largest singular value of each.

The Krylov space of ``A^T A`` grows from four random directions at once (Golub and Underwood 1977), and its largest
Ritz value approaches the largest squared singular value from below. One read of ``A`` serves all four. A single random
direction is sometimes almost orthogonal to the leading singular vector, and then a smaller singular value passes for
the largest. All four hardly ever are, and the probability can be bounded. Nothing is kept between calls.

This differs from the textbook in three ways:

1. Matrices of all shapes share one basis ``V`` (K, rows, n), padded with zero columns, which stay zero. So each small
   operation is one call for the whole network. Only the products with the matrices are made for each shape.
2. A block is orthogonalized twice against all earlier ones, so ``T`` is a full projection and needs no recurrence.
3. A decided matrix takes no part in later products. Decided matrices leave the basis once they are a quarter of it.
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
"""Directions in a block."""
INITIAL_CAPACITY = 12
"""Steps that the basis is first allocated for."""
CAPACITY_INCREMENT = 6
"""Steps that are added to a full basis."""
TINY = 1e-30
"""Lower limit of the leading Ritz value, for zero matrices."""


@lru_cache(maxsize=256)
def start_block(size: int, block: int) -> Tensor:
    """Return fixed random orthonormal rows, (block, size) float64 on the CPU; rows beyond ``size`` are 0."""
    generator = torch.Generator("cpu").manual_seed(0x5EC7 + size)
    columns = torch.randn(size, block, generator=generator, dtype=torch.float64, device="cpu")
    rows = torch.zeros(block, size, dtype=torch.float64, device="cpu")
    rows[: min(size, block)] = torch.linalg.qr(columns).Q.mT
    return rows


def orthonormal(rows: Tensor, basis: Tensor, one: Tensor) -> Tensor:
    """Return orthonormal rows of what ``rows`` (K, b, n) add to an orthonormal ``basis`` (K, k, n).

    Rows that are mere rounding become 0. ``one`` is the unit matrix (K, b, b).
    """
    eps, tiny = torch.finfo(rows.dtype).eps, torch.finfo(rows.dtype).tiny
    # After the first round a row in the span of the others is far shorter than 1.
    rounding = torch.linalg.vector_norm(rows, dim=2, keepdim=True).mul_(16 * eps).clamp_(min=tiny)
    for floor in (rounding, 0.1):
        rows = torch.baddbmm(rows, torch.bmm(rows, basis.mT), basis, alpha=-1)
        length = torch.linalg.vector_norm(rows, dim=2, keepdim=True)
        rows = rows / length.masked_fill_(length <= floor, math.inf)
        lower, _ = torch.linalg.cholesky_ex(torch.baddbmm(one, rows, rows.mT, beta=16 * eps))
        # Inverting the small triangle and multiplying is far faster than solving for long rows.
        rows = torch.bmm(torch.linalg.solve_triangular(lower, one, upper=False), rows)
    return rows


@dataclass(frozen=True)
class Run:
    """Consecutive undecided matrices of one stack."""

    A: ShardedStack  # (k, m, n) the matrices
    span: slice  # their positions in the basis

    @property
    def size(self) -> int:
        """Columns of the matrices; further columns of the basis are padding."""
        return self.A.shape[2]


class KrylovSpace:
    """Growing orthonormal bases ``V`` (K, rows, n) of the Krylov spaces of K matrices, and the projections of each.

    ``T`` (K, rows, rows - b) is ``V (A^T A) V^T / unit^2``. Every process has all of both, whatever rectangles of the
    matrices it holds.

    Attributes:
        members: indices of the K matrices, counted over all stacks.
        undecided: positions in ``members`` of the matrices that are still multiplied.
        first: index of the first matrix of each stack.
        runs: the undecided matrices.
        split: whether any matrix is split over processes.
        columns_split: whether columns of any matrix are.
        steps: blocks that have been multiplied; ``V`` has one block more.
    """

    def __init__(self, stacks: Sequence[ShardedStack], units: Tensor, max_steps: int) -> None:
        """Start from random directions.

        Args:
            stacks: matrices (k, m, n), of one dtype and on one device.
            units: (K,) the size of each matrix, by which its products are divided.
            max_steps: the largest number of steps.
        """
        self._stacks = stacks
        self.columns_split, self.split = any(A.split[1] for A in stacks), any(any(A.split) for A in stacks)
        self._max_steps, self.steps = max_steps, 0
        capacity = min(max_steps, INITIAL_CAPACITY)
        counts = [A.shape[0] for A in stacks]
        self.first = [sum(counts[:k]) for k in range(len(stacks))]
        self.members = list(range(sum(counts)))
        self.undecided = list(self.members)
        self._scale = units.reciprocal().nan_to_num(posinf=0.0)[:, None, None]
        sizes = [A.shape[2] for A in stacks]
        self._sizes = [size for size, count in zip(sizes, counts, strict=True) for _ in range(count)]
        like = stacks[0].like
        self.V = like.new_empty(sum(counts), (capacity + 1) * BLOCK, max(sizes))
        blocks = torch.zeros(len(stacks), BLOCK, max(sizes), dtype=like.dtype, device="cpu")
        for k, size in enumerate(sizes):
            blocks[k, :, :size] = start_block(size, BLOCK)
        blocks = to_device(blocks, like.device)
        for k, (first, count) in enumerate(zip(self.first, counts, strict=True)):
            self.V[first : first + count, :BLOCK] = blocks[k]
        self.T = like.new_zeros(sum(counts), (capacity + 1) * BLOCK, capacity * BLOCK)
        self._one = torch.eye(BLOCK, dtype=like.dtype, device=like.device).expand(sum(counts), -1, -1)
        self.runs = list(self._undecided_runs())

    def step(self, rider: Tensor) -> Coroutine[Tensor]:
        """Multiply the newest block by ``A^T A``; add what is new in the image to ``V`` and its components to ``T``.

        Args:
            rider: a tensor that is summed over processes along with the products, if any products are.

        Returns:
            The rider's sum; the rider itself, if nothing was summed.
        """
        start, end = self.steps * BLOCK, (self.steps + 1) * BLOCK
        newest = self.V[:, start:end] * self._scale  # scaled twice, for the square of a small unit might be 0
        # y = A x, (k, b, m): summed over processes where columns are split.
        images = [run.A.times(newest[run.span, :, : run.size]) for run in self.runs]
        if self.columns_split:
            images, rider = yield from _summed(images, [run.A.split[1] for run in self.runs], rider)
        # A^T y, (k, b, n): summed over processes where rows or columns are split.
        images = [run.A.mT.times(y) for run, y in zip(self.runs, images, strict=True)]
        split = [any(run.A.split) for run in self.runs]
        if any(split):
            images, summed = yield from _summed(images, split, rider[:0] if self.columns_split else rider)
            rider = rider if self.columns_split else summed
        image = self._joined(images) * self._scale
        # The new block of V and the new columns of T.
        if end + BLOCK > self.V.shape[1]:  # most matrices are decided before that
            self._extend()
        self.V[:, end : end + BLOCK] = orthonormal(image, self.V[:, :end], self._one)
        self.T[:, : end + BLOCK, start:end] = torch.bmm(self.V[:, : end + BLOCK], image.mT)
        self.steps += 1
        return rider

    def decide(self, decided: Collection[int]) -> None:
        """Stop multiplying the matrices at these positions in :attr:`members`."""
        done = set(decided)
        left = self.undecided = [index for index in self.undecided if index not in done]
        if left and len(left) <= 0.75 * len(self.members):  # otherwise the copy is not worth it
            indices = to_device(torch.tensor(left, device="cpu"), self.V.device)
            self.V, self.T, self._scale = self.V[indices], self.T[indices], self._scale[indices]
            self.members, self._one = [self.members[index] for index in left], self._one[: len(left)]
            self.undecided = list(range(len(left)))
        self.runs = list(self._undecided_runs())

    def projected(self) -> Tensor:
        """Return ``T`` of the undecided matrices and, below it, its coupling to the newest block.

        (undecided, end + b, end), float64 on the CPU: one copy from the device.
        """
        end = self.steps * BLOCK
        T = self.T[:, : end + BLOCK, :end].to("cpu").double()
        return T if len(self.undecided) == len(T) else T[self.undecided]

    def miss_probability(self, T: Tensor, tol: float) -> tuple[Tensor, Tensor]:
        """Return a bound on the probability that a singular value above ``(1 + tol) sigma`` is missed; and sigma.

        The components of such a singular vector along the first block are a b x b matrix G, which is computed, times
        those along the newest block, which are below 1. So the first ones, b Gaussians of variance 1/n, would be a
        vector shorter than ``|G|``. Its probability is at most ``(n/2)^(b/2) / Gamma(b/2 + 1) |G|^b``. (For b = 1:
        Hochstenbach 2013.)

        ``T``: from :meth:`projected`.
        """
        b, end = BLOCK, T.shape[2]
        square = torch.linalg.eigvalsh(T[:, :end])[:, -1].clamp(min=TINY)  # reads the lower triangle
        beyond = (1 + tol) ** 2 * square[:, None, None] * torch.eye(end, dtype=T.dtype, device="cpu") - T[:, :end]
        lower, _ = torch.linalg.cholesky_ex(beyond)
        G = torch.cholesky_solve(T[:, end:].mT, lower)[:, :b]
        sizes = [self._sizes[self.members[index]] for index in self.undecided]
        n = torch.tensor(sizes, dtype=torch.float64, device="cpu")
        bound = (n / 2) ** (b / 2) / math.gamma(b / 2 + 1) * torch.linalg.vector_norm(G, dim=(1, 2)) ** b
        return bound, square.sqrt()

    def _undecided_runs(self) -> Iterator[Run]:
        """Yield runs of consecutive undecided matrices of each stack.

        Matrices that are consecutive in a stack are so in the basis, which drops members but keeps their order.
        """
        for first, A in zip(self.first, self._stacks, strict=True):
            indices = [(i, self.members[i] - first) for i in self.undecided]  # in the basis and in the stack
            indices = [(i, j) for i, j in indices if 0 <= j < A.shape[0]]
            for _, run in groupby(enumerate(indices), lambda item: item[1][1] - item[0]):
                (_, (i, j)), *others = run
                count = 1 + len(others)
                yield Run(A if count == A.shape[0] else A.select(j, j + count), slice(i, i + count))

    def _joined(self, images: Sequence[Tensor]) -> Tensor:
        """Return the images of runs as those of all matrices (K, b, n), 0 for decided matrices and in the padding."""
        K, _, n = self.V.shape
        parts, end = [], 0
        for run, image in zip(self.runs, images, strict=True):
            if decided := run.span.start - end:
                parts.append(image.new_zeros(decided, BLOCK, n))
            parts.append(image if run.size == n else torch.nn.functional.pad(image, (0, n - run.size)))
            end = run.span.stop
        if decided := K - end:
            parts.append(self.V.new_zeros(decided, BLOCK, n))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _extend(self) -> None:
        K, rows, size = self.V.shape
        added = min(CAPACITY_INCREMENT * BLOCK, (self._max_steps + 1) * BLOCK - rows)
        self.V = torch.cat([self.V, self.V.new_empty(K, added, size)], dim=1)
        self.T = torch.nn.functional.pad(self.T, (0, added, 0, added))


def ritz(T: Tensor) -> Tensor:
    """Return (3, K): sigma, its error bound and the remainder of projected matrices (K, end + b, end), in units.

    * sigma: the root of the leading Ritz value.
    * error: ``|A^T u - sigma w| / sqrt(2)``, for ``w`` the leading Ritz vector and ``u = A w / sigma``: up to that
      residual, (u, w) of length sqrt(2) is an eigenvector of [[0, A], [A^T, 0]].
    * remainder: the share of the squares of A outside the Krylov space, ``1 - |A V^T|_F^2``.
    """
    end = T.shape[2]
    values, vectors = torch.linalg.eigh(T[:, :end])
    square = values[:, -1].clamp(min=TINY)
    residual = torch.linalg.vector_norm(torch.bmm(T[:, end:], vectors[:, :, -1:]), dim=(1, 2)) / square.sqrt()
    return torch.stack([square.sqrt(), residual / math.sqrt(2), (1 - values.sum(1)).clamp(min=0)])


def _summed(images: list[Tensor], split: list[bool], rider: Tensor) -> Coroutine[tuple[list[Tensor], Tensor]]:
    """Sum the ``split`` images and the rider over processes."""
    *sums, rider = yield [*(image for image, is_split in zip(images, split, strict=True) if is_split), rider]
    remaining = iter(sums)
    return [next(remaining) if is_split else image for image, is_split in zip(images, split, strict=True)], rider
