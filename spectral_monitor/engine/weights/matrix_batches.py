"""Matrices of one shape, copied side by side: what this process measures of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from spectral_monitor.engine.weights.gradients import gradient_here
from spectral_monitor.layers import Layer
from spectral_monitor.linalg import AllReduce, Shard, ShardedStack, compute_dtype
from spectral_monitor.linalg.lanczos import BLOCK, MORE_ROOM, ROOM
from spectral_monitor.sharding import Holding, Range, Rectangle
from spectral_monitor.state.buffers import empty_buffer, kept
from spectral_monitor.state.dtensor import local_part

SPARE, SPARE_BYTES, OF_DEVICE = 0.035, 1 << 27, 1 / 32
"""Memory that measuring may take besides the copy of the weights: a share of that, 128 MB or a share of all that a GPU
has, whichever is most. On a GPU few large calls are far faster than many small ones.
"""
VECTORS = (2 * ROOM + MORE_ROOM + 8) * BLOCK
"""Those of a Lanczos iteration while its basis is moved to where there is more room, and those in passing."""

SHORT = 1 << 14
"""Entries up to which differences are formed together on a CPU, with one more pass."""

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
class BatchMember:
    """A measured layer and what this process does for it."""

    layer: Layer
    holding: Holding

    @property
    def kind(self) -> Kind:
        """The common properties of layers that are measured together."""
        source = local_part(self.layer.sources[0])
        layout = self.layer.layout
        return Kind(layout.fan_out, layout.fan_in, source.dtype, source.device, self.holding.split)

    @property
    def count(self) -> int:
        """Matrices of the layer."""
        return self.layer.layout.taps * self.layer.layout.blocks

    def contents(self, tensor: Tensor) -> list[Tensor]:
        """Return the entries (count, rows, cols) of each rectangle of a tensor that is sharded as the parameter is."""
        return self.holding.contents(self.layer, tensor)

    def now(self) -> list[Tensor]:
        """Return the same of the weight as it is now."""
        return self.contents(self.layer.weight())


class MatrixBatch:
    """Matrices of some layers; ``spans`` says which are a layer's, among those of all processes.

    Copies of the same rectangle of several matrices lie in one buffer: in the dtype of the weights, and after
    :meth:`here` in the one they are measured in.
    """

    def __init__(self, members: dict[int, BatchMember], exchange: AllReduce | None) -> None:
        """Without memory so far.

        Args:
            members: layer index -> what all have one kind of.
            exchange: those who measure with this process.
        """
        self.members = members
        self.exchange = exchange
        self.spans: dict[int, slice] = {}
        kind = next(iter(members.values())).kind
        self.split = kind.split
        self.dtype = kind.dtype
        self.like = torch.empty(0, dtype=compute_dtype(kind.dtype), device=kind.device)
        total = 0
        held: dict[tuple[Range, Range], list[tuple[int, int, Rectangle]]] = defaultdict(list)
        for i, member in members.items():
            self.spans[i] = slice(total, total + member.count)
            for rectangle in member.holding.rectangles:
                held[(rectangle.rows, rectangle.cols)].append((i, total + rectangle.index, rectangle))
            total += member.count
        self.shape = (total, kind.fan_out, kind.fan_in)
        self.matrices = total  # of the whole stack, if this becomes a part of one
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
                self.indices.append(
                    torch.cat([torch.arange(first, first + r.count, device="cpu") for _, first, r in entries])
                )
        for i, places in self.places.items():  # contents come in the order of the rectangles
            if len(places) > 1:
                places.sort(key=lambda place: members[i].holding.rectangles.index(place[0]))
        self.buffers: list[Tensor] = []
        self._host = False

    def working_bytes(self, copies: int) -> int:
        """Return the memory that each matrix takes while it is measured, with so many copies of it besides."""
        _, m, n = self.shape
        copies += self.dtype != self.like.dtype
        return (VECTORS * min(m, n) * max(copies, 1) + m * n * copies) * self.like.dtype.itemsize

    def subset(self, members: Iterable[int]) -> MatrixBatch:
        """Return some layers, which come one after the other, in the same memory; of a single process."""
        stack = MatrixBatch({i: self.members[i] for i in members}, None)
        spans = [self.spans[i] for i in stack.members]
        stack.buffers = [buffer[spans[0].start : spans[-1].stop] for buffer in self.buffers]  # one, for all is here
        stack._host, stack.matrices = self._host, self.matrices
        return stack

    @property
    def pieces(self) -> ShardedStack:
        """As norms are computed of it."""
        parts = []
        for k, ((rows, cols), buffer) in enumerate(zip(self.boxes, self.buffers, strict=True)):
            members = None if self.exchange is None else self.indices[k]
            parts.append(Shard(members, slice(*rows), slice(*cols), buffer))
        return ShardedStack(self.shape, tuple(parts), self.split, self.exchange, self.like)

    def entries(self, i: int) -> list[Tensor]:
        """Return the entries (count, rows, cols) of each of layer ``i``'s rectangles."""
        return [self.buffers[buffer][place] for _, buffer, place in self.places[i]]

    def parts(self, i: int) -> Iterator[tuple[Rectangle, Tensor]]:
        """Yield the same with the rectangles that they are."""
        yield from zip((rectangle for rectangle, _, _ in self.places[i]), self.entries(i), strict=True)

    def load(self, host: bool = False, start: Start | None = None) -> None:
        """Fill memory of its own, the ``host``'s or the device's, with the weights as they are now, or at the start."""
        self.buffers = [empty_buffer(size, self.dtype, self.like.device, host) for size in self.sizes]
        self._host = host
        self._refill(lambda i: self.members[i].now() if start is None else start[i])

    def _refill(self, contents: Callable[[int], Sequence[Tensor]]) -> None:
        pairs: list[tuple[Tensor, Tensor]] = []
        for i, places in self.places.items():
            if places:
                pairs += [(self.buffers[k][place], x) for (_, k, place), x in zip(places, contents(i), strict=True)]
        if pairs:
            targets, found = zip(*pairs, strict=True)
            torch._foreach_copy_(targets, found, non_blocking=True)

    def now(self, *, in_place: bool) -> MatrixBatch:
        """Return the weights as they are now; ``in_place``: in this memory."""
        stack = self._target(in_place)
        stack._refill(lambda i: self.members[i].now())
        return stack

    def gradients(self, *, in_place: bool) -> MatrixBatch:
        """Return the gradients of parameters that are weights themselves, zeros where there are none; ``in_place``: in
        this memory.
        """
        stack = self._target(in_place)
        for buffer in stack.buffers:
            buffer.zero_()
        found = {i: gradient_here(m.layer.sources[0]) for i, m in self.members.items() if m.layer.compute is None}
        there = {i: self.members[i].contents(g) for i, g in found.items() if g is not None and self.places[i]}
        stack._refill(lambda i: there.get(i, stack.entries(i)))
        return stack

    def change(self, start: Start | None = None, *, in_place: bool) -> MatrixBatch:
        """Return the weights as they are now less what lies here, or less those at the start.

        ``in_place``: in this memory, which is lost then.
        """
        target = self._target(in_place)
        apart: list[tuple[Tensor, Tensor, Tensor]] = []
        same: list[tuple[Tensor, Tensor]] = []
        for i, places in self.places.items():
            if not places:
                continue
            new = self.members[i].now()
            for k, (_, buffer, place) in enumerate(places):
                old = self.buffers[buffer][place] if start is None else start[i][k]
                out = target.buffers[buffer][place]
                if (old.dtype, old.device) != (out.dtype, out.device):
                    old = out.copy_(old, non_blocking=True)
                if out.device.type == "cpu" and out.numel() > SHORT:
                    torch.sub(new[k], old, out=out)
                elif old.data_ptr() != out.data_ptr():
                    apart.append((out, new[k], old))
                else:
                    same.append((out, new[k]))
        if apart:  # together: what that costs is one more pass, over little or on a GPU
            outs, news, olds = zip(*apart, strict=True)
            torch._foreach_copy_(outs, news)
            torch._foreach_sub_(outs, olds)
        if same:
            outs, news = zip(*same, strict=True)
            torch._foreach_neg_(outs)
            torch._foreach_add_(outs, news)
        return target

    def _target(self, in_place: bool) -> MatrixBatch:
        return self if in_place else self._with([self.like.new_empty(size) for size in self.sizes])

    def away(self) -> MatrixBatch:
        """Return a copy in host memory, independent of the weights."""
        return self._with([kept(buffer, host=True) for buffer in self.buffers], host=True)

    def here(self, slot: Tensor | None = None) -> MatrixBatch:
        """Return the same on the device, in the bytes of ``slot`` if need be, and as it is read."""
        dtype = self.like.dtype
        if not self._host:
            return self._with([buffer.to(dtype) for buffer in self.buffers])
        sizes = [buffer.numel() for buffer in self.buffers]
        flat = empty_buffer([sum(sizes)], dtype, self.like.device, host=False) if slot is None else slot.view(dtype)
        pairs = zip(flat[: sum(sizes)].split(sizes), self.buffers, strict=True)
        return self._with([place.view(buffer.shape).copy_(buffer, non_blocking=True) for place, buffer in pairs])

    @property
    def nbytes(self) -> int:
        """Memory that is held, in whole numbers of any dtype."""
        return -(-sum(buffer.nbytes for buffer in self.buffers) // 8) * 8

    def _with(self, buffers: list[Tensor], host: bool = False) -> MatrixBatch:
        """Return the same matrices in other memory."""
        stack = copy(self)
        stack.buffers, stack._host = buffers, host
        return stack


def matrix_batches(members: dict[int, BatchMember], exchange: AllReduce | None, single: bool) -> list[MatrixBatch]:
    """Group layers into stacks, in every process alike; ``single``: each by itself."""
    groups: dict[tuple[Kind, int], dict[int, BatchMember]] = defaultdict(dict)
    for i, member in members.items():
        groups[(member.kind, i if single else 0)][i] = member
    return [MatrixBatch(group, exchange) for group in groups.values()]


class Chunk(NamedTuple):
    """Stacks of a single process, or parts of them, that are measured together."""

    stacks: list[MatrixBatch]  # with memory
    in_place: bool  # whether updates must take the place of the weights before, for want of memory


def chunks(found: Sequence[MatrixBatch], copies: int) -> list[Chunk]:
    """Return stacks of a single process in portions that fit into memory, all in one if they do.

    Args:
        found: all stacks, with memory.
        copies: that one solve for everything would take besides: of updates, and so on.
    """
    weights = sum(sum(math.prod(size) for size in stack.sizes) * stack.dtype.itemsize for stack in found)
    devices = {stack.like.device for stack in found if stack.like.device.type == "cuda"}
    spare = max(SPARE * weights, SPARE_BYTES, *(OF_DEVICE * memory_of(device) for device in devices))
    if sum(stack.shape[0] * stack.working_bytes(copies) for stack in found) <= spare:
        return [Chunk(list(found), in_place=False)]
    result: list[Chunk] = []
    left = 0.0
    for stack in found:
        some: list[int] = []
        for i, member in stack.members.items():
            needed = member.count * stack.working_bytes(0)
            if needed > left:  # a layer that is too large has a portion of its own
                if some:
                    result[-1].stacks.append(stack.subset(some))
                    some = []
                result.append(Chunk([], in_place=True))
                left = spare
            some.append(i)
            left -= needed
        result[-1].stacks.append(stack.subset(some))
    return result


def memory_of(gpu: torch.device) -> int:
    """Return the bytes a GPU has, used or not: what is measured together must not depend on what else is there."""
    total: int = torch.cuda.get_device_properties(gpu).total_memory
    return total


def host_copies(parts: Iterable[Tensor]) -> list[Tensor]:
    """Copies in host memory, from where a GPU copies back without being waited for."""
    return [empty_buffer(part.shape, part.dtype, part.device, host=True).copy_(part) for part in parts]
