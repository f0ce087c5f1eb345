"""The plan of who holds and who measures what: made once, the same in every process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from spectral_monitor.layers import Layer
from spectral_monitor.sharding.process_group import ProcessGroup
from spectral_monitor.sharding.rectangles import Rectangle, aligned, contents, rectangles, unfit
from spectral_monitor.sharding.shard_region import Range, ShardRegion, extent_of, whole_extent
from spectral_monitor.state.dtensor import is_distributed, local_part


@dataclass(frozen=True)
class Holding:
    """The work of this process for one layer."""

    extent: ShardRegion  # what it holds of the parameter
    # what it measures of the matrices: what it holds, or nothing if another process has the same
    rectangles: tuple[Rectangle, ...]
    # whether some matrix has rows (first) or columns (second) whose entries are in several processes
    split: tuple[bool, bool] = (False, False)
    # of the layer's output features, those it has (tensor parallel processes share them out)
    outputs: Range | None = None
    inputs: Range | None = None  # of the layer's input features, the same

    def rows(self, layer: Layer) -> Range | None:
        """Return the range of a matrix's outputs that this process holds whole; ``None`` for all, (0, 0) for none."""
        extent = self.extent
        if extent.whole:
            return None
        box = extent.box[::-1] if layer.layout.kind == "transposed" else extent.box
        sides = extent.shape[::-1] if layer.layout.kind == "transposed" else extent.shape
        if extent.stretch is not None or any(part != (0, side) for part, side in zip(box[1:], sides[1:], strict=True)):
            return 0, 0
        return box[0]

    def contents(self, layer: Layer, tensor: Tensor) -> list[Tensor]:
        """Return the entries (count, rows, cols) of each rectangle of a tensor that is sharded as the parameter is."""
        return contents(layer.layout, self.extent, local_part(tensor)) if self.rectangles else []


NOTHING = Holding(whole_extent(()), ())
"""The work for a layer without a weight."""


def copies(parameter: Tensor, flat: Mapping[int, ShardRegion], processes: ProcessGroup | None) -> int:
    """Return how many processes hold the same of a parameter."""
    return 1 if processes is None else processes.size // extents(parameter, flat).spread


def extents(parameter: Tensor, flat: Mapping[int, ShardRegion]) -> ShardRegion:
    """Return the region held of a parameter; ``flat`` has those that FSDP1 manages."""
    return flat.get(id(parameter)) or extent_of(parameter)


def plan(layers: Sequence[Layer], flat: Mapping[int, ShardRegion], processes: ProcessGroup | None) -> list[Holding]:
    """Return a holding for every layer.

    Of entries that several processes hold, the one with the least to do so far measures them.

    Raises:
        ValueError: the processes see different models, or hold parameters in a way that is not known; what is known.
    """
    if processes is None:
        return [_whole(layer) for layer in layers]
    mine = processes.all_or_none(lambda: [_extent(layer, flat) for layer in layers])
    table = processes.gather(
        [(layer.info.name, layer.info.role, layer.layout, e) for layer, e in zip(layers, mine, strict=True)]
    )
    _compare(table)
    loads = [0] * processes.size
    holdings: list[Holding | None] = [None] * len(layers)
    for i in sorted(range(len(layers)), key=lambda i: -math.prod(layers[i].info.shape)):
        held = [row[i][3] for row in table]
        holdings[i] = _holding(layers[i], held, loads, processes)
    return [holding for holding in holdings if holding is not None]


def _whole(layer: Layer) -> Holding:
    extent = whole_extent(layer.info.shape)
    return Holding(extent, tuple(rectangles(layer.layout, extent)))


def _extent(layer: Layer, flat: Mapping[int, ShardRegion]) -> ShardRegion:
    if layer.compute is not None:
        return whole_extent(layer.info.shape)  # anatomy refuses those whose parts are spread
    try:
        extent = extents(layer.sources[0], flat)
    except ValueError as error:
        raise ValueError(f"{layer.info.name}: {error}; leave it out with exclude=[...]") from None
    if reason := unfit(layer.layout, extent):
        raise ValueError(f"{layer.info.name} is {reason} ({extent.placement}); leave it out with exclude=[...]")
    return extent


