"""Batches of matrices of one shape: copies of what this process measures of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from spectral_monitor.engine.weights.gradients import local_gradient
from spectral_monitor.layers import Layer
from spectral_monitor.linalg import AllReduce, Shard, ShardedStack, compute_dtype
from spectral_monitor.linalg.lanczos import BLOCK, CAPACITY_INCREMENT, INITIAL_CAPACITY
from spectral_monitor.sharding import Holding, Range, Rectangle
from spectral_monitor.state.buffers import empty_buffer, kept
from spectral_monitor.state.dtensor import local_tensor

SPARE, SPARE_BYTES, DEVICE_SHARE = 0.035, 1 << 27, 1 / 32
"""Limits of the memory that measuring may take in addition to the copy of the weights; the largest one counts: a share
of that copy, 128 MB, and a share of a GPU's memory. On a GPU few large calls are far faster than many small ones.
"""
VECTORS = (2 * INITIAL_CAPACITY + CAPACITY_INCREMENT + 8) * BLOCK
"""Vectors of a Lanczos iteration while its basis is copied to a larger one, and temporary ones."""

SHORT = 1 << 14
"""Entries up to which several differences are computed in one call on a CPU, at the cost of one more pass."""

Start = Mapping[int, Sequence[Tensor]]
"""Layer index -> the entries of the layer's rectangles that drift is counted from, in host memory."""


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
        source = local_tensor(self.layer.sources[0])
        layout = self.layer.layout
        return Kind(layout.fan_out, layout.fan_in, source.dtype, source.device, self.holding.split)

    @property
    def count(self) -> int:
        """The number of the layer's matrices."""
        return self.layer.layout.taps * self.layer.layout.blocks

    def contents(self, tensor: Tensor) -> list[Tensor]:
        """Return the entries (count, rows, cols) of each rectangle of a tensor that is sharded like the parameter."""
        return self.holding.contents(self.layer, tensor)

    def current(self) -> list[Tensor]:
        """Return the same of the current weight."""
        return self.contents(self.layer.weight())


