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
    count: int  # number of output rows in the sample
    eps: float
    index: Tensor | None  # the sample; ``None`` for all rows
    root: RootCall | None  # the outermost call around it
    features: int  # number of output features
    outputs: int  # number of output rows
    norm: Tensor  # of all rows of the output, extrapolated from the first sample
    original: Tensor | None = None  # the rows themselves, while ``h_out`` is a copy that may not be needed
    h_in: GuardedTensor | None = None
    watched: bool = False  # whether a hook waits for the gradient of the output
    b: GuardedTensor | None = None
    b_count: int = 0  # number of gradients that arrived
    # number of first output rows that the forward after the step will have, if only some samples are rerun; ``h_out``
    # and ``b`` are then a sample of these rows
    first: int | None = None
    first_index: Tensor | None = None  # that sample; ``None`` for all
    b_sample: Tensor | None = None  # gradient rows of the sample of all rows, if ``b`` has other rows
    inputs: int = 0  # number of input rows
    split_in: bool = False  # whether processes with the same batch divide the input's rows
    split_out: bool = False  # whether they divide the output's rows
    checked: Checked | None = None  # the checks of assumptions
    node: Any = None  # of the output in the graph, if it is needed
    position: int = 0  # number of calls of all layers before this one
    arrival: Arrival | None = None  # of the output's gradient, during a pass beside the step

    def input(self) -> Tensor | None:
        """Return the input, if it is available and was not overwritten."""
        return None if self.h_in is None else self.h_in.get()

    def gradient(self) -> Tensor | None:
        """Return the gradient of the output, if it arrived exactly once and was not overwritten."""
        return self.b.get() if self.b is not None and self.b_count == 1 else None

    def gradient_sample(self) -> Tensor | None:
        """Return gradient rows that are a sample of all rows."""
        b = self.gradient()
        return b if b is None or self.b_sample is None else self.b_sample

    def thin(self, limit: int, device: torch.device) -> None:
        """Keep at most ``limit`` rows: those that would have been chosen with this limit at first."""
        if self.count <= limit:
            return
        index = chosen_rows(self.outputs, limit, device)
        assert index is not None
        if self.first is None:
            self._keep(self.index, index)
        else:
            first = chosen_rows(self.first, -(-limit * self.first // self.outputs), device)
            if first is not None:
                self._keep(self.first_index, first)
                self.first_index = first
        self.index, self.count = index, len(index)

    def _keep(self, before: Tensor | None, index: Tensor) -> None:
        """Keep the rows at an index, out of those at the index ``before``."""
        positions = index if before is None else torch.searchsorted(before, index)
        self.h_out, self.b = self.h_out.part(positions), None if self.b is None else self.b.part(positions)
        self.original = None

    def rows(self, h: Tensor) -> CallRows:
        """Return the rows to compare with those after the step; ``h``: rows of the output."""
        index = self.index if self.first is None else self.first_index
        pool = self.outputs if self.first is None else self.first
        return CallRows(index, h, self.gradient(), self.outputs, pool, self.outputs)


def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return rows of all calls in the dtype of computations; ``None`` if any is missing."""
    rows = concatenated(parts)
    return None if rows is None else rows.to(compute_dtype(rows.dtype))
