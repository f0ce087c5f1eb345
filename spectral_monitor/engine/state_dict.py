"""The engine's state in plain types and CPU tensors, for checkpoints.

It has two parts. The small one (numbers, names) belongs in every checkpoint. The large one (the weights that drift is
counted from, the batch that ``feature_drift`` is measured on) changes at most once, so it need be written only once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spectral_monitor.capture.replay.feature_change import CallRows, Outputs
from spectral_monitor.capture.replay.replay import Replayable
from spectral_monitor.engine.features.replays import Probe
from spectral_monitor.engine.weights.matrix_batches import BatchMember, Start
from spectral_monitor.layers import Layer
from spectral_monitor.sharding import Range, Rectangle
from spectral_monitor.state.dtensor import local_part
from spectral_monitor.state.serialize import host_copy

VERSION = 3
"""Version of the format; others are refused."""

MAX_NAMES = 6
"""Layers that a refusal names; it counts the others."""

Revive = Callable[[dict[str, Any]], Replayable]
"""Makes a forward that can be run again from its plain form; raises if it does not fit the model."""


def layer_list(layers: Sequence[Layer]) -> list[list[Any]]:
    """Return the name and shape of every layer; a state can be restored only where they are the same."""
    return [[layer.info.name, list(layer.info.shape)] for layer in layers]


def refusal(state: dict[str, Any], layers: Sequence[Layer]) -> str:
    """Return why a state does not fit this model; empty if it does."""
    if state.get("version") != VERSION:
        return f"the saved state has format {state.get('version')!r}, this version reads {VERSION}"
    saved = {name: tuple(shape) for name, shape in state["layers"]}
    current = {name: tuple(shape) for name, shape in layer_list(layers)}
    differing = [
        f"{name} is {current[name]}, was {saved[name]}"
        if name in current and name in saved
        else f"{name} is {'new' if name in current else 'gone'}"
        for name in {**saved, **current}
        if current.get(name) != saved.get(name)
    ]
    if not differing:
        return ""
    rest = [f"and {len(differing) - MAX_NAMES} more"] if len(differing) > MAX_NAMES else []
    return f"the saved state belongs to other layers: {', '.join(differing[:MAX_NAMES] + rest)}"


Packed = list[Any]
"""A rectangle: the first matrix, rows, columns, stretch (of FSDP1, else []), and its entries (count, rows, cols)."""


def pack_start(start: Start, members: Sequence[BatchMember]) -> dict[str, list[Packed]]:
    """Return this process's starting weights by layer name; the tensors are shared, not copied."""
    packed = {}
    for i, parts in start.items():
        holding = members[i].holding
        stretch = list(holding.extent.stretch or ())
        packed[members[i].layer.info.name] = [
            [r.index, list(r.rows), list(r.cols), stretch, part]
            for r, part in zip(holding.rectangles, parts, strict=True)
        ]
    return packed


def unpack_start(packed: dict[str, list[Packed]], members: Sequence[BatchMember]) -> dict[int, list[Tensor]]:
    """Return this process's starting weights by layer index, assembled from the saved rectangles.

    Raises:
        ValueError: the saved rectangles do not cover them.
    """
    start = {}
    for i, member in enumerate(members):
        info, saved = member.layer.info, packed.get(member.layer.info.name, [])
        parts = []
        for rectangle in member.holding.rectangles:
            part = _assembled(rectangle, saved, list(member.holding.extent.stretch or ()))
            if part is None:
                raise ValueError(f"no starting weights of {info.name}, shape {info.shape}, or not all of them")
            parts.append(part)
        start[i] = parts
    return start


def _assembled(rectangle: Rectangle, saved: Sequence[Packed], stretch: list[int]) -> Tensor | None:
    """Return a rectangle assembled from the saved ones; ``None`` if they do not cover it.

    Stretches, which begin and end in the middle of rows, are only returned as they were saved.
    """
    box = ((rectangle.index, rectangle.index + rectangle.count), rectangle.rows, rectangle.cols)
    assembled: Tensor | None = None
    covered = 0
    for index, rows, cols, saved_stretch, part in saved:
        saved_box = ((index, index + len(part)), tuple(rows), tuple(cols))
        if saved_box == box and list(saved_stretch) == stretch:
            return part  # type: ignore[no-any-return]
        if saved_stretch or stretch:
            continue
        assembled = part.new_zeros([last - first for first, last in box]) if assembled is None else assembled
        common = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(saved_box, box, strict=True)]
        if all(last > first for first, last in common):
            target = assembled[_within(box, common)]
            target.copy_(part[_within(saved_box, common)])
            covered += target.numel()
    return assembled if assembled is not None and covered == assembled.numel() else None


def _within(box: Sequence[Range], common: Sequence[Range]) -> tuple[slice, ...]:
    """Return the indices of a part of a box in a tensor of its entries."""
    return tuple(slice(first - start, last - start) for (first, last), (start, _) in zip(common, box, strict=True))


def pack_probe(probe: Probe | None, layers: Sequence[Layer]) -> dict[str, Any] | None:
    """Return the probe batch and the layers' outputs on it; ``None`` if there is none, or it cannot be packed."""
    if probe is None or probe.packed is None:
        return None
    outputs = {
        layers[i].info.name: [
            [
                None if call.index is None else host_copy(call.index, "rows"),
                call.h,
                call.rerun_count,
                call.count,
                call.pool,
            ]
            for call in calls
        ]
        for i, calls in probe.outputs.items()
    }
    return {"again": probe.packed, "part": probe.is_subset, "outputs": outputs, "device": _device(layers).type}


def unpack_probe(packed: dict[str, Any], layers: Sequence[Layer], revive: Revive) -> Probe:
    """Return the probe batch, to be run by the current model.

    Raises:
        Exception: the model has changed, or is on another kind of device, whose random numbers differ.
    """
    device = _device(layers)
    if packed["device"] != device.type:
        raise ValueError(f"it was saved on {packed['device']}, but the model is on {device.type}")
    indices = {layer.info.name: i for i, layer in enumerate(layers)}
    outputs: Outputs = {
        indices[name]: [
            CallRows(None if index is None else index.to(device), h, None, count, pool, replayed)
            # Earlier versions did not save the last two.
            for index, h, replayed, count, pool in ((*call, call[2], call[2])[:5] for call in calls)
        ]
        for name, calls in packed["outputs"].items()
        if name in indices  # nodes may differ
    }
    return Probe(revive(packed["again"]), outputs, packed["part"], packed["again"])


def _device(layers: Sequence[Layer]) -> torch.device:
    return next((local_part(layer.sources[0]).device for layer in layers), torch.device("cpu"))
