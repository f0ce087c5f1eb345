"""Rectangles of a layer's matrices that a shard of its parameter holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spectral_monitor.layers.layout import Layout
from spectral_monitor.sharding.shard_region import Range, ShardRegion


@dataclass(frozen=True)
class Rectangle:
    """The same part of ``count`` consecutive matrices."""

    index: int  # of the first matrix: tap * blocks + block
    rows: Range  # of the matrix, fan_out
    cols: Range  # of the matrix, fan_in
    count: int = 1


def unfit(layout: Layout, extent: ShardRegion) -> str:
    """Return why an extent does not consist of rectangles; empty if it does."""
    if extent.whole or not extent.count:
        return ""
    if layout.kind == "conv_transposed" and layout.groups > 1:
        return "a grouped transposed convolution that is sharded over processes"
    box = aligned(layout, _filled_box(extent))
    has_kernel = layout.kind.startswith("conv") or layout.kind == "patches"
    inner = box[2:] if has_kernel else box[1:] if layout.kind == "vector" else ()
    sizes = layout.shape[len(layout.shape) - len(inner) :]
    if any(part != (0, size) for part, size in zip(inner, sizes, strict=True)):
        return "sharded over processes along a dimension of the kernel" if layout.kind != "vector" else "sharded twice"
    return ""


def rectangles(layout: Layout, extent: ShardRegion) -> list[Rectangle]:
    """Return the rectangles of the layer's matrices that an extent holds, in a fixed order."""
    if extent.whole:
        return [Rectangle(0, (0, layout.fan_out), (0, layout.fan_in), layout.taps * layout.blocks)]
    if not extent.count:
        return []
    return [rectangle for rectangle, *_ in _cuts(layout, aligned(layout, _filled_box(extent)))]


def contents(layout: Layout, extent: ShardRegion, local: Tensor) -> list[Tensor]:
    """Return the entries (count, rows, cols) of each of :func:`rectangles`, as views where possible.

    Where blocks of a whole parameter differ in size, the smaller ones are padded with rows of zeros.
    """
    if extent.whole:
        return [layout.stack(local).flatten(0, 1)]
    if not extent.count:
        return []
    box = _filled_box(extent)
    if extent.stretch is not None:
        slab = math.prod(extent.shape[1:])
        skipped = extent.stretch[0] - box[0][0] * slab
        filled = local.new_zeros((box[0][1] - box[0][0]) * slab)
        filled[skipped : skipped + local.numel()] = local.reshape(-1)
        local = filled
    box = aligned(layout, box)
    canonical = layout.canonical(local.reshape([stop - start for start, stop in box]))
    parts = []
    for _, tap, group, segments in _cuts(layout, box):
        rows = [canonical[tap, group, start:stop] for start, stop in segments]
        parts.append((rows[0] if len(rows) == 1 else torch.cat(rows)).unsqueeze(0))
    return parts


def _filled_box(extent: ShardRegion) -> tuple[Range, ...]:
    """Return the box; of a stretch, the slices along the first dimension that it reaches into."""
    if extent.stretch is None:
        return extent.box
    slab = math.prod(extent.shape[1:])
    first, last = extent.stretch[0] // slab, -(-extent.stretch[1] // slab)
    return ((first, last), *((0, size) for size in extent.shape[1:]))


def aligned(layout: Layout, box: tuple[Range, ...]) -> tuple[Range, ...]:
    """Return a box without the leading dimensions of 1 that the layout leaves out."""
    return box[len(box) - len(layout.shape) :]


def _cuts(layout: Layout, box: tuple[Range, ...]) -> Iterator[tuple[Rectangle, int, int, list[Range]]]:
    """Yield every rectangle in the box, its tap and group in the canonical tensor, and its ranges of outputs."""
    kind, shape = layout.kind, layout.shape
    groups: Range = box[0] if kind.startswith("experts") else (0, 1)
    if kind == "vector":
        trailing, inputs = math.prod(shape[1:]), (0, 1)
        outputs = (box[0][0] * trailing, box[0][1] * trailing) if shape else (0, 1)
    else:
        outputs, inputs = (box[axis] for axis in layout.axes)
    if kind == "patches":
        taps = math.prod(shape[2:])
        inputs = inputs[0] * taps, inputs[1] * taps
    per_group = layout.blocks // layout.outer_groups
    sizes = layout.sizes or (layout.fan_out // layout.repeats,) * per_group
    for tap in range(layout.taps):
        for group in range(*groups):
            offset = 0
            for block, size in enumerate(sizes):
                rows, segments = _held_rows(outputs, offset, size, sum(sizes), layout.repeats)
                offset += size
                if segments and inputs[1] > inputs[0]:
                    index = tap * layout.blocks + group * per_group + block
                    yield Rectangle(index, rows, inputs), tap, group - groups[0], segments


def _held_rows(outputs: Range, offset: int, size: int, turn: int, repeats: int) -> tuple[Range, list[Range]]:
    """Return the rows of a block that are held, and their ranges among the held ``outputs``.

    A block has ``size`` outputs in each of ``repeats`` turns, from ``offset``.
    """
    pieces: list[tuple[int, int, int]] = []  # first row, and the range among the held outputs
    for k in range(outputs[0] // turn, min(repeats, -(-outputs[1] // turn))):
        start = k * turn + offset
        first, last = max(start, outputs[0]), min(start + size, outputs[1])
        if last > first:
            pieces.append((k * size + first - start, first - outputs[0], last - outputs[0]))
    if not pieces:
        return (0, 0), []
    rows = (pieces[0][0], pieces[0][0] + sum(last - first for _, first, last in pieces))
    return rows, [(first, last) for _, first, last in pieces]
