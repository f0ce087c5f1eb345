"""Sample independence: whether some samples give the same features without the others.

There are two checks. One compares with a forward of the full batch. A forward with random numbers (dropout, for
example) draws other ones for fewer samples; then the other check exchanges the samples that are not compared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from spectral_monitor.capture.replay.batch_slicing import BatchSlice
from spectral_monitor.capture.row_sampling import rows_of
from spectral_monitor.layers import Layer
from spectral_monitor.linalg import compute_dtype
from spectral_monitor.state.dtensor import local_part

ROUNDINGS = 64
"""Roundings by which outputs may differ that were computed with another number of rows at a time."""

NOT_BY_SAMPLES = "the number of rows of {!r} is not proportional to the number of samples"
CALLED_DIFFERENTLY = "without the other samples, other layers are called"
NO_LESS = "the forward computes just as much for fewer samples"


def _rows(x: Tensor | None, layer: Layer) -> Tensor | None:
    if x is None or not x.is_floating_point():
        return None
    channels_first, spatial = layer.features_of(x)
    return None if x.ndim <= (spatial if channels_first else 0) else rows_of(local_part(x), channels_first, spatial)


class SeparateRun:
    """Copies of the inputs and outputs of layers, as rows, in a forward of some samples."""

    def __init__(self) -> None:
        self.calls: dict[int, list[tuple[Tensor | None, Tensor | None]]] = {}
        self.names: dict[int, str] = {}

    def add(self, i: int, x: Tensor | None, out: Tensor, layer: Layer) -> None:
        """Record one more call of layer ``i``."""
        inputs, outputs = (None if (rows := _rows(t, layer)) is None else rows.clone() for t in (x, out))
        self.names[i] = layer.info.name
        self.calls.setdefault(i, []).append((inputs, outputs))

    @property
    def numbers(self) -> set[tuple[int, int]]:
        """The calls, as (layer index, number of the call)."""
        return {(i, n) for i, calls in self.calls.items() for n in range(len(calls))}


class SampleCheck:
    """Base of the two checks: runs of some samples, and differences of their rows from the expected ones.

    Attributes:
        common: calls, as (layer index, number of the call), whose outputs have no entry for each sample.
        noise: layer index -> difference of its outputs relative to their norm; known after :meth:`verdict`.
    """

    def __init__(self, runs: Sequence[SeparateRun], portion: BatchSlice, wrong: str) -> None:
        """``portion``: the first samples; ``wrong``: a reason, known already, why they must not run by themselves."""
        self.common: set[tuple[int, int]] = set()
        self.noise: dict[int, float] = {}
        self._runs, self._portion, self._wrong = runs, portion, wrong
        self._calls: set[tuple[int, int]] = set()  # of the full forward
        # Layer, whether these are its outputs, allowed relative difference, norms of the difference and of the rows.
        self._differences: list[tuple[int, bool, float, Tensor]] = []

    def _record(self, i: int, is_output: bool, expected: Tensor, rows: Tensor) -> None:
        """Record the difference of rows of a layer's inputs or outputs from the expected ones."""
        dtype = compute_dtype(expected.dtype)
        allowed = max(torch.finfo(expected.dtype).eps, ROUNDINGS * torch.finfo(dtype).eps)
        expected, rows = expected.to(dtype), rows.to(dtype)
        norms = torch.stack([torch.linalg.vector_norm(rows - expected), torch.linalg.vector_norm(expected)])
        self._differences.append((i, is_output, allowed, norms))

    def _same_calls(self) -> bool:
        """Return whether every run makes the same calls of layers as the full forward."""
        return all(run.numbers == self._calls for run in self._runs)

    def verdict(self) -> str | None:
        """Return why samples must not run by themselves; empty if they may, ``None`` if this batch cannot tell."""
        if self._wrong:
            return self._wrong
        if not self._same_calls():
            return CALLED_DIFFERENTLY
        if self._calls <= self.common or not self._differences:
            return NO_LESS
        device = self._differences[0][3].device
        all_norms = torch.stack([norms.to(device, torch.float64) for *_, norms in self._differences]).tolist()
        if not all(math.isfinite(norm) for _, norm in all_norms):
            return None
        for (i, is_output, allowed, _), (difference, norm) in zip(self._differences, all_norms, strict=True):
            if not difference <= allowed * norm:
                kind = "outputs" if is_output else "inputs"
                return f"the {kind} of {self._runs[0].names[i]!r} for some samples depend on the others"
            if is_output and norm > 0:
                self.noise[i] = max(self.noise.get(i, 0.0), difference / norm)
        return ""


