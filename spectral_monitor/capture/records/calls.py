"""The record of one call of one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spectral_monitor.capture.records.assumption_checks import Checked
from spectral_monitor.capture.replay.eager_pass import Arrival
from spectral_monitor.capture.replay.feature_change import CallRows
from spectral_monitor.capture.replay.replay import RootCall
from spectral_monitor.capture.row_sampling import GuardedTensor, chosen_rows, concatenated
from spectral_monitor.linalg import compute_dtype


@dataclass
class Call:
    """One call of one layer: chosen rows of its input (a sample), its output and the gradient of its output."""

    h_out: GuardedTensor
    count: int  # rows of the output that were chosen to stand for all
    eps: float
    index: Tensor | None  # which those are; ``None`` for all
    root: RootCall | None  # the outermost call it was part of
    features: int  # of the output
    outputs: int  # rows of the output, chosen or not
    norm: Tensor  # of all rows of the output, as far as those say that were chosen at first
    # the rows themselves, where ``h_out`` is a copy and it is not known yet whether that is needed
    original: Tensor | None = None
    h_in: GuardedTensor | None = None
    watched: bool = False  # whether the gradient of the output is waited for
    b: GuardedTensor | None = None
    b_count: int = 0
    # rows of the output, the first ones, that the forward after the step will have, if it is known that it will be of
    # some samples only; ``h_out`` and ``b`` are of these, not of those that stand for all
    first: int | None = None
    first_index: Tensor | None = None  # which of them; ``None`` for all
    b_sample: Tensor | None = None  # rows of the gradient that stand for all, where those in ``b`` do not
    inputs: int = 0  # rows of the input, chosen or not
    split_in: bool = False  # whether the input's rows are shared out among processes with the same batch
    split_out: bool = False  # whether the output's are
    checked: Checked | None = None  # what is only read off it where assumptions are checked
    node: Any = None  # where the output is in the graph, if that is asked for
    place: int = 0  # how many calls of other layers and of this one came before
    # where the gradient of the output arrives, while a pass beside the step is under way
    arrival: Arrival | None = None

    def input(self) -> Tensor | None:
        """Return the input, if it is available and nobody has overwritten it."""
        return None if self.h_in is None else self.h_in.get()

    def gradient(self) -> Tensor | None:
        """Return the gradient of the output, if it arrived exactly once and nobody has overwritten it."""
        return self.b.get() if self.b is not None and self.b_count == 1 else None

    def gradient_sample(self) -> Tensor | None:
        """Return rows of the same that stand for all."""
        b = self.gradient()
        return b if b is None or self.b_sample is None else self.b_sample

    def thin(self, room: int, device: torch.device) -> None:
        """Keep at most ``room`` of the rows that were chosen, those that would have been chosen so."""
        if self.count <= room:
            return
        index = chosen_rows(self.outputs, room, device)
        assert index is not None
        if self.first is None:
            self._keep(self.index, index)
        else:
            first = chosen_rows(self.first, -(-room * self.first // self.outputs), device)
            if first is not None:
                self._keep(self.first_index, first)
                self.first_index = first
        self.index, self.count = index, len(index)

    def _keep(self, before: Tensor | None, index: Tensor) -> None:
        """Keep some of the rows, which were those of ``before``."""
        place = index if before is None else torch.searchsorted(before, index)
        self.h_out, self.b = self.h_out.part(place), None if self.b is None else self.b.part(place)
        self.original = None

    def rows(self, h: Tensor) -> CallRows:
        """Return what is compared of it, ``h`` of the output."""
        index = self.index if self.first is None else self.first_index
        pool = self.outputs if self.first is None else self.first
        return CallRows(index, h, self.gradient(), self.outputs, pool, self.outputs)


def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return rows of all calls in the dtype they are measured in; ``None`` if any is missing."""
    rows = concatenated(parts)
    return None if rows is None else rows.to(compute_dtype(rows.dtype))