class MatrixBatch:
    """Matrices of some layers; ``spans`` has the indices of each layer's matrices, among those of all processes.

    A buffer holds the same rectangle of several matrices: in the dtype of the weights, and after :meth:`to_device` in
    the one they are measured in.
    """

    def __init__(self, members: dict[int, BatchMember], exchange: AllReduce | None) -> None:
        """Plan the buffers, without allocating them.

        Args:
            members: layer index -> layers of the same kind.
            exchange: the processes that measure together.
        """
        self.members = members
        self.exchange = exchange
        self.spans: dict[int, slice] = {}
        kind = next(iter(members.values())).kind
        self.split = kind.split
        self.dtype = kind.dtype
        self.like = torch.empty(0, dtype=compute_dtype(kind.dtype), device=kind.device)
        # layer index -> its rectangles, each with the index of its buffer and the span there
        self.slots: dict[int, list[tuple[Rectangle, int, slice]]] = {i: [] for i in members}
        total = 0
        matrices: dict[tuple[Range, Range], list[int]] = defaultdict(list)  # box -> the matrices in its buffer
        buffer_of: dict[tuple[Range, Range], int] = {}  # box -> index of its buffer
        for i, member in members.items():
            self.spans[i] = slice(total, total + member.count)
            for rectangle in member.holding.rectangles:
                box, first = (rectangle.rows, rectangle.cols), total + rectangle.index
                span = slice(len(matrices[box]), len(matrices[box]) + rectangle.count)
                self.slots[i].append((rectangle, buffer_of.setdefault(box, len(buffer_of)), span))
                matrices[box] += range(first, first + rectangle.count)
            total += member.count
        self.shape = (total, kind.fan_out, kind.fan_in)
        self.full_count = total  # of the complete stack, if this becomes a subset of one
        self.boxes = list(matrices)
        self.sizes = [(len(matrices[box]), *(last - first for first, last in box)) for box in self.boxes]
        self.indices = [torch.tensor(matrices[box], device="cpu") for box in self.boxes] if exchange is not None else []
        self.buffers: list[Tensor] = []
        self._host = False

    def working_bytes(self, copies: int) -> int:
        """Return the memory that each matrix takes while it is measured, with ``copies`` of it."""
        _, m, n = self.shape
        copies += self.dtype != self.like.dtype
        return (VECTORS * min(m, n) * max(copies, 1) + m * n * copies) * self.like.dtype.itemsize

    def subset(self, members: Iterable[int]) -> MatrixBatch:
        """Return consecutive layers in the same memory; for a single process only."""
        stack = MatrixBatch({i: self.members[i] for i in members}, None)
        spans = [self.spans[i] for i in stack.members]
        stack.buffers = [buffer[spans[0].start : spans[-1].stop] for buffer in self.buffers]  # a single one
        stack._host, stack.full_count = self._host, self.full_count
        return stack

    @property
    def pieces(self) -> ShardedStack:
        """The matrices as a stack that norms are computed of."""
        parts = []
        for k, ((rows, cols), buffer) in enumerate(zip(self.boxes, self.buffers, strict=True)):
            members = None if self.exchange is None else self.indices[k]
            parts.append(Shard(members, slice(*rows), slice(*cols), buffer))
        return ShardedStack(self.shape, tuple(parts), self.split, self.exchange, self.like)

    def entries(self, i: int) -> list[Tensor]:
        """Return the entries (count, rows, cols) of each of layer ``i``'s rectangles."""
        return [self.buffers[buffer][span] for _, buffer, span in self.slots[i]]

    def parts(self, i: int) -> Iterator[tuple[Rectangle, Tensor]]:
        """Yield each of layer ``i``'s rectangles and its entries."""
        yield from zip((rectangle for rectangle, _, _ in self.slots[i]), self.entries(i), strict=True)

    def load(self, host: bool = False, start: Start | None = None) -> None:
        """Allocate buffers, in ``host`` memory or on the device, and copy the current weights or those at the start."""
        self.buffers = [empty_buffer(size, self.dtype, self.like.device, host) for size in self.sizes]
        self._host = host
        self._refill(lambda i: self.members[i].current() if start is None else start[i])

    def _refill(self, contents: Callable[[int], Sequence[Tensor]]) -> None:
        pairs: list[tuple[Tensor, Tensor]] = []
        for i, slots in self.slots.items():
            if slots:
                pairs += zip(self.entries(i), contents(i), strict=True)
        if pairs:
            targets, sources = zip(*pairs, strict=True)
            torch._foreach_copy_(targets, sources, non_blocking=True)

    def current(self, *, in_place: bool) -> MatrixBatch:
        """Return the current weights; ``in_place``: in this memory."""
        stack = self._target(in_place)
        stack._refill(lambda i: self.members[i].current())
        return stack

    def gradients(self, *, in_place: bool) -> MatrixBatch:
        """Return the gradients of weights that are parameters, and zeros for others; ``in_place``: in this memory."""
        stack = self._target(in_place)
        for buffer in stack.buffers:
            buffer.zero_()
        gradients = {i: local_gradient(m.layer.sources[0]) for i, m in self.members.items() if m.layer.compute is None}
        contents = {i: self.members[i].contents(g) for i, g in gradients.items() if g is not None and self.slots[i]}
        stack._refill(lambda i: contents.get(i, stack.entries(i)))
        return stack

    def change(self, start: Start | None = None, *, in_place: bool) -> MatrixBatch:
        """Return the current weights less those in the buffers, or less those at the start.

        ``in_place``: in this memory, whose contents are lost then.
        """
        target = self._target(in_place)
        separate: list[tuple[Tensor, Tensor, Tensor]] = []
        same: list[tuple[Tensor, Tensor]] = []
        for i, slots in self.slots.items():
            if not slots:
                continue
            new = self.members[i].current()
            for k, (_, buffer, span) in enumerate(slots):
                old = self.buffers[buffer][span] if start is None else start[i][k]
                out = target.buffers[buffer][span]
                if (old.dtype, old.device) != (out.dtype, out.device):
                    old = out.copy_(old, non_blocking=True)
                if out.device.type == "cpu" and out.numel() > SHORT:
                    torch.sub(new[k], old, out=out)
                elif old.data_ptr() != out.data_ptr():
                    separate.append((out, new[k], old))
                else:
                    same.append((out, new[k]))
        if separate:  # in one call, at the cost of one more pass over small tensors or on a GPU
            outs, news, olds = zip(*separate, strict=True)
            torch._foreach_copy_(outs, news)
            torch._foreach_sub_(outs, olds)
        if same:
            outs, news = zip(*same, strict=True)
            torch._foreach_neg_(outs)
            torch._foreach_add_(outs, news)
        return target

    def _target(self, in_place: bool) -> MatrixBatch:
        return self if in_place else self._with([self.like.new_empty(size) for size in self.sizes])

    def to_host(self) -> MatrixBatch:
        """Return a copy in host memory, independent of the weights."""
        return self._with([kept(buffer, host=True) for buffer in self.buffers], host=True)

    def to_device(self, slot: Tensor | None = None) -> MatrixBatch:
        """Return the same on the device, in the dtype it is measured in; ``slot``: memory for copies from the host."""
        dtype = self.like.dtype
        if not self._host:
            return self._with([buffer.to(dtype) for buffer in self.buffers])
        sizes = [buffer.numel() for buffer in self.buffers]
        flat = empty_buffer([sum(sizes)], dtype, self.like.device, host=False) if slot is None else slot.view(dtype)
        pairs = zip(flat[: sum(sizes)].split(sizes), self.buffers, strict=True)
        return self._with([part.view(buffer.shape).copy_(buffer, non_blocking=True) for part, buffer in pairs])

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, rounded up to a multiple of 8, so that they can be viewed in any dtype."""
        return -(-sum(buffer.nbytes for buffer in self.buffers) // 8) * 8

    def _with(self, buffers: list[Tensor], host: bool = False) -> MatrixBatch:
        """Return the same matrices with other buffers."""
        stack = copy(self)
        stack.buffers, stack._host = buffers, host
        return stack


def matrix_batches(members: dict[int, BatchMember], exchange: AllReduce | None, single: bool) -> list[MatrixBatch]:
    """Group layers into stacks, the same in every process; ``single``: each layer by itself."""
    groups: dict[tuple[Kind, int], dict[int, BatchMember]] = defaultdict(dict)
    for i, member in members.items():
        groups[(member.kind, i if single else 0)][i] = member
    return [MatrixBatch(group, exchange) for group in groups.values()]


class Chunk(NamedTuple):
    """Stacks of a single process, or subsets of them, that are measured in one solve."""

    stacks: list[MatrixBatch]  # with buffers
    in_place: bool  # whether updates must overwrite the old weights, because memory is short


def chunks(stacks: Sequence[MatrixBatch], copies: int) -> list[Chunk]:
    """Return stacks of a single process in chunks that fit into memory; a single chunk if possible.

    ``copies``: the number of copies of a matrix (updates, and so on) in a solve for everything.
    """
    weights = sum(sum(math.prod(size) for size in stack.sizes) * stack.dtype.itemsize for stack in stacks)
    devices = {stack.like.device for stack in stacks if stack.like.device.type == "cuda"}
    spare = max(SPARE * weights, SPARE_BYTES, *(DEVICE_SHARE * memory_of(device) for device in devices))
    if sum(stack.shape[0] * stack.working_bytes(copies) for stack in stacks) <= spare:
        return [Chunk(list(stacks), in_place=False)]
    result: list[Chunk] = []
    left = 0.0
    for stack in stacks:
        layers: list[int] = []
        for i, member in stack.members.items():
            needed = member.count * stack.working_bytes(0)
            if needed > left:  # a layer that is too large has a chunk of its own
                if layers:
                    result[-1].stacks.append(stack.subset(layers))
                    layers = []
                result.append(Chunk([], in_place=True))
                left = spare
            layers.append(i)
            left -= needed
        result[-1].stacks.append(stack.subset(layers))
    return result


def memory_of(gpu: torch.device) -> int:
    """Return a GPU's total memory in bytes, used or not, so that chunks do not depend on what else runs there."""
    total: int = torch.cuda.get_device_properties(gpu).total_memory
    return total


def host_copies(parts: Iterable[Tensor]) -> list[Tensor]:
    """Return copies in host memory, from which a GPU copies without the host waiting."""
    return [empty_buffer(part.shape, part.dtype, part.device, host=True).copy_(part) for part in parts]
