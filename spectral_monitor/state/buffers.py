"""Copies that outlive a training step, on the device or, to save its memory, on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def empty_buffer(shape: Sequence[int], dtype: torch.dtype, device: torch.device, host: bool) -> Tensor:
    """Return uninitialized memory; on the ``host`` it is pinned, so that a GPU copies to it asynchronously."""
    if not host:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def kept(tensor: Tensor, host: bool) -> Tensor:
    """Return a copy of a tensor's present values.

    A copy on the ``host`` may still be under way: read it on the tensor's device only.
    """
    if not host or tensor.layout != torch.strided:
        return tensor.clone()
    return empty_buffer(tensor.shape, tensor.dtype, tensor.device, host).copy_(tensor, non_blocking=True)
