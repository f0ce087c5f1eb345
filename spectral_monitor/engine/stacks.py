"""Matrices of one shape, copied side by side: what this process measures of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from spectral_monitor.anatomy import Layer
from spectral_monitor.engine.streams import ROWS, Source, Streamed
from spectral_monitor.linalg import Exchange, Part, Pieces, compute_dtype
from spectral_monitor.linalg.lanczos import BLOCK, MORE_ROOM, ROOM
from spectral_monitor.placement import Holding, Range, Rectangle
from spectral_monitor.snapshot.local import local_part
from spectral_monitor.snapshot.room import kept, room

SPARE = 0.045
"""Memory that measuring may take besides the copies, as a share of theirs: vectors, and what is converted."""
VECTORS = (2 * ROOM + MORE_ROOM + 8) * BLOCK
"""Those of a Lanczos iteration while its basis is moved to where there is more room, and those in passing."""
LEAST = 1 << 18
"""Entries that are measured together whatever that takes."""
CONVERTED = 200
"""Of so many entries in half precision one at a time is there in the dtype it is measured in."""
LEAST_CONVERTED = 1 << 16
"""Entries that are converted at a time at the least."""

Start = Mapping[int, Sequence[Tensor]]
"""Layer index -> the weights drift is counted from, as the contents of the layer's rectangles in host memory."""


class Kind(NamedTuple):
    """Shape, dtype and device of matrices, and whether rows and columns are split over processes."""

    fan_out: int
    fan_in: int
    dtype: torch.dtype
    device: torch.device
    split: tuple[bool, bool]


@dataclass(frozen=True)
class Member:
    """A measured layer and what this process does for it."""

    layer: Layer
    holding: Holding

    @property
    def kind(self) -> Kind:
        """What layers that are measured together have in common."""
        source = local_part(self.layer.sources[0])
        layout = self.layer.layout
        return Kind(layout.fan_out, layout.fan_in, source.dtype, source.device, self.holding.split)

    @property
    def count(self) -> int:
        """Matrices of the layer."""
        return self.layer.layout.taps * self.layer.layout.blocks

    def contents(self, tensor: Tensor) -> list[Tensor]:
        """The entries (count, rows, cols) of each rectangle, of a tensor spread as the parameter is."""
        return self.holding.contents(self.layer, tensor)


