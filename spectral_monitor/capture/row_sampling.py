"""From activations of any shape to at most ``max_rows`` rows of features."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from spectral_monitor.state.dtensor import local_part
from spectral_monitor.state.snapshot import has_memory

Marks = dict[int, tuple[int, int]]
"""Parameter's id -> its version and where it lies: what all writes change but those through ``.data``."""

SAMPLE_ENTRIES, SAMPLE_ROWS = 1 << 16, 256
"""Rows that spectra of features take: of layers with fewer features than 256 more, up to so many entries."""


def sample_size(features: int) -> int:
    """Rows whose spectrum and alignment stand for all, unless ``max_rows`` is None."""
    return max(SAMPLE_ROWS, SAMPLE_ENTRIES // max(features, 1))


def chosen_rows(count: int, room: int | None, device: torch.device) -> Tensor | None:
    """Return sorted indices of the rows to keep, at most ``room``; ``None`` for all of them.

    The choice depends on ``count`` alone. So the rows of a layer's inputs, outputs, gradients and outputs after the
    step are of the same samples, and several processes choose together what one would that had all rows.
    """
    return share_of_rows(count, room, 0, count, device)[1]


@lru_cache(maxsize=64)  # batch shapes that vary without end must not fill the memory
def share_of_rows(
    count: int, room: int | None, first: int, last: int, device: torch.device
) -> tuple[int, Tensor | None]:
    """Return how many of the rows to keep come before row ``first``, and which rows from there up to ``last`` are kept,
    counted from ``first``; ``None`` for all of them.
    """
    if room is None or count <= room:
        return first, None
    generator = torch.Generator().manual_seed(count)
    index = torch.randperm(count, generator=generator, device="cpu")[:room].sort().values
    before, end = torch.searchsorted(index, torch.tensor([first, last], device="cpu")).tolist()
    return before, (index[before:end] - first).to(device)


def rows_of(x: Tensor, channels_first: bool, spatial: int, index: Tensor | None = None) -> Tensor:
    """Rows of ``x`` as (rows, features): a view where the layout allows it and all are kept, else a copy.

    Args:
        x: (..., features), or (batch, features, *spatial) for convolutions; without batch dimension too.
        channels_first: the second form.
        spatial: number of spatial dimensions in the second form.
        index: rows to keep, ``None`` for all.
    """
    x = x.detach()
    if channels_first:
        x = x.movedim(-spatial - 1, -1)
    if index is None or x.is_contiguous():
        rows = x.reshape(-1, x.shape[-1])
        return rows if index is None else rows.index_select(0, index)
    return x[torch.unravel_index(index, x.shape[:-1])]


def patches_of(x: Tensor, kernel: Sequence[int]) -> Tensor:
    """Return the patches (..., *positions, in * taps) that a convolution with stride = kernel reads.

    Args:
        x: (batch, in, *sizes), or without batch dimension; what does not fill a patch at the end is not read.
        kernel: sides of a patch.
    """
    spatial = len(kernel)
    first = x.ndim - spatial
    for dim, side in enumerate(kernel, first):
        x = x.unfold(dim, side, side)  # (..., in, n_1, n_2, ..., k_1, k_2, ...) in the end
    return x.movedim(first - 1, -spatial - 1).flatten(-spatial - 1)


class GuardedTensor:
    """Rows that are held without a copy, and given back only if nobody has written to them or freed them since."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows.clone() if rows.is_inference() else rows  # whose writes leave no mark
        self._version = 0 if rows.is_inference() else rows._version

    @classmethod
    def of(cls, x: Tensor, rows: Tensor) -> GuardedTensor:
        """Rows of ``x``, after all copied if no operation of the graph made what it holds: a parameter, say.

        Its owner may use that memory for something else and leave no mark: FSDP frees the weights it has gathered, and
        gathers others there.
        """
        made = x._base if x._is_view() else x
        lent = made is None or made.grad_fn is None
        return cls(rows.clone() if lent and rows.data_ptr() == local_part(x).data_ptr() else rows)

    def get(self) -> Tensor | None:
        """Return the rows; ``None`` if they were overwritten."""
        rows = self._rows
        return rows if rows.is_inference() or (rows._version == self._version and has_memory(rows)) else None

    def part(self, index: Tensor) -> GuardedTensor:
        """Some of the rows, copied; of rows that were overwritten nothing."""
        rows = self.get()
        return self if rows is None else GuardedTensor(rows.index_select(0, index))


def marks(parameters: Iterable[Tensor]) -> Marks:
    """Return the present marks."""
    return {id(p): (p._version, _place(local_part(p))) for p in parameters}


def _place(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout == torch.strided else 0


def count_rows(x: Tensor, channels_first: bool, spatial: int) -> int:
    """Return how many rows ``x`` holds."""
    features = x.shape[-spatial - 1] if channels_first else x.shape[-1]
    return x.numel() // max(features, 1)


def concatenated(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return rows of several calls as one tensor; ``None`` if any is missing, or there are none."""
    there = [part for part in parts if part is not None]
    if not there or len(there) < len(parts):
        return None
    return torch.cat(there) if len(there) > 1 else there[0]


def first_rows(x: Tensor, first: int, count: int) -> Tensor:
    """Return the part of ``x`` that holds the first of its ``count`` rows."""
    return x.narrow(0, 0, len(x) * first // count)


def is_table(x: Tensor) -> bool:
    """Return whether a tensor is dense, and not a list of others, so that it has rows."""
    return x.layout == torch.strided and not x.is_nested


def table_rows(gradient: Tensor | None, tokens: Tensor | None) -> Tensor | None:
    """Return the gradient of what a table of embeddings gave for these tokens, a row for each; ``None`` if unknown.

    The gradient of a row of the table is the sum over all places that looked it up: of one, if no token comes twice.
    """
    if gradient is None or tokens is None or gradient.is_sparse or tokens.is_floating_point():
        return None
    tokens = local_part(tokens).reshape(-1)
    return gradient[tokens] if len(tokens.unique()) == len(tokens) else None


def first_tensor(value: Any) -> Tensor | None:
    """Return the tensor in a module's output or arguments: itself, or the first of a tuple, list or dict."""
    if isinstance(value, Tensor):
        return value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((found for item in items if (found := first_tensor(item)) is not None), None)
