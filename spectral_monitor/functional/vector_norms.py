"""Lengths of vectors, also of those whose squares leave the range of their dtype."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from spectral_monitor.linalg import compute_dtype

CHUNK, DEVICE_CHUNK = 1 << 20, 1 << 22
"""Entries that are copied to float64 at a time: 8 MB on a CPU, elsewhere enough to keep it busy."""


def at_once(x: Tensor, on_cpu: int) -> int:
    """Return the number of entries to compute at once; millions on a GPU, where each call has a fixed cost."""
    return on_cpu if x.device.type == "cpu" else DEVICE_CHUNK


def common_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype in which several tensors are computed together."""
    return reduce(torch.promote_types, (compute_dtype(x.dtype) for x in tensors))


def largest(x: Tensor, dim: int | None = None) -> Tensor:
    """Return the size of the largest entry, or of each along a dimension, which is kept; 1 if it is 0 or not finite.

    A tensor divided by it is safe to square.
    """
    if not x.numel():
        return x.new_ones(())
    low, high = torch.aminmax(x, dim=dim, keepdim=dim is not None)
    size = torch.maximum(high, -low)
    return torch.where((size > 0) & size.isfinite(), size, 1.0)


def lengths(x: Tensor) -> Tensor:
    """Return the lengths (...) of the rows of ``x`` (..., n), float64, for entries of any size.

    Example:
        >>> import torch
        >>> lengths(torch.tensor([[3e-30, 4e-30], [3e30, 4e30]]))
        tensor([5.0000e-30, 5.0000e+30], dtype=torch.float64)
    """
    chunk = at_once(x, CHUNK)
    if x.ndim > 1 and x.numel() > chunk:
        if len(x) == 1:
            return lengths(x.squeeze(0))[None]
        return torch.cat([lengths(part) for part in x.split(max(1, chunk * len(x) // x.numel()))])
    if x.dtype != torch.float64:
        norms: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
        return norms
    size = largest(x, -1)
    scaled: Tensor = torch.linalg.vector_norm(x / size, dim=-1)
    return scaled * size.squeeze(-1)


def whole_length(x: Tensor) -> Tensor:
    """Return the length of all entries of ``x`` as one vector, float64, for entries of any size."""
    rows = lengths(x if x.ndim else x[None])
    if x.dtype == torch.float64:
        return lengths(rows.flatten())
    length: Tensor = torch.linalg.vector_norm(rows)  # float64 holds the squares of shorter floats
    return length


def row_products(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner products (...) of the rows of ``a`` and ``b`` (..., n), float64, for entries of any size.

    Example:
        >>> import torch
        >>> row_products(torch.tensor([[3e-30, 4e-30]]), torch.tensor([[1e-30, 1e-30]]))
        tensor([7.0000e-60], dtype=torch.float64)
    """
    rows = max(1, at_once(a, CHUNK) // max(a.shape[-1], 1))
    if a.ndim > 1 and len(a) > rows:
        return torch.cat([row_products(*parts) for parts in zip(a.split(rows), b.split(rows), strict=True)])
    return a.to(torch.float64, copy=True).mul_(b).sum(-1)
