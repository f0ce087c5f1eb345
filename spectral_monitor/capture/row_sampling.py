"""Samples of at most ``max_rows`` rows of features, from activations of any shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from spectral_monitor.state.dtensor import local_part, local_tensor
from spectral_monitor.state.snapshot import has_memory

WeightVersions = dict[int, tuple[int, int]]
"""Parameter's id -> its version and its address: every write changes one of them, except writes through ``.data``."""

SAMPLE_ENTRIES, SAMPLE_ROWS = 1 << 16, 256
"""Entries, and at least so many rows, on which spectra of features are measured."""


def sample_size(features: int) -> int:
    """Return the number of rows whose spectrum stands for that of all, unless ``max_rows`` is None."""
    return max(SAMPLE_ROWS, SAMPLE_ENTRIES // max(features, 1))


@dataclass(frozen=True)
class RowLimit:
    """The number of rows that a process keeps of a layer."""

    max_rows: int | None  # of all processes; ``None`` for all rows
    batches: int = 1  # of all processes together

    def of(self, features: int, rows: int) -> int | None:
        """Return the limit for a layer with so many features and rows; ``None`` if all of them are kept.

        If there are too many rows, wide layers keep half as many as narrow ones: there a row costs more.
        """
        if self.max_rows is None or rows <= -(-self.max_rows // self.batches):
            return None
        limit = max(-(-self.max_rows // 2), min(self.max_rows, SAMPLE_ENTRIES // max(features, 1)))
        return -(-limit // self.batches)


def chosen_rows(count: int, limit: int | None, device: torch.device) -> Tensor | None:
    """Return sorted indices of the rows to keep, at most ``limit``; ``None`` for all of them.

    The choice depends on ``count`` alone. So the rows of a layer's inputs, outputs, gradients and outputs after the
    step belong to the same samples, and several processes together choose the rows that one process would choose.
    """
    return share_of_rows(count, limit, 0, count, device)[1]


@lru_cache(maxsize=64)  # bounded, because batch shapes may vary without end
def share_of_rows(
    count: int, limit: int | None, first: int, last: int, device: torch.device
) -> tuple[int, Tensor | None]:
    """Return the number of kept rows before row ``first``, and the indices of the kept rows from ``first`` up to
    ``last``, counted from ``first``; ``None`` for all of them.
    """
    if limit is None or count <= limit:
        return first, None
    generator = torch.Generator().manual_seed(count)
    index = torch.randperm(count, generator=generator, device="cpu")[:limit].sort().values
    before, end = torch.searchsorted(index, torch.tensor([first, last], device="cpu")).tolist()
    return before, (index[before:end] - first).to(device)


def rows_of(x: Tensor, channels_first: bool, spatial: int, index: Tensor | None = None) -> Tensor:
    """Return rows of ``x`` as (rows, features): a view if the layout allows it and all are kept, else a copy.

    Args:
        x: (..., features), or (batch, features, *spatial) for convolutions; also without batch dimension.
        channels_first: whether ``x`` has the second form.
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
        x: (batch, in, *sizes), or without batch dimension; incomplete patches at the end are not read.
        kernel: sides of a patch.
    """
    spatial = len(kernel)
    first = x.ndim - spatial
    for dim, side in enumerate(kernel, first):
        x = x.unfold(dim, side, side)  # finally (..., in, n_1, n_2, ..., k_1, k_2, ...)
    return x.movedim(first - 1, -spatial - 1).flatten(-spatial - 1)


class GuardedTensor:
    """Rows that are held without a copy, and returned only if they were neither overwritten nor freed since."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows.clone() if rows.is_inference() else rows  # writes to inference tensors change no version
        self._version = 0 if rows.is_inference() else rows._version

    @classmethod
    def of(cls, x: Tensor, rows: Tensor) -> GuardedTensor:
        """Return guarded rows of ``x``, copied if ``x`` is not the output of an operation: a parameter, for example.

        Its owner may reuse the memory without a new version: FSDP frees gathered weights and gathers others there.
        """
        base = x._base if x._is_view() else x
        reusable = base is None or base.grad_fn is None
        return cls(rows.clone() if reusable and rows.data_ptr() == local_tensor(x).data_ptr() else rows)

    def get(self) -> Tensor | None:
        """Return the rows; ``None`` if they were overwritten."""
        rows = self._rows
        return rows if rows.is_inference() or (rows._version == self._version and has_memory(rows)) else None

    def part(self, index: Tensor) -> GuardedTensor:
        """Return a copy of the rows at an index; overwritten rows stay unavailable."""
        rows = self.get()
        return self if rows is None else GuardedTensor(rows.index_select(0, index))


def weight_versions(parameters: Iterable[Tensor]) -> WeightVersions:
    """Return the present versions and addresses."""
    parts = ((p, local_tensor(p)) for p in parameters)
    return {id(p): (p._version, part.data_ptr() if part.layout == torch.strided else 0) for p, part in parts}


def count_rows(x: Tensor, channels_first: bool, spatial: int) -> int:
    """Return the number of rows of ``x``."""
    features = x.shape[-spatial - 1] if channels_first else x.shape[-1]
    return x.numel() // max(features, 1)


def concatenated(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return rows of several calls as one tensor; ``None`` if any is missing, or there are none."""
    available = [part for part in parts if part is not None]
    if not available or len(available) < len(parts):
        return None
    return torch.cat(available) if len(available) > 1 else available[0]


def first_rows(x: Tensor, first: int, count: int) -> Tensor:
    """Return the part of ``x`` with the ``first`` of its ``count`` rows."""
    return x.narrow(0, 0, len(x) * first // count)


def is_table(x: Tensor) -> bool:
    """Return whether a tensor is dense and not nested, so that it has rows."""
    return x.layout == torch.strided and not x.is_nested


def table_rows(gradient: Tensor | None, tokens: Tensor | None) -> Tensor | None:
    """Return the gradient of an embedding's outputs for these tokens, a row for each; ``None`` if unknown.

    ``gradient``: of the table. Its rows are sums over all uses of a token, so no token may occur twice.
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
    return next((tensor for item in items if (tensor := first_tensor(item)) is not None), None)
