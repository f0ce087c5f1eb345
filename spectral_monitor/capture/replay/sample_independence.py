"""Sample independence: do samples that are run by themselves give what they give among the others?

Two checks say so. One compares with a run of the whole batch. A forward that draws random numbers, for dropout say,
draws others for fewer samples. There the other one exchanges the samples beside those that are compared.
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
"""Roundings by which outputs may differ that were computed with more, or fewer, rows at a time."""

NOT_BY_SAMPLES = "the number of rows of {!r} does not go by samples"
CALLED_DIFFERENTLY = "without the other samples, layers are called differently"
NO_LESS = "the forward does no less for fewer samples"


def _rows(x: Tensor | None, layer: Layer) -> Tensor | None:
    if x is None or not x.is_floating_point():
        return None
    channels_first, spatial = layer.features_of(x)
    return None if x.ndim <= (spatial if channels_first else 0) else rows_of(local_part(x), channels_first, spatial)


class SeparateRun:
    """Copies of the rows that go into, and come out of, the calls of layers in a forward of some samples."""

    def __init__(self) -> None:
        self.calls: dict[int, list[tuple[Tensor | None, Tensor | None]]] = {}
        self.names: dict[int, str] = {}

    def add(self, i: int, given: Tensor | None, out: Tensor, layer: Layer) -> None:
        """Record one more call of layer ``i``."""
        found = (_rows(x, layer) for x in (given, out))
        x, h = (None if rows is None else rows.clone() for rows in found)
        self.names[i] = layer.info.name
        self.calls.setdefault(i, []).append((x, h))

    @property
    def numbers(self) -> set[tuple[int, int]]:
        """The calls, as (layer index, number of the call)."""
        return {(i, n) for i, calls in self.calls.items() for n in range(len(calls))}


class SampleCheck:
    """Base of the two checks: runs of some samples, and how far rows are from what they should be; looked at once.

    Attributes:
        common: calls, as (layer index, number of the call), whose outputs have no entry for each sample.
        noise: layer index -> difference of its outputs relative to their norm; known after :meth:`verdict`.
    """

    def __init__(self, runs: Sequence[SeparateRun], portion: BatchSlice, wrong: str) -> None:
        """``portion``: which the first samples are; ``wrong``: why it is known already that they must not."""
        self.common: set[tuple[int, int]] = set()
        self.noise: dict[int, float] = {}
        self._runs, self._portion, self._wrong = runs, portion, wrong
        self._calls: set[tuple[int, int]] = set()  # of the whole forward
        self._found: list[tuple[int, bool, float, Tensor]] = []

    def _differ(self, i: int, is_output: bool, right: Tensor, rows: Tensor) -> None:
        """Add rows that go into a layer or come out of it."""
        dtype = compute_dtype(right.dtype)
        allowed = max(torch.finfo(right.dtype).eps, ROUNDINGS * torch.finfo(dtype).eps)
        right, rows = right.to(dtype), rows.to(dtype)
        norms = torch.stack([torch.linalg.vector_norm(rows - right), torch.linalg.vector_norm(right)])
        self._found.append((i, is_output, allowed, norms))

    def _called_alike(self) -> bool:
        """Return whether layers are called in every run as in the whole forward."""
        return all(run.numbers == self._calls for run in self._runs)

    def verdict(self) -> str | None:
        """Return why samples must not be run by themselves; empty if they may, ``None`` if this batch cannot tell."""
        if self._wrong:
            return self._wrong
        if not self._called_alike():
            return CALLED_DIFFERENTLY
        if self._calls <= self.common or not self._found:
            return NO_LESS
        device = self._found[0][3].device
        off = torch.stack([norms.to(device, torch.float64) for *_, norms in self._found]).tolist()
        if not all(math.isfinite(norm) for _, norm in off):
            return None
        for (i, is_output, allowed, _), (difference, norm) in zip(self._found, off, strict=True):
            if not difference <= allowed * norm:
                what = "outputs" if is_output else "inputs"
                return f"the {what} of {self._runs[0].names[i]!r} for some samples depend on the others"
            if is_output and norm > 0:
                self.noise[i] = max(self.noise.get(i, 0.0), difference / norm)
        return ""


class IndependenceCheck(SampleCheck):
    """Compares a forward of the whole batch with those of its first and of its last samples, at the same weights.

    The last ones are there because the first may be right by chance: a sequence begins alike, however long it is.
    Inputs are compared because a weight of zero hides them.
    """

    def __init__(self, first: SeparateRun, last: SeparateRun, portion: BatchSlice, wrong: str = "") -> None:
        super().__init__((first, last), portion, wrong)
        self._count: Counter[int] = Counter()

    @torch.no_grad()
    def add(self, i: int, given: Tensor | None, out: Tensor, layer: Layer) -> None:
        """Record one more call of layer ``i`` in the whole forward."""
        n = self._count[i]
        self._count[i] += 1
        self._calls.add((i, n))
        alone = [run.calls.get(i, []) for run in self._runs]
        if any(len(calls) <= n for calls in alone):
            return
        for which, x in enumerate((given, out)):
            parts = [calls[n][which] for calls in alone]
            rows = _rows(x, layer)
            if rows is not None and not self._compare((i, n), which == 1, rows, parts):
                self._wrong = self._wrong or NOT_BY_SAMPLES.format(layer.info.name)

    def _compare(self, call: tuple[int, int], is_output: bool, rows: Tensor, parts: list[Tensor | None]) -> bool:
        """Remember how far the parts are from the ends of all rows, or from all; return whether they have as many."""
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
        for whole, part in pairs:
            self._differ(call[0], is_output, whole, part)
        return True


class ExchangeCheck(SampleCheck):
    """Compares the first, and the last, samples of forwards in which other samples are beside them.

    All are of as many samples and begin with the same random state, so that the same numbers are drawn for the same
    places. What goes by the number of samples, and not by what they are, is not noticed.
    """

    def __init__(
        self, runs: Sequence[SeparateRun], portion: BatchSlice, rows: Mapping[tuple[int, int], int], wrong: str = ""
    ) -> None:
        """``runs``: of the samples that :meth:`choices` names; ``rows``: of each call's output, as (layer index, number
        of the call), for the whole batch.
        """
        super().__init__(runs, portion, wrong)
        self._rows, self._calls = rows, set(rows)

    @staticmethod
    def choices(portion: BatchSlice) -> list[list[int]]:
        """Return which samples are run: the first ones twice, before others, and the last ones twice, after others.

        There are none if the batch has too few others.
        """
        n, every = portion.samples, list(range(portion.batch))
        others = min(n, (portion.batch - n) // 2)
        if others < 1:
            return []
        before, after = every[:-n], every[n:]
        return [
            every[:n] + after[:others],
            every[:n] + after[-others:],
            before[:others] + every[-n:],
            before[-others:] + every[-n:],
        ]

    @torch.no_grad()
    def verdict(self) -> str | None:
        """Compare the runs, then see what :meth:`SampleCheck.verdict` says."""
        if not self._wrong and self._called_alike():
            uneven = next((i for i, n in self._rows if not self._compare((i, n))), None)
            self._wrong = "" if uneven is None else NOT_BY_SAMPLES.format(self._runs[0].names[uneven])
        return super().verdict()

    def _compare(self, call: tuple[int, int]) -> bool:
        """Remember how far rows of the same samples differ; return whether their number goes by samples."""
        i, n = call
        here, whole = [run.calls[i][n] for run in self._runs], self._rows[call]
        outputs = [h for _, h in here if h is not None]
        count = len(outputs[0]) if outputs else whole
        samples, size = self._portion.samples, len(self.choices(self._portion)[0])
        if count * self._portion.batch != whole * size:
            if count != whole:
                return False
            self.common.add(call)
        for which, is_output in enumerate((False, True)):
            rows = [some[which] for some in here]
            there = [x for x in rows if x is not None]
            if not there:
                continue
            if len(there) < len(rows) or len({x.shape for x in there}) > 1:
                return False
            kept, rest = divmod(len(there[0]) * (size if call in self.common else samples), size)
            if rest:
                return False
            first, same, last, alike = there
            self._differ(i, is_output, first[:kept], same[:kept])
            self._differ(i, is_output, last[len(last) - kept :], alike[len(alike) - kept :])
        return True