class IndependenceCheck(SampleCheck):
    """Compares a forward of the full batch with forwards of its first and of its last samples, at the same weights.

    The last samples are compared because the first may agree by chance: sequences of any length begin in the same way.
    Inputs are compared because a weight of zero hides them.
    """

    def __init__(self, first: SeparateRun, last: SeparateRun, portion: BatchSlice, wrong: str = "") -> None:
        super().__init__((first, last), portion, wrong)
        self._count: Counter[int] = Counter()

    @torch.no_grad()
    def add(self, i: int, x: Tensor | None, out: Tensor, layer: Layer) -> None:
        """Compare one more call of layer ``i`` in the full forward."""
        n = self._count[i]
        self._count[i] += 1
        self._calls.add((i, n))
        separate = [run.calls.get(i, []) for run in self._runs]
        if any(len(calls) <= n for calls in separate):
            return
        for is_output, features in ((False, x), (True, out)):
            rows, (first, last) = _rows(features, layer), [calls[n][is_output] for calls in separate]
            if rows is not None and not self._compare((i, n), is_output, rows, first, last):
                self._wrong = self._wrong or NOT_BY_SAMPLES.format(layer.info.name)

    def _compare(
        self, call: tuple[int, int], is_output: bool, rows: Tensor, first: Tensor | None, last: Tensor | None
    ) -> bool:
        """Record differences of the first and the last rows, or of all if samples share them; return whether the number
        of rows fits.
        """
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
        for expected, part in pairs:
            self._record(call[0], is_output, expected, part)
        return True


class ExchangeCheck(SampleCheck):
    """Compares the first samples, and the last ones, of forwards that have different other samples.

    All forwards have the same number of samples and begin with the same random state, so they draw the same numbers at
    the same positions. An effect of the number of samples is not noticed.
    """

    def __init__(
        self, runs: Sequence[SeparateRun], portion: BatchSlice, rows: Mapping[tuple[int, int], int], wrong: str = ""
    ) -> None:
        """``runs``: one for each of :meth:`choices`; ``rows``: (layer index, number of the call) -> number of output
        rows for the full batch.
        """
        super().__init__(runs, portion, wrong)
        self._rows, self._calls = rows, set(rows)

    @staticmethod
    def choices(portion: BatchSlice) -> list[list[int]]:
        """Return the samples of each run: the first ones twice, before others, and the last ones twice, after others.

        There are no runs if the batch has too few others.
        """
        n, batch = portion.samples, list(range(portion.batch))
        others = min(n, (portion.batch - n) // 2)
        if others < 1:
            return []
        first, last, before, after = batch[:n], batch[-n:], batch[:-n], batch[n:]
        return [first + after[:others], first + after[-others:], before[:others] + last, before[-others:] + last]

    @torch.no_grad()
    def verdict(self) -> str | None:
        """Compare the runs, then return the verdict as :meth:`SampleCheck.verdict` does."""
        if not self._wrong and self._same_calls():
            uneven = next((i for i, n in self._rows if not self._compare((i, n))), None)
            self._wrong = "" if uneven is None else NOT_BY_SAMPLES.format(self._runs[0].names[uneven])
        return super().verdict()

    def _compare(self, call: tuple[int, int]) -> bool:
        """Record differences between rows of the same samples; return whether the number of rows fits."""
        i, n = call
        runs, full_count = [run.calls[i][n] for run in self._runs], self._rows[call]
        outputs = [h for _, h in runs if h is not None]
        count = len(outputs[0]) if outputs else full_count
        samples, size = self._portion.samples, len(self.choices(self._portion)[0])
        if count * self._portion.batch != full_count * size:
            if count != full_count:
                return False
            self.common.add(call)
        for is_output, rows in zip((False, True), zip(*runs, strict=True), strict=True):
            available = [x for x in rows if x is not None]
            if not available:
                continue
            if len(available) < len(rows) or len({x.shape for x in available}) > 1:
                return False
            compared, remainder = divmod(len(available[0]) * (size if call in self.common else samples), size)
            if remainder:
                return False
            first, other_first, last, other_last = available
            start = len(last) - compared
            self._record(i, is_output, first[:compared], other_first[:compared])
            self._record(i, is_output, last[start:], other_last[start:])
        return True
