"""Local parts of tensors that are sharded over processes."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_distributed(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor, of which each process has its part."""
    # Asked of every tensor of every step, and where torch has no distributed package too.
    return isinstance(tensor, Tensor) and hasattr(tensor, "_local_tensor") and hasattr(tensor, "device_mesh")


def local_part(tensor: Tensor) -> Tensor:
    """Return what this process holds of a DTensor, detached, or the tensor itself; a view, without communication."""
    part: Tensor = tensor._local_tensor if is_distributed(tensor) else tensor  # type: ignore[attr-defined]
    wait = getattr(part, "wait", None)  # for a collective that is still under way
    part = wait() if callable(wait) else part
    return part.detach()
