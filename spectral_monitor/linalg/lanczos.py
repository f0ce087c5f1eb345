"""Block Lanczos: the largest singular value of each matrix of a stack.

The Krylov space of ``A^T A`` grows from four random directions at once (Golub and Underwood 1977), and its largest
Ritz value approaches the largest squared singular value from below. One read of ``A`` serves all four. A single
direction is now and then almost orthogonal to the leading singular vector, and then a lesser singular value passes
for the largest; four at once hardly ever are, and how improbable it is can be computed. Nothing is kept between calls.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from spectral_monitor.linalg.pieces import Pieces
from spectral_monitor.linalg.rounds import Routine

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
    """Fixed random orthonormal rows, (block, size) float64 on the CPU, 0 if there are no more; the global generator is
    not touched.
    """
    generator = torch.Generator("cpu").manual_seed(0x5EC7 + size)
    columns = torch.randn(size, block, generator=generator, dtype=torch.float64, device="cpu")
    rows = torch.zeros(block, size, dtype=torch.float64)
    rows[: min(size, block)] = torch.linalg.qr(columns).Q.mT
    return rows


def orthonormal(rows: Tensor, basis: Tensor) -> Tensor:
    """Orthonormal rows for what (K, b, n) rows span outside an orthonormal basis (K, k, n); 0 in place of rounding."""
    eps, tiny = torch.finfo(rows.dtype).eps, torch.finfo(rows.dtype).tiny
    one = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    ridge, ones = 16 * eps * one, one.expand(len(rows), -1, -1)
    # What the first round makes of a row in the span of the others is far shorter than 1.
    rounding = 16 * eps * torch.linalg.vector_norm(rows, dim=2, keepdim=True)
    for floor in (rounding.clamp(min=tiny), 0.1):  # the reciprocal of less than that may be infinite
        rows = torch.baddbmm(rows, torch.bmm(rows, basis.mT), basis, alpha=-1)
        length = torch.linalg.vector_norm(rows, dim=2, keepdim=True)
        rows = rows * torch.where(length > floor, length.reciprocal(), 0.0)
        lower, _ = torch.linalg.cholesky_ex(torch.baddbmm(ridge, rows, rows.mT))
        # The inverse of so small a triangle, and a product: far faster than solving for long rows.
        rows = torch.bmm(torch.linalg.solve_triangular(lower, ones, upper=False), rows)
    return rows


class KrylovSpace:
    """A growing orthonormal basis ``V`` of the Krylov space, and ``T = V (A^T A) V^T / unit^2``.

    Every process has all of it, whatever rectangles of the matrices it holds.

    Attributes:
        steps: blocks whose images are known; ``V`` has one block more.
        passes: how often the matrices were read.
        square: the leading Ritz values when :meth:`doubt` was asked last.
    """

    def __init__(self, A: Pieces, max_steps: int, unit: Tensor, block: int = BLOCK) -> None:
        """``A`` (K, m, n); ``unit`` (K,), the size of each matrix, takes its scale out of all that follows."""
        self.A = A
        self.block, self.steps, self.passes = block, 0, 0
        self._scale = torch.where(unit > 0, unit, 1.0).reciprocal()[:, None, None]
        K, _, size = A.shape
        self._max_steps, room = max_steps, min(max_steps, ROOM)
        self.V = A.like.new_empty(K, (room + 1) * block, size)
        self.V[:, :block] = start_block(size, block).to(self.V.device, self.V.dtype, non_blocking=True)
        self.T = A.like.new_zeros(K, (room + 1) * block, room * block)
        self.square = A.like.new_zeros(K)

    def step(self, members: Tensor, rider: Tensor) -> Routine[Tensor]:
        """One more block: the image under ``A^T A`` of the newest, what is new in it, and its components.

        Args:
            members: (indices on the CPU) who still needs it; of the others no sums are asked for.
            rider: is summed over processes besides, if any sum is asked for.

        Returns:
            The rider's sum; the rider itself, if there was no sum.
        """
        start, end = self.steps * self.block, (self.steps + 1) * self.block
        image = self.A.times(self.V[:, start:end] * self._scale)  # squares of a small unit might be 0
        down, across = self.A.split
        if across:
            image, rider = yield from _summed(image, members, rider)
            image = self.A.mT.times(image)
            image, _ = yield from _summed(image, members, rider[:0])
        elif down:
            image = self.A.mT.times(image)
            image, rider = yield from _summed(image, members, rider)
        else:
            image = self.A.mT.times(image)
        image = image * self._scale
        if end + self.block > self.V.shape[1]:  # most matrices are decided before that
            self._make_room()
        self.V[:, end : end + self.block] = orthonormal(image, self.V[:, :end])
        self.T[:, : end + self.block, start:end] = torch.bmm(self.V[:, : end + self.block], image.mT)
        self.steps += 1
        self.passes += 2
        return rider

    def _make_room(self) -> None:
        K, rows, size = self.V.shape
        more = min(MORE_ROOM * self.block, (self._max_steps + 1) * self.block - rows)
        self.V = torch.cat([self.V, self.V.new_empty(K, more, size)], dim=1)
        self.T = torch.nn.functional.pad(self.T, (0, more, 0, more))

    def projected(self, members: Tensor) -> Tensor:
        """``T`` of these members (indices on the CPU) and, below it, its coupling to the newest block.

        (members, end + b, end), float64 on the CPU: one copy from the device.
        """
        end = self.steps * self.block
        T = self.T[:, : end + self.block, :end].to("cpu").double()
        return T if len(members) == len(T) else T[members]

    def leading(self, T: Tensor) -> Tensor:
        """The leading Ritz value: sigma squared, in units squared."""
        square: Tensor = torch.linalg.eigvalsh(T[:, : T.shape[2]])[:, -1].clamp(min=TINY)  # reads the lower triangle
        return square

    def doubt(self, T: Tensor, tol: float) -> Tensor:
        """A bound on how probable a start is that leaves a singular value above ``(1 + tol) sigma`` unseen.

        The components of its vector along the first block are a known b x b matrix G times those along the newest
        block, which are below 1. That b Gaussians of variance 1/n come out that small, shorter than ``|G|``, has a
        probability of at most ``(n/2)^(b/2) / Gamma(b/2 + 1) |G|^b``. (For b = 1: Hochstenbach 2013.)
        """
        b, n, end = self.block, self.V.shape[2], T.shape[2]
        self.square = self.leading(T)
        beyond = (1 + tol) ** 2 * self.square[:, None, None] * torch.eye(end, dtype=T.dtype, device=T.device) - T[
            :, :end
        ]
        lower, _ = torch.linalg.cholesky_ex(beyond)
        G = torch.cholesky_solve(T[:, end:].mT, lower)[:, :b]
        size: Tensor = torch.linalg.vector_norm(G, dim=(1, 2))
        bound: Tensor = (n / 2) ** (b / 2) / math.gamma(b / 2 + 1) * size**b
        return bound

    def ritz(self, T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """sigma, residual and seen.

        * sigma: the root of the leading Ritz value, in units.
        * residual: ``|A^T u - sigma w|`` in units, for ``w`` the leading Ritz vector and ``u = A w / sigma``.
        * seen: ``|A V^T|_F^2``, in units squared.
        """
        end = T.shape[2]
        values, vectors = torch.linalg.eigh(T[:, :end])
        square = values[:, -1].clamp(min=TINY)
        residual = torch.linalg.vector_norm(torch.bmm(T[:, end:], vectors[:, :, -1:]), dim=(1, 2)) / square.sqrt()
        return square.sqrt(), residual, values.sum(1)


def _summed(x: Tensor, members: Tensor, rider: Tensor) -> Routine[tuple[Tensor, Tensor]]:
    """``x`` (K, ...) of these members summed over processes, that of the others 0; and the rider's sum."""
    if len(members) == len(x):
        x, rider = yield [x, rider]
        return x, rider
    index = members.to(x.device)
    some, rider = yield [x[index], rider]
    return torch.zeros_like(x).index_copy_(0, index, some), rider
