"""Feature quantities of one measured step: from recorded rows to scalars on the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from spectral_monitor.capture.comparison import Outputs, Replay
from spectral_monitor.capture.features import Call, joined
from spectral_monitor.capture.rows import RowPicker, sample_size
from spectral_monitor.engine.scalars import Scalars
from spectral_monitor.engine.settings import Settings
from spectral_monitor.functional.features import mean_ratio
from spectral_monitor.linalg import spectral_estimate

Calls = Mapping[int, Sequence[Call]]

STACK_ENTRIES = 1 << 22
"""Row matrices of one shape are measured together up to this many entries, to stay in the cache."""


def inputs(calls: Sequence[Call]) -> list[Tensor | None]:
    """A layer's inputs, call by call; ``None`` where they are not at hand."""
    return [call.h_in.get() if call.h_in is not None else None for call in calls]


def gradients(calls: Sequence[Call]) -> list[Tensor | None]:
    """Gradients of a layer's outputs, call by call; ``None`` where they did not arrive exactly once."""
    return [call.gradient() for call in calls]


def input_rows(calls: Sequence[Call]) -> Tensor | None:
    """A layer's inputs over all its calls, in the dtype they are measured in."""
    return joined(inputs(calls))


@torch.no_grad()
def measure_forward(calls: Calls, outputs: Outputs, settings: Settings, out: Scalars) -> None:
    """Sizes and stable ranks of what the real forward and backward passes showed."""
    rows: dict[tuple[int, str], Tensor] = {}
    for i, recorded in calls.items():
        h, h_in, b = joined([h for _, h, _ in outputs.get(i, ())]), input_rows(recorded), joined(gradients(recorded))
        if h is not None:
            _put_norm(i, "h", h, out)
            out.put(i, "h.rows", torch.tensor(float(len(h))))
        if b is not None:
            _put_norm(i, "b", b, out)
        if h_in is not None and "input_stable_rank" in settings.keys:
            rows[(i, "h_in")] = h_in
        if b is not None and "backward_stable_rank" in settings.keys:
            rows[(i, "b")] = b
    _spectra(rows, settings, out)


def _put_norm(i: int, name: str, rows: Tensor, out: Scalars) -> None:
    """Norm and number of the entries."""
    out.put(i, f"{name}.norm", torch.linalg.vector_norm(torch.linalg.vector_norm(rows, dim=1)))
    out.put(i, f"{name}.size", torch.tensor(float(rows.numel())))


def _spectra(rows: Mapping[tuple[int, str], Tensor], settings: Settings, out: Scalars) -> None:
    """Spectral and Frobenius norms of matrices of rows, those of one shape together; a fixed choice of the rows."""
    picker = RowPicker(settings.max_rows)
    groups: dict[tuple[object, ...], list[tuple[int, str]]] = defaultdict(list)
    for key, matrix in rows.items():
        if matrix.numel():
            groups[(matrix.shape, matrix.dtype, matrix.device)].append(key)
    for keys in groups.values():
        one = rows[keys[0]]
        index = picker.choose(len(one), sample_size(one.shape[1]), one.device)
        count = len(one) if index is None else len(index)
        together = min(len(keys), max(1, STACK_ENTRIES // (count * one.shape[1])))
        stack = one.new_empty(together, count, one.shape[1])
        for start in range(0, len(keys), together):
            some = keys[start : start + together]
            for key, place in zip(some, stack, strict=False):
                if index is None:
                    place.copy_(rows[key])
                else:
                    torch.index_select(rows[key], 0, index, out=place)
            estimate = spectral_estimate(stack[: len(some)], tol=settings.tol)
            for k, (i, name) in enumerate(some):
                out.put(i, f"{name}.sigma", estimate.sigma[k])
                out.put(i, f"{name}.fro", estimate.fro[k])


@torch.no_grad()
def measure_change(replay: Replay, out: Scalars) -> set[int]:
    """What the step did to the features; the layers for which it could be seen."""
    seen: set[int] = set()
    for i in replay.layers():
        change = replay.change(i)
        if change is None or not change.size:
            continue
        seen.add(i)
        out.put(i, "feature_change", mean_ratio(change.lengths, change.before))
        out.put(i, "dh.norm", torch.linalg.vector_norm(change.lengths))
        out.put(i, "dh.size", torch.tensor(float(change.size)))
        if change.inner is not None:
            out.put(i, "b.dh", change.inner)
    return seen


@torch.no_grad()
def measure_drift(replay: Replay, out: Scalars) -> None:
    """Change of the features of the probe batch since they were first seen."""
    for i in replay.layers():
        change = replay.change(i)
        if change is not None and change.size:
            out.put(i, "feature_drift", mean_ratio(change.lengths, change.before))
