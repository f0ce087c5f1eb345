"""A stack of matrices of which every process holds rectangles, or all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spectral_monitor.linalg.collectives import AllReduce, Coroutine, all_reduce_norm


@dataclass(frozen=True)
class Shard:
    """The same rectangle of some members of the stack."""

    members: Tensor | None  # which, (P,) on the CPU; ``None`` for all of them
    rows: slice  # where the rectangle lies
    cols: slice  # the same of columns
    A: Tensor  # (P, rows, cols) what is in it

    def at(self, device: torch.device) -> slice | Tensor:
        """Return the index of the members in a tensor on a device."""
        return slice(None) if self.members is None else self.members.to(device)


@dataclass(frozen=True)
class ShardedStack:
    """K matrices (m, n); their entries are the sums of the rectangles that all processes hold."""

    shape: tuple[int, int, int]  # (K, m, n)
    parts: tuple[Shard, ...]  # what this process holds, at most one rectangle of a matrix
    # whether some matrix has rows (first) or columns (second) whose entries are in several processes. Where neither is,
    # each matrix is whole in one process.
    split: tuple[bool, bool]
    exchange: AllReduce | None  # the processes; ``None`` if there is one
    like: Tensor  # an empty tensor of the dtype and on the device of all

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
        """True if one part has everything."""
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
        """Return the stack of what a function makes of each part's matrices and members."""
        return replace(self, parts=tuple(replace(part, A=function(part.A, part.members)) for part in self.parts))

    def times(self, x: Tensor) -> Tensor:
        """``A x`` of rows x (K, b, n) as rows (K, b, m): this process's share, the rows of others 0."""
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
        """(K,) the ``order``-norm over all rectangles of ``measure``, from (P, rows, cols) to (P,)."""
        if self._is_whole:
            (part,) = self.parts
            mine = measure(part.A)
        else:
            mine = self.like.new_zeros(self.shape[0])
            for part in self.parts:
                mine[part.at(mine.device)] = measure(part.A)
        return (yield from all_reduce_norm(mine, order, self.exchange))
