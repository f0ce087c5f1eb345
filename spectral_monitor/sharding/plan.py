"""The plan of which process holds and which measures what: made once, the same in every process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from spectral_monitor.layers import Layer
from spectral_monitor.sharding.process_group import ProcessGroup
from spectral_monitor.sharding.rectangles import Rectangle, aligned, contents, rectangles, unfit
from spectral_monitor.sharding.shard_region import Range, ShardRegion, extent_of, whole_extent
from spectral_monitor.state.dtensor import is_distributed, local_tensor


@dataclass(frozen=True)
class Holding:
    """The work of this process for one layer."""

    extent: ShardRegion  # what it holds of the parameter
    rectangles: tuple[Rectangle, ...]  # what it measures: all that it holds, or nothing if another process does
    # whether the rows (first) or the columns (second) of some matrix are split over processes
    split: tuple[bool, bool] = (False, False)
    # the ranges of the layer's output and input features that it has; ``None`` unless tensor parallelism splits them
    outputs: Range | None = None
    inputs: Range | None = None

    def rows(self, layer: Layer) -> Range | None:
        """Return the range of outputs whose rows this process holds in full; ``None`` for all, (0, 0) for none."""
        extent = self.extent
        if extent.whole:
            return None
        order = -1 if layer.layout.kind == "transposed" else 1
        outputs, *others = extent.box[::order]
        sizes = extent.shape[::order][1:]
        if extent.stretch is not None or any(part != (0, size) for part, size in zip(others, sizes, strict=True)):
            return 0, 0
        return outputs

    def contents(self, layer: Layer, tensor: Tensor) -> list[Tensor]:
        """Return the entries (count, rows, cols) of each rectangle of a tensor that is sharded like the parameter."""
        return contents(layer.layout, self.extent, local_tensor(tensor)) if self.rectangles else []


NOTHING = Holding(whole_extent(()), ())
"""The work for a layer without a weight."""


def copies(parameter: Tensor, flat: Mapping[int, ShardRegion], processes: ProcessGroup | None) -> int:
    """Return the number of processes that hold the same part of a parameter."""
    return 1 if processes is None else processes.size // _held_region(parameter, flat).spread


def _held_region(parameter: Tensor, flat: Mapping[int, ShardRegion]) -> ShardRegion:
    """Return the region of a parameter that this process holds; ``flat`` has those that FSDP1 manages."""
    return flat.get(id(parameter)) or extent_of(parameter)


def plan(layers: Sequence[Layer], flat: Mapping[int, ShardRegion], processes: ProcessGroup | None) -> list[Holding]:
    """Return a holding for every layer.

    Entries that several processes hold are measured by the one with the least work so far.

    Raises:
        ValueError: the processes see different models, or hold parameters in an unknown way.
    """
    if processes is None:
        extents = [(layer, whole_extent(layer.info.shape)) for layer in layers]
        return [Holding(extent, tuple(rectangles(layer.layout, extent))) for layer, extent in extents]
    local = processes.all_or_none(lambda: [_extent(layer, flat) for layer in layers])
    table = processes.gather(
        [(layer.info.name, layer.info.role, layer.layout, e) for layer, e in zip(layers, local, strict=True)]
    )
    _compare(table)
    loads = [0] * processes.size
    holdings: list[Holding | None] = [None] * len(layers)
    for i in sorted(range(len(layers)), key=lambda i: -math.prod(layers[i].info.shape)):
        holdings[i] = _holding(layers[i], [row[i][3] for row in table], loads, processes)
    return [holding for holding in holdings if holding is not None]


def _extent(layer: Layer, flat: Mapping[int, ShardRegion]) -> ShardRegion:
    if layer.compute is not None:
        return whole_extent(layer.info.shape)  # ``dissect`` refuses those whose parts are spread
    try:
        extent = _held_region(layer.sources[0], flat)
    except ValueError as error:
        raise ValueError(f"{layer.info.name}: {error}; leave it out with exclude=[...]") from None
    if reason := unfit(layer.layout, extent):
        raise ValueError(f"{layer.info.name} is {reason} ({extent.placement}); leave it out with exclude=[...]")
    return extent


def _compare(table: Sequence[Sequence[tuple[object, ...]]]) -> None:
    """Raise ValueError if models differ, naming the first difference."""
    for rank, rows in enumerate(table):
        expected, actual = ([row[:3] for row in part] for part in (table[0], rows))
        if expected != actual:
            a, b = next(
                ((a, b) for a, b in zip(expected, actual, strict=False) if a != b),
                (f"{len(expected)} layers", f"{len(actual)}"),
            )
            raise ValueError(f"the processes see different models: process 0 has {a}, process {rank} has {b}")


def _holding(layer: Layer, extents: Sequence[ShardRegion], loads: list[int], processes: ProcessGroup) -> Holding:
    """Return this process's holding of one layer, given the extents of all processes."""
    holders: dict[object, list[int]] = {}
    for rank, extent in enumerate(extents):
        if extent.count:
            holders.setdefault(extent.key, []).append(rank)
    total = sum(extents[ranks[0]].count for ranks in holders.values())
    if total != math.prod(layer.info.shape):
        raise ValueError(f"the processes hold {total} different entries of {layer.info.name}, shape {layer.info.shape}")
    chosen = []
    for ranks in holders.values():
        rank = min(ranks, key=lambda rank: (loads[rank], rank))
        loads[rank] += extents[rank].count
        chosen.append(rank)
    measured = [r for rank in chosen for r in rectangles(layer.layout, extents[rank])]
    stretched = any(extent.stretch is not None for extent in extents) and len(chosen) > 1
    rows = stretched or any(r.rows[1] - r.rows[0] < _height(layer, r) for r in measured)
    cols = stretched or any(r.cols != (0, layer.layout.fan_in) for r in measured)
    extent = extents[processes.rank]
    local = tuple(rectangles(layer.layout, extent)) if processes.rank in chosen else ()
    return Holding(extent, local, (rows, cols), *_features(layer, processes))


def _height(layer: Layer, rectangle: Rectangle) -> int:
    fan_outs = layer.layout.fan_outs
    return max(fan_outs) if rectangle.count > 1 else fan_outs[rectangle.index % layer.layout.blocks]


def _features(layer: Layer, processes: ProcessGroup) -> tuple[Range | None, Range | None]:
    """Return the ranges of output and input features of this process.

    ``None`` stands for all: only processes with the same batch split features.
    """
    source, layout = layer.sources[0], layer.layout
    if not is_distributed(source) or layout.kind not in ("linear", "transposed"):
        return None, None
    mesh = source.device_mesh  # type: ignore[attr-defined]
    dims = [_same_batch(mesh, dim, processes) for dim in range(mesh.ndim)]
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
    """Return the layer with a note of its placement on the processes."""
    if processes is None:
        return layer
    placement = holding.extent.placement
    placement = f"Replicate on {processes.size}" if placement == "local" else placement
    return replace(layer, info=replace(layer.info, placement=placement))
