"""A stack of matrices of which each process holds rectangles, or everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spectral_monitor.linalg.collectives import AllReduce, Coroutine, all_reduce_norm


@dataclass(frozen=True)
class Shard:
    """The same rectangle of some or all matrices of the stack."""

    members: Tensor | None  # (P,) indices of the matrices, on the CPU; ``None`` for all
    rows: slice  # of the matrix
    cols: slice  # of the matrix
    A: Tensor  # (P, rows, cols) the entries

    def at(self, device: torch.device) -> slice | Tensor:
        """Return the members as an index of a tensor on a device."""
        return slice(None) if self.members is None else self.members.to(device)


@dataclass(frozen=True)
class ShardedStack:
    """K matrices (m, n); their entries are the sums of the rectangles that all processes hold."""

    shape: tuple[int, int, int]  # (K, m, n)
    parts: tuple[Shard, ...]  # the rectangles of this process, at most one of each matrix
    # whether the rows (first) or the columns (second) of some matrix are split over processes; if neither are, each
    # matrix is complete in one process
    split: tuple[bool, bool]
    exchange: AllReduce | None  # the processes; ``None`` for a single one
    like: Tensor  # an empty tensor of the same dtype and device

    @classmethod
    def whole(cls, A: Tensor) -> ShardedStack:
        """Return a stack (K, m, n) that is all local."""
        everything = slice(None)
        shape = (A.shape[0], A.shape[1], A.shape[2])
        return cls(shape, (Shard(None, everything, everything, A),), (False, False), None, A.new_empty(0))

    @property
    def mT(self) -> ShardedStack:  # noqa: N802  as torch calls it
        """The transposed matrices."""
        K, m, n = self.shape
        parts = tuple(Shard(part.members, part.cols, part.rows, part.A.mT) for part in self.parts)
        return replace(self, shape=(K, n, m), parts=parts, split=self.split[::-1])

    @property
    def _is_whole(self) -> bool:
        """True if one part holds everything."""
        return [part.A.shape for part in self.parts] == [self.shape]

    def select(self, first: int, last: int) -> ShardedStack:
        """Return the members from ``first`` up to ``last``."""
        parts = []
        for part in self.parts:
            if part.members is None:
                parts.append(replace(part, A=part.A[first:last]))
            else:
                start, stop = torch.searchsorted(part.members, torch.tensor([first, last], device="cpu")).tolist()
                if stop > start:
                    parts.append(replace(part, members=part.members[start:stop] - first, A=part.A[start:stop]))
        return replace(self, shape=(last - first, *self.shape[1:]), parts=tuple(parts))

    def map(self, function: Callable[[Tensor, Tensor | None], Tensor]) -> ShardedStack:
        """Return the stack with a function applied to the matrices and members of each part."""
        return replace(self, parts=tuple(replace(part, A=function(part.A, part.members)) for part in self.parts))

    def times(self, x: Tensor) -> Tensor:
        """Return this process's share of ``A x`` for rows x (K, b, n), as rows (K, b, m)."""
        K, b, _ = x.shape
        if self._is_whole:
            (part,) = self.parts
            return torch.bmm(x, part.A.mT)  # rows times matrices: the fast order
        y = x.new_zeros(K, b, self.shape[1])
        for part in self.parts:
            at = part.at(x.device)
            y[at, :, part.rows] = torch.bmm(x[at][:, :, part.cols], part.A.mT)
        return y

    def gram(self) -> Tensor:
        """Return this process's share of ``A A^T``, (K, m, m), where rows are not split."""
        total = self.like.new_zeros(self.shape[0], self.shape[1], self.shape[1])
        for part in self.parts:
            total[part.at(total.device)] = torch.bmm(part.A, part.A.mT)
        return total

    def combined(self, measure: Callable[[Tensor], Tensor], order: float) -> Coroutine[Tensor]:
        """Return (K,), the ``order``-norm over all rectangles of ``measure``, which maps (P, rows, cols) to (P,)."""
        if self._is_whole:
            (part,) = self.parts
            local = measure(part.A)
        else:
            local = self.like.new_zeros(self.shape[0])
            for part in self.parts:
                local[part.at(local.device)] = measure(part.A)
        return (yield from all_reduce_norm(local, order, self.exchange))