class Stack:
    """Matrices of some layers; ``spans`` says which are a layer's, among those of all processes.

    Copies of the same rectangle of several matrices lie in one buffer, in the dtype of the weights. What is measured
    is what lies there or, of weights in half precision, what is read from there through a
    :class:`~spectral_monitor.engine.streams.Source`.
    """

    def __init__(self, members: dict[int, Member], exchange: Exchange | None, total: int, single: bool) -> None:
        """Without memory so far.

        Args:
            members: layer index -> what all have one kind of.
            exchange: those who measure with this process.
            total: entries of all stacks.
            single: whether stacks are measured one after the other, so that each needs memory in its turn only.
        """
        self.members = members
        self.exchange = exchange
        self._single = single
        self.spans: dict[int, slice] = {}
        kind = next(iter(members.values())).kind
        self.split = kind.split
        self.dtype = kind.dtype
        self.like = torch.empty(0, dtype=compute_dtype(kind.dtype), device=kind.device)
        # Other processes need all of what is measured side by side at once.
        self._streams = exchange is None and self.like.dtype != kind.dtype
        self._in_place = exchange is None or single
        self._total = total
        self._converted = max(LEAST_CONVERTED, total // CONVERTED)
        total = 0
        held: dict[tuple[Range, Range], list[tuple[int, int, Rectangle]]] = defaultdict(list)
        for i, member in members.items():
            self.spans[i] = slice(total, total + member.count)
            for rectangle in member.holding.rectangles:
                held[(rectangle.rows, rectangle.cols)].append((i, total + rectangle.index, rectangle))
            total += member.count
        self.shape = (total, kind.fan_out, kind.fan_in)
        self.boxes = list(held)
        self.indices: list[Tensor] = []
        self.sizes: list[tuple[int, int, int]] = []
        self.places: dict[int, list[tuple[Rectangle, int, slice]]] = {i: [] for i in members}
        for buffer, ((rows, cols), entries) in enumerate(held.items()):
            end = 0
            for i, _, rectangle in entries:
                self.places[i].append((rectangle, buffer, slice(end, end + rectangle.count)))
                end += rectangle.count
            self.sizes.append((end, rows[1] - rows[0], cols[1] - cols[0]))
            if exchange is not None:
                self.indices.append(torch.cat([torch.arange(first, first + r.count) for _, first, r in entries]))
        for i, places in self.places.items():  # contents come in the order of the rectangles
            if len(places) > 1:
                places.sort(key=lambda place: members[i].holding.rectangles.index(place[0]))
        self.buffers: list[Tensor] = []
        self._host = False
        self._source: Source | None = None

    def portions(self) -> list[Stack]:
        """The same layers, a few at a time, in the same memory.

        What several processes measure side by side stays together.
        """
        count, m, n = self.shape
        spare = SPARE * self._total * self.dtype.itemsize
        if self._streams:
            spare -= self._converted * self.like.dtype.itemsize
        vectors = VECTORS * min(m, n) * self.like.dtype.itemsize
        together = max(int(spare / vectors), LEAST // (m * n))
        if self.exchange is not None or self._single or count <= together:
            return [self]
        groups: list[dict[int, Member]] = []
        left = 0
        for i, member in self.members.items():
            if member.count > left or not groups:
                groups.append({})
                left = together
            groups[-1][i] = member
            left -= member.count
        found = []
        for group in groups:
            first, last = self.spans[next(iter(group))].start, self.spans[next(reversed(group))].stop
            portion = Stack(group, None, self._total, self._single)
            portion.buffers = [buffer[first:last] for buffer in self.buffers]  # one, for all of each matrix is here
            found.append(portion)
        return found

    @property
    def pieces(self) -> Pieces:
        """As norms are computed of it."""
        if self._streams:
            return Streamed.of(self._read())
        parts = []
        for k, ((rows, cols), buffer) in enumerate(zip(self.boxes, self.buffers, strict=True)):
            members = None if self.exchange is None else self.indices[k]
            parts.append(Part(members, slice(*rows), slice(*cols), buffer))
        return Pieces(self.shape, tuple(parts), self.split, self.exchange, self.like)

    def entries(self, i: int) -> Iterator[tuple[int, slice, Tensor]]:
        """Entries (count, rows, cols) of layer ``i``'s rectangles, which one and which of its rows.

        Each is there until the next one is.
        """
        for k, (_, buffer, place) in enumerate(self.places[i]):
            if self._streams:
                for rows, part in self._read().blocks(ROWS, place):
                    yield k, rows, part
            else:
                part = self.buffers[buffer][place]
                yield k, slice(0, part.shape[1]), part

    def parts(self, i: int) -> Iterator[tuple[Rectangle, Tensor]]:
        """The same with the rectangles that they are."""
        for k, rows, part in self.entries(i):
            whole = self.places[i][k][0]
            first = whole.rows[0]
            yield replace(whole, rows=(first + rows.start, first + rows.stop)), part

    def load(self, host: bool = False) -> None:
        """Fill with the weights as they are now, in memory of its own: the ``host``'s or the device's."""
        self.buffers = [room(size, self.dtype, self.like.device, host) for size in self.sizes]
        self._host = host
        self._refill(lambda i: self.members[i].contents(self.members[i].layer.weight()))

    def begin(self, start: Start) -> None:
        """The same with the weights at the start."""
        self.buffers = [room(size, self.dtype, self.like.device, False) for size in self.sizes]
        self._refill(lambda i: start[i])

    def _refill(self, contents: Callable[[int], Sequence[Tensor]]) -> None:
        self._source = None
        for i, places in self.places.items():
            if places:
                for (_, buffer, place), part in zip(places, contents(i), strict=True):
                    self.buffers[buffer][place].copy_(part, non_blocking=True)

    def now(self) -> Stack:
        """The weights as they are now: in this memory, if nobody else needs it."""
        stack = self._target()
        stack._refill(lambda i: self.members[i].contents(self.members[i].layer.weight()))
        return stack

    def change(self, start: Start | None = None) -> Stack:
        """The weights as they are now less what lies here, or less those at the start; in this memory, if nobody else
        needs it.
        """
        if self._streams:
            if start is not None:
                self._refill(lambda i: start[i])
            self._source = None
            self._read([(self.places[i][0][2], m.contents(m.layer.weight())[0]) for i, m in self.members.items()])
            return self
        target = self._target()
        for i, places in self.places.items():
            if not places:
                continue
            member = self.members[i]
            new = member.contents(member.layer.weight())
            for k, (_, buffer, place) in enumerate(places):
                old = self.buffers[buffer][place] if start is None else start[i][k]
                out = target.buffers[buffer][place]
                if (old.dtype, old.device) != (out.dtype, out.device):
                    old = out.copy_(old, non_blocking=True)
                torch.sub(new[k], old, out=out)
        return target

    def _target(self) -> Stack:
        return self if self._in_place else self._with([self.like.new_empty(size) for size in self.sizes])

    def away(self) -> Stack:
        """The same in the host's memory, whatever happens to the weights."""
        return self._with([kept(buffer, host=True) for buffer in self.buffers], host=True)

    def here(self, slot: Tensor | None = None) -> Stack:
        """The same on the device, if need be in the bytes of ``slot``, and as it is read."""
        dtype = self.dtype if self._streams else self.like.dtype
        if not self._host:
            return self._with([buffer.to(dtype) for buffer in self.buffers])
        sizes = [buffer.numel() for buffer in self.buffers]
        flat = room([sum(sizes)], dtype, self.like.device, host=False) if slot is None else slot.view(dtype)
        pairs = zip(flat[: sum(sizes)].split(sizes), self.buffers, strict=True)
        return self._with([place.view(buffer.shape).copy_(buffer, non_blocking=True) for place, buffer in pairs])

    @property
    def nbytes(self) -> int:
        """Memory that is held, in whole numbers of any dtype."""
        return -(-sum(buffer.nbytes for buffer in self.buffers) // 8) * 8

    def _with(self, buffers: list[Tensor], host: bool = False) -> Stack:
        """The same matrices in other memory."""
        stack = copy(self)
        stack.buffers, stack._host, stack._source = buffers, host, None
        return stack

    def _read(self, new: Sequence[tuple[slice, Tensor]] = ()) -> Source:
        if self._source is None:
            self._source = Source(self.buffers[0], new, self.like, self._converted)
        return self._source


def stacks(members: dict[int, Member], exchange: Exchange | None, total: int, single: bool) -> list[Stack]:
    """Layers grouped into stacks, in every process alike; ``single``: each by itself. ``total``: see :class:`Stack`."""
    groups: dict[tuple[Kind, int], dict[int, Member]] = defaultdict(dict)
    for i, member in members.items():
        groups[(member.kind, i if single else 0)][i] = member
    return [Stack(group, exchange, total, single) for group in groups.values()]


def host_copies(parts: Iterable[Tensor]) -> list[Tensor]:
    """Copies in host memory."""
    return [part.to("cpu", copy=True) for part in parts]
