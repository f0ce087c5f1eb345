"""Copies that outlive a step of training, on the device or, to spare that, in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def room(shape: Sequence[int], dtype: torch.dtype, device: torch.device, host: bool) -> Tensor:
    """Return memory not yet written to; on the ``host`` it is pinned for a GPU, which copies there by itself."""
    if not host:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def kept(tensor: Tensor, host: bool) -> Tensor:
    """Return a copy of a tensor's present values.

    In the ``host``'s memory it may still be on its way: read it on the tensor's device alone.
    """
    if not host or tensor.layout != torch.strided:
        return tensor.clone()
    return room(tensor.shape, tensor.dtype, tensor.device, host).copy_(tensor, non_blocking=True)
