"""Sample independence: do samples that are run by themselves give what they give among the others?"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spectral_monitor.capture.replay.batch_slicing import BatchSlice
from spectral_monitor.capture.row_sampling import rows_of
from spectral_monitor.layers import Layer
from spectral_monitor.linalg import compute_dtype
from spectral_monitor.state.dtensor import local_part

ROUNDINGS = 64
"""Roundings by which outputs may differ that were computed with more, or fewer, rows at a time."""


def _rows(x: Tensor | None, layer: Layer) -> Tensor | None:
    if x is None or not x.is_floating_point():
        return None
    channels_first, spatial = layer.features_of(x)
    return None if x.ndim <= (spatial if channels_first else 0) else rows_of(local_part(x), channels_first, spatial)


class SeparateRun:
    """Copies of the rows that go into, and come out of, the calls of layers in a forward of a few samples."""

    def __init__(self) -> None:
        self.calls: dict[int, list[tuple[Tensor | None, Tensor | None]]] = {}

    def add(self, i: int, given: Tensor | None, out: Tensor, layer: Layer) -> None:
        """Record one more call of layer ``i``."""
        found = (_rows(x, layer) for x in (given, out))
        x, h = (None if rows is None else rows.clone() for rows in found)
        self.calls.setdefault(i, []).append((x, h))


class IndependenceCheck:
    """Compares a forward of the whole batch with those of its first and of its last samples, at the same weights.

    The last ones are there because the first may be right by chance: a sequence begins alike, however long it is.
    Inputs are compared because a weight of zero hides them.

    Attributes:
        common: calls, as (layer index, number of the call), whose outputs have no entry for each sample.
        noise: layer index -> how far its outputs are off, relative to their norm; of :meth:`verdict`.
    """

    def __init__(self, first: SeparateRun, last: SeparateRun, portion: BatchSlice, wrong: str = "") -> None:
        """``portion``: which the first samples are; ``wrong``: why it is known already that they must not."""
        self.common: set[tuple[int, int]] = set()
        self.noise: dict[int, float] = {}
        self._alone = (first, last)
        self._portion = portion
        self._count: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._found: list[tuple[int, bool, float, Tensor]] = []
        self._wrong = wrong

    @torch.no_grad()
    def add(self, i: int, given: Tensor | None, out: Tensor, layer: Layer) -> None:
        """Record one more call of layer ``i`` in the whole forward."""
        n, self._names[i] = self._count.get(i, 0), layer.info.name
        self._count[i] = n + 1
        alone = [part.calls.get(i, []) for part in self._alone]
        if any(len(calls) <= n for calls in alone):
            return
        for which, x in enumerate((given, out)):
            parts = [calls[n][which] for calls in alone]
            rows = _rows(x, layer)
            if rows is not None and not self._compare((i, n), which == 1, rows, parts):
                self._wrong = self._wrong or f"the number of rows of {layer.info.name!r} does not go by samples"

    def _compare(self, call: tuple[int, int], is_output: bool, rows: Tensor, parts: list[Tensor | None]) -> bool:
        """Remember how far the parts are from the ends of all rows, or from all; whether they have as many."""
        first, last = parts
        if first is None or last is None or len(first) != len(last) or first.shape[1] != rows.shape[1]:
            return False
        count = self._portion.rows((-1, -1), len(rows))
        if len(first) == count:
            pairs = [(rows[:count], first), (rows[len(rows) - count :], last)]
        elif len(first) == len(rows):
            pairs = [(rows, first), (rows, last)]
            if is_output:
                self.common.add(call)
        else:
            return False
        dtype = compute_dtype(rows.dtype)
        allowed = max(torch.finfo(rows.dtype).eps, ROUNDINGS * torch.finfo(dtype).eps)
        for whole, part in pairs:
            whole, part = whole.to(dtype), part.to(dtype)
            norms = torch.stack([torch.linalg.vector_norm(part - whole), torch.linalg.vector_norm(whole)])
            self._found.append((call[0], is_output, allowed, norms))
        return True

    def verdict(self) -> str | None:
        """Return why samples must not be run by themselves; empty if they may, ``None`` if this batch cannot tell."""
        if self._wrong:
            return self._wrong
        for part in self._alone:
            if {i: len(calls) for i, calls in part.calls.items()} != self._count:
                return "without the other samples, layers are called differently"
        every = {(i, n) for i, count in self._count.items() for n in range(count)}
        if every <= self.common or not self._found:
            return "the forward does no less for fewer samples"
        device = self._found[0][3].device
        off = torch.stack([norms.to(device, torch.float64) for *_, norms in self._found]).tolist()
        if not all(math.isfinite(norm) for _, norm in off):
            return None
        for (i, is_output, allowed, _), (difference, norm) in zip(self._found, off, strict=True):
            if not difference <= allowed * norm:
                what = "outputs" if is_output else "inputs"
                return f"the {what} of {self._names[i]!r} for some samples depend on the others"
            if is_output and norm > 0:
                self.noise[i] = max(self.noise.get(i, 0.0), difference / norm)
        return ""
