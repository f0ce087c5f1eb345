"""The engine's state in plain types and CPU tensors, for checkpoints.

It comes in two parts. The small one (numbers, names) belongs in every checkpoint. The large one (the weights drift is
counted from, the batch ``feature_drift`` is measured on) changes at most once, and is to be written once.
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
from spectral_monitor.sharding import Rectangle
from spectral_monitor.state.dtensor import local_part
from spectral_monitor.state.serialize import host_copy

VERSION = 3
"""Of the format; another one is refused."""

MAX_NAMES = 6
"""Layers that a refusal names; of more it says how many."""

Revive = Callable[[dict[str, Any]], Replayable]
"""Makes a forward that can be run again of its plain form; an error if it does not fit the model."""


def layer_list(layers: Sequence[Layer]) -> list[list[Any]]:
    """Name and shape of every measured parameter: what two models must share for one to go on where the other was."""
    return [[layer.info.name, list(layer.info.shape)] for layer in layers]


def refusal(state: dict[str, Any], layers: Sequence[Layer]) -> str:
    """Return why a state does not fit this model; empty if it does."""
    if state.get("version") != VERSION:
        return f"the saved state has format {state.get('version')!r}, this version reads {VERSION}"
    was = {name: tuple(shape) for name, shape in state["layers"]}
    now = {name: tuple(shape) for name, shape in layer_list(layers)}
    differing = [
        f"{name} is {now[name]}, was {was[name]}"
        if name in now and name in was
        else f"{name} is {'new' if name in now else 'gone'}"
        for name in {**was, **now}
        if now.get(name) != was.get(name)
    ]
    if not differing:
        return ""
    more = [f"and {len(differing) - MAX_NAMES} more"] if len(differing) > MAX_NAMES else []
    return f"the saved state is of other layers: {', '.join(differing[:MAX_NAMES] + more)}"


Packed = list[Any]
"""A rectangle and what is in it: the first matrix, rows, columns, stretch (of FSDP1, else []), (count, rows, cols)."""


def pack_start(start: Start, members: Sequence[BatchMember]) -> dict[str, list[Packed]]:
    """Return the starting weights by layer name, as far as this process has them; they are shared, not copied."""
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
    """Return the starting weights by layer index, from whatever rectangles cover those that are measured here.

    Raises:
        ValueError: some entry is in none of them.
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


def _assembled(wanted: Rectangle, saved: Sequence[Packed], stretch: list[int]) -> Tensor | None:
    """Return the rectangle assembled from what was saved; ``None`` if that does not cover it.

    Stretches, which begin and end in the middle of rows, can only be what they were.
    """
    size = (wanted.count, wanted.rows[1] - wanted.rows[0], wanted.cols[1] - wanted.cols[0])
    made: Tensor | None = None
    covered = 0
    for index, rows, cols, was, part in saved:
        same = (index, tuple(rows), tuple(cols), tuple(part.shape)) == (wanted.index, wanted.rows, wanted.cols, size)
        if same and list(was) == stretch:
            return part  # type: ignore[no-any-return]
        if was or stretch:
            continue
        made = part.new_zeros(size) if made is None else made
        here = ((index, index + len(part)), rows, cols)
        there = ((wanted.index, wanted.index + wanted.count), wanted.rows, wanted.cols)
        common = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(here, there, strict=True)]
        if all(last > first for first, last in common):
            source, target = (
                tuple(slice(f - box[0], t - box[0]) for (f, t), box in zip(common, boxes, strict=True))
                for boxes in (here, there)
            )
            made[target] = part[source]
            covered += made[target].numel()
    return made if made is not None and covered == made.numel() else None


def pack_probe(probe: Probe | None, layers: Sequence[Layer]) -> dict[str, Any] | None:
    """Return the probe batch, and the layers' outputs on it; ``None`` if there is none, or it cannot be packed."""
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
    return {"again": probe.packed, "part": probe.part, "outputs": outputs, "device": _device(layers).type}


def unpack_probe(packed: dict[str, Any], layers: Sequence[Layer], revive: Revive) -> Probe:
    """Return the probe batch, to be run by the present model.

    Raises:
        Exception: the model has changed, or is on another kind of device, whose random numbers are others.
    """
    device = _device(layers)
    if packed["device"] != device.type:
        raise ValueError(f"it was taken on {packed['device']}, the model is on {device.type}")
    indices = {layer.info.name: i for i, layer in enumerate(layers)}
    outputs: Outputs = {
        indices[name]: [
            CallRows(None if index is None else index.to(device), h, None, count, pool, again)
            # Earlier versions did not save the last two.
            for index, h, again, count, pool in ((*call, call[2], call[2])[:5] for call in calls)
        ]
        for name, calls in packed["outputs"].items()
        if name in indices  # nodes may be others
    }
    return Probe(revive(packed["again"]), outputs, packed["part"], packed["again"])


def _device(layers: Sequence[Layer]) -> torch.device:
    return next((local_part(layer.sources[0]).device for layer in layers), torch.device("cpu"))
