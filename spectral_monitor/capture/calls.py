"""What is recorded of one call of one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spectral_monitor.capture.checks import Checked
from spectral_monitor.capture.comparison import CallRows
from spectral_monitor.capture.replay import RootCall
from spectral_monitor.capture.rows import Kept, RowPicker
from spectral_monitor.linalg import compute_dtype


@dataclass
class Call:
    """One call of one layer: chosen rows of its input (a sample), its output and the gradient of its output.

    Attributes:
        count: rows that were chosen of the output.
        index: which those are; ``None`` for all.
        root: the outermost call it was part of.
        features: of the output.
        outputs: rows of the output, chosen or not.
        norm: of all rows of the output, as far as those say that were chosen at first.
        watched: whether the gradient of the output is waited for.
        original: the rows themselves, where ``h_out`` is a copy and it is not known yet whether that is needed.
        compared: how many of the chosen rows are kept, if it is known that only the first will be compared.
        b_sample: rows of the gradient that stand for all, where those kept do not.
        inputs: rows of the input, chosen or not.
        split_in: whether the input's rows are shared out among processes with the same batch.
        split_out: whether the output's are.
        checked: what is only read off it where assumptions are checked.
        node: where the output is in the graph, if that is asked for.
        place: how many calls of other layers and of this one came before.
    """

    h_in: Kept | None
    h_out: Kept
    count: int
    eps: float
    index: Tensor | None
    root: RootCall | None
    features: int
    outputs: int
    norm: Tensor
    original: Tensor | None = None
    watched: bool = False
    b: Kept | None = None
    b_count: int = 0
    compared: int | None = None
    b_sample: Tensor | None = None
    inputs: int = 0
    split_in: bool = False
    split_out: bool = False
    checked: Checked | None = None
    node: Any = None
    place: int = 0

    def gradient(self) -> Tensor | None:
        """Of the output, if it arrived exactly once and nobody has overwritten it."""
        return self.b.get() if self.b is not None and self.b_count == 1 else None

    def thin(self, picker: RowPicker, room: int, compared: int | None, device: torch.device) -> None:
        """Keep at most ``room`` of the rows that were chosen, those that would have been chosen so; ``compared`` of
        them will be compared.
        """
        if self.count <= room:
            return
        index = picker.choose(self.outputs, room, device)
        assert index is not None
        place = (index if self.index is None else torch.searchsorted(self.index, index))[:compared]
        self.h_out, self.b = self.h_out.part(place), None if self.b is None else self.b.part(place)
        self.index, self.count, self.compared, self.original = index, len(index), compared, None

    def rows(self, h: Tensor) -> CallRows:
        """What is kept of it, ``h`` of the output."""
        index, b = self.index, self.gradient()
        index = None if index is None else index[: len(h)]
        return CallRows(index, h, None if b is None else b[: len(h)], self.outputs, self.count, self.outputs)


def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Rows of all calls as one matrix in the dtype they are measured in; ``None`` if any is missing."""
    there = [part for part in parts if part is not None]
    if not there or len(there) < len(parts):
        return None
    rows = torch.cat(there) if len(there) > 1 else there[0]
    return rows.to(compute_dtype(rows.dtype))
