"""Matrices of one shape, copied side by side: what this process measures of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from spectral_monitor.anatomy import Layer
from spectral_monitor.linalg import Exchange, Part, Pieces, compute_dtype
from spectral_monitor.placement import Holding, Range, Rectangle
from spectral_monitor.snapshot.local import local_part

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
        return Kind(layout.fan_out, layout.fan_in, compute_dtype(source.dtype), source.device, self.holding.split)

    @property
    def count(self) -> int:
        """Matrices of the layer."""
        return self.layer.layout.taps * self.layer.layout.blocks

    def contents(self, tensor: Tensor) -> list[Tensor]:
        """The entries (count, rows, cols) of each rectangle, of a tensor spread as the parameter is."""
        return self.holding.contents(self.layer, tensor)


class Stack:
    """Matrices of some layers; ``spans`` says which are a layer's, among those of all processes.

    Copies of the same rectangle of several matrices lie in one buffer.
    """

    def __init__(self, members: dict[int, Member], exchange: Exchange | None) -> None:
        self.members = members
        self.exchange = exchange
        self.spans: dict[int, slice] = {}
        kind = next(iter(members.values())).kind
        self.split = kind.split
        self.like = torch.empty(0, dtype=kind.dtype, device=kind.device)
        total = 0
        held: dict[tuple[Range, Range], list[tuple[int, int, Rectangle]]] = defaultdict(list)
        for i, member in members.items():
            self.spans[i] = slice(total, total + member.count)
            for rectangle in member.holding.rectangles:
                held[(rectangle.rows, rectangle.cols)].append((i, total + rectangle.index, rectangle))
            total += member.count
        self.shape = (total, kind.fan_out, kind.fan_in)
        self.indices: list[Tensor] = []
        self.boxes = list(held)
        self.places: dict[int, list[tuple[Rectangle, int, slice]]] = {i: [] for i in members}
        for buffer, entries in enumerate(held.values()):
            end = 0
            for i, _, rectangle in entries:
                self.places[i].append((rectangle, buffer, slice(end, end + rectangle.count)))
                end += rectangle.count
            self.indices.append(torch.cat([torch.arange(first, first + r.count) for _, first, r in entries]))
        for i, member in members.items():  # contents come in the order of the rectangles
            self.places[i].sort(key=lambda place: member.holding.rectangles.index(place[0]))
        self.buffers = self._empty()

    def _empty(self) -> list[Tensor]:
        sizes = [
            (len(index), *(stop - start for start, stop in box))
            for index, box in zip(self.indices, self.boxes, strict=True)
        ]
        return [self.like.new_empty(size) for size in sizes]

    @property
    def pieces(self) -> Pieces:
        """As norms are computed of it."""
        parts = []
        for index, (rows, cols), buffer in zip(self.indices, self.boxes, self.buffers, strict=True):
            members = None if self.exchange is None else index
            parts.append(Part(members, slice(*rows), slice(*cols), buffer))
        return Pieces(self.shape, tuple(parts), self.split, self.exchange, self.like)

    def parts(self, i: int) -> list[tuple[Rectangle, Tensor]]:
        """Layer ``i``'s rectangles and their entries (count, rows, cols), views."""
        return [(rectangle, self.buffers[buffer][place]) for rectangle, buffer, place in self.places[i]]

    def load(self) -> None:
        """Fill with the weights as they are now."""
        for i, member in self.members.items():
            if self.places[i]:
                for (_, part), now in zip(self.parts(i), member.contents(member.layer.weight()), strict=True):
                    part.copy_(now)

    def change(self, before: Callable[[int], Sequence[Tensor]], in_place: bool) -> Stack:
        """The weights as they are now less ``before``, layer by layer the entries of its rectangles."""
        changed = self._room(in_place)
        for i, member in self.members.items():
            if self.places[i]:
                now = member.contents(member.layer.weight())
                for (_, out), new, old in zip(changed.parts(i), now, before(i), strict=True):
                    torch.sub(new, old, out=out)
        return changed

    def now(self, in_place: bool) -> Stack:
        """The weights as they are now."""
        stack = self._room(in_place)
        stack.load()
        return stack

    def _room(self, in_place: bool) -> Stack:
        """This stack, or one like it with memory of its own."""
        if in_place:
            return self
        stack = object.__new__(Stack)
        vars(stack).update(vars(self))
        stack.buffers = self._empty()
        return stack

    def values(self, i: int) -> list[Tensor]:
        """Entries of layer ``i``'s rectangles."""
        return [part for _, part in self.parts(i)]


def stacks(members: dict[int, Member], exchange: Exchange | None) -> list[Stack]:
    """Layers grouped into stacks, in every process alike."""
    groups: dict[Kind, dict[int, Member]] = defaultdict(dict)
    for i, member in members.items():
        groups[member.kind][i] = member
    return [Stack(group, exchange) for group in groups.values()]


def host_copies(parts: Iterable[Tensor]) -> list[Tensor]:
    """Copies in host memory."""
    return [part.to("cpu", copy=True) for part in parts]
