"""The region of a parameter that one process holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from spectral_monitor.state.dtensor import is_distributed

Range = tuple[int, int]
"""From the first up to, but not including, the last."""


@dataclass(frozen=True)
class ShardRegion:
    """A box in a parameter, or a stretch of its entries in row-major order, that a process holds."""

    shape: tuple[int, ...]  # of the whole parameter
    box: tuple[Range, ...]  # a range of each dimension
    stretch: Range | None = None  # a range of entries that counts instead of the box
    placement: str = "local"  # in words
    spread: int = 1  # number of processes that the parameter is split over

    @cached_property
    def count(self) -> int:
        """Number of entries."""
        return math.prod(stop - start for start, stop in (self.box if self.stretch is None else (self.stretch,)))

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal where two processes hold the same entries."""
        return self.box, self.stretch

    @cached_property
    def whole(self) -> bool:
        """True if every entry is held."""
        return self.count == math.prod(self.shape)


def whole_extent(shape: Sequence[int]) -> ShardRegion:
    """Return the region of a whole parameter."""
    return ShardRegion(tuple(shape), tuple((0, size) for size in shape))


def extent_of(tensor: Tensor, dims: Sequence[bool] | None = None) -> ShardRegion:
    """Return the local region of a tensor, or of a DTensor's global one.

    ``dims``: whether each dimension of its device mesh counts; by default all do.

    Raises:
        ValueError: the DTensor has an unknown placement, such as ``Partial``.
    """
    shape = tuple(tensor.shape)
    if not is_distributed(tensor):
        return whole_extent(shape)
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    placement = _words(mesh, placements)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"this process is not in the mesh it is placed on ({placement})")
    box = [(0, size) for size in shape]
    # Where a dimension is split twice, tensor parallelism (further right in the mesh) comes first, then FSDP.
    order = sorted(range(len(placements)), key=lambda i: (type(placements[i]).__name__ == "_StridedShard", i))
    for i in order:
        if placements[i].is_replicate() or (dims is not None and not dims[i]):
            continue
        dim = getattr(placements[i], "dim", None)
        if not isinstance(dim, int) or placements[i].is_partial():
            raise ValueError(f"placed as {placement}; supported are Replicate and Shard")
        start, stop = box[dim]
        size = -(-(stop - start) // mesh.size(i))
        first = min(start + coordinate[i] * size, stop)
        box[dim] = (first, min(first + size, stop))
    spread = math.prod(mesh.size(i) for i in order if not placements[i].is_replicate())
    region = ShardRegion(shape, tuple(box), None, placement, spread)
    if dims is None and tensor._local_tensor.numel() != region.count:  # type: ignore[attr-defined]
        raise ValueError(f"placed as {placement}, but {tuple(tensor._local_tensor.shape)} of {shape} are here")  # type: ignore[attr-defined]
    return region


def _words(mesh: Any, placements: Sequence[Any]) -> str:
    """Return placements in words, such as ``Shard(0) on 4``, for the role table."""
    words = [
        "Replicate" if p.is_replicate() else f"Shard({p.dim})" if hasattr(p, "dim") else str(p) for p in placements
    ]
    return f"{', '.join(words)} on {' x '.join(map(str, mesh.shape))}"
