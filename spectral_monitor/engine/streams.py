"""Half-precision matrices as norms are computed of them: converted a few rows at a time, never all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spectral_monitor.linalg import Pieces, Routine

ROWS, COLS = 1, 2

Tamer = Callable[[Tensor, Tensor | None], Tensor]


class Source:
    """K matrices (m, n) in the memory they lie in: ``old``, or ``new`` less ``old``.

    Of both only a few entries at a time are there in the dtype they are measured in. What fits as a whole is converted
    once.

    Attributes:
        shape: (K, m, n).
        like: an empty tensor of the dtype they are measured in.
    """

    def __init__(self, old: Tensor, new: Sequence[tuple[slice, Tensor]], like: Tensor, entries: int) -> None:
        """``new``: some of the matrices at a time; none if ``old`` is all. ``entries``: how many are converted at a
        time, but at least a row, or a column, of each matrix.
        """
        self.shape = (old.shape[0], old.shape[1], old.shape[2])
        self.like = like
        self._old = old
        self._new = new
        self._entries = entries
        self._memory = like
        self._all: Tensor | None = None

    def blocks(self, along: int, members: slice = slice(None)) -> Iterator[tuple[slice, Tensor]]:
        """Rows (``along`` 1) or columns (2) of some members, which must be all or those of one of ``new``; from where
        to where, and the entries, which are there until the next ones are.
        """
        K, m, n = self._old[members].shape
        if self._old.numel() <= self._entries:
            if self._all is None:
                self._all = self._converted(slice(None), slice(None), slice(None))
            yield slice(0, (m, n)[along - 1]), self._all[members]
            return
        size, across = (m, n) if along == ROWS else (n, m)
        step = max(1, self._entries // max(1, K * across))
        for first in range(0, size, step):
            some = slice(first, min(first + step, size))
            rows, cols = (some, slice(None)) if along == ROWS else (slice(None), some)
            yield some, self._converted(members, rows, cols)

    def _converted(self, members: slice, rows: slice, cols: slice) -> Tensor:
        old = self._old[members, rows, cols]
        if self._memory.numel() < old.numel():
            self._memory = self.like.new_empty(old.numel())
        out = self._memory[: old.numel()].view(old.shape)
        if not self._new:
            return out.copy_(old)
        if members == slice(None):
            for place, new in self._new:
                out[place].copy_(new[:, rows, cols])
        else:
            (new,) = (new for place, new in self._new if place == members)
            out.copy_(new[:, rows, cols])
        return out.sub_(old)


@dataclass(frozen=True)
class Streamed(Pieces):
    """A stack that is all here, read from a :class:`Source`.

    Attributes:
        source: of the stack or, if ``flipped``, of the transposed matrices.
        tamers: what is made of the entries that are read, one after the other.
    """

    source: Source
    flipped: bool = False
    tamers: tuple[Tamer, ...] = ()

    @classmethod
    def of(cls, source: Source) -> Streamed:
        """All of a source."""
        return cls(source.shape, (), (False, False), None, source.like, source)

    @property
    def mT(self) -> Streamed:  # noqa: N802  as torch calls it
        """The transposed matrices."""
        K, m, n = self.shape
        return replace(self, shape=(K, n, m), flipped=not self.flipped)

    def map(self, function: Tamer) -> Streamed:
        """The stack of what a function makes of the matrices."""
        return replace(self, tamers=(*self.tamers, function))

    def _blocks(self, along: int) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of the source's matrices."""
        for some, A in self.source.blocks(along):
            for tamer in self.tamers:
                A = tamer(A, None)
            yield some, A

    def times(self, x: Tensor) -> Tensor:
        """``A x`` of rows x (K, b, n) as rows (K, b, m)."""
        y = x.new_zeros(x.shape[0], x.shape[1], self.shape[1])
        for some, A in self._blocks(ROWS):
            if self.flipped:
                y.baddbmm_(x[:, :, some], A)
            else:
                y[:, :, some] = torch.bmm(x, A.mT)
        return y

    def gram(self) -> Tensor:
        """``A A^T``, (K, m, m)."""
        total = self.like.new_zeros(self.shape[0], self.shape[1], self.shape[1])
        for _, A in self._blocks(ROWS if self.flipped else COLS):
            A = A.mT if self.flipped else A
            total.baddbmm_(A, A.mT)
        return total

    def combined(self, measure: Callable[[Tensor], Tensor], order: float) -> Routine[Tensor]:
        """(K,) the ``order``-norm over all entries of ``measure``, a norm of the same kind."""
        yield from ()
        norms = torch.stack([measure(A) for _, A in self._blocks(ROWS)])
        whole: Tensor = torch.linalg.vector_norm(norms.double(), ord=order, dim=0).to(norms.dtype)
        return whole
