"""Local parts of tensors that are sharded across processes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def is_distributed(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor, of which each process has a part."""
    # Called for every tensor of every step, so it must be fast; it must also work without torch.distributed.
    return isinstance(tensor, Tensor) and hasattr(tensor, "_local_tensor") and hasattr(tensor, "device_mesh")


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this process's part of a DTensor, or the tensor itself; no communication."""
    if type(tensor) is nn.Parameter or type(tensor) is Tensor:  # thousands in each measured step
        return tensor
    part: Tensor = tensor._local_tensor if is_distributed(tensor) else tensor  # type: ignore[attr-defined]
    wait = getattr(part, "wait", None)  # a collective may still be under way
    return wait() if callable(wait) else part


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a DTensor, or the tensor itself, as a detached view; no communication."""
    return local_tensor(tensor).detach()