def _compare(table: Sequence[Sequence[tuple[object, ...]]]) -> None:
    """Refuse models that differ.

    Raises:
        ValueError: naming the first difference.
    """
    for rank, rows in enumerate(table):
        ours, theirs = ([row[:3] for row in some] for some in (table[0], rows))
        if ours != theirs:
            a, b = next(
                ((a, b) for a, b in zip(ours, theirs, strict=False) if a != b),
                (f"{len(ours)} layers", f"{len(theirs)}"),
            )
            raise ValueError(f"the processes see different models: process 0 has {a}, process {rank} has {b}")


def _holding(layer: Layer, held: Sequence[ShardRegion], loads: list[int], processes: ProcessGroup) -> Holding:
    """Return the holding of one layer here, of what all processes hold of it."""
    holders: dict[object, list[int]] = {}
    for rank, extent in enumerate(held):
        if extent.count:
            holders.setdefault(extent.key, []).append(rank)
    total = sum(held[ranks[0]].count for ranks in holders.values())
    if total != math.prod(layer.info.shape):
        raise ValueError(f"the processes hold {total} different entries of {layer.info.name}, shape {layer.info.shape}")
    chosen = []
    for ranks in holders.values():
        rank = min(ranks, key=lambda rank: (loads[rank], rank))
        loads[rank] += held[rank].count
        chosen.append(rank)
    found = [r for rank in chosen for r in rectangles(layer.layout, held[rank])]
    stretched = any(extent.stretch is not None for extent in held) and len(chosen) > 1
    rows = stretched or any(r.rows[1] - r.rows[0] < _height(layer, r) for r in found)
    cols = stretched or any(r.cols != (0, layer.layout.fan_in) for r in found)
    mine = held[processes.rank]
    own = tuple(rectangles(layer.layout, mine)) if processes.rank in chosen else ()
    outputs, inputs = _features(layer, processes)
    return Holding(mine, own, (rows, cols), outputs, inputs)


def _height(layer: Layer, rectangle: Rectangle) -> int:
    fan_outs = layer.layout.fan_outs
    return max(fan_outs) if rectangle.count > 1 else fan_outs[rectangle.index % layer.layout.blocks]


def _features(layer: Layer, processes: ProcessGroup) -> tuple[Range | None, Range | None]:
    """Output and input features that are here where processes with the same batch share them out; ``None`` for all."""
    source = layer.sources[0]
    if not is_distributed(source) or layer.layout.kind not in ("linear", "transposed"):
        return None, None
    mesh = source.device_mesh  # type: ignore[attr-defined]
    dims = [_same_batch(mesh, dim, processes) for dim in range(mesh.ndim)]
    layout = layer.layout
    box = aligned(layout, extent_of(source, dims).box)
    sides = ((box[axis], layout.shape[axis]) for axis in layout.axes)
    outputs, inputs = (None if part == (0, size) else part for part, size in sides)
    return (inputs, None) if layer.info.role == "embedding" else (outputs, inputs)  # a table's rows are tokens


def _same_batch(mesh: object, dim: int, processes: ProcessGroup) -> bool:
    """Return whether the processes along a dimension of a mesh get the same batch."""
    ranks = mesh.mesh.movedim(dim, 0)  # type: ignore[attr-defined]
    batches = [[processes.batches[rank] for rank in line.flatten().tolist()] for line in ranks]
    return all(line == batches[0] for line in batches)


def placed(layer: Layer, holding: Holding, processes: ProcessGroup | None) -> Layer:
    """Return the layer with its layout over the processes."""
    if processes is None:
        return layer
    words = holding.extent.placement
    words = f"Replicate on {processes.size}" if words == "local" else words
    return replace(layer, info=replace(layer.info, placement=words))
