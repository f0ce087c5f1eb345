"""Small tensors on their way from the host to a device, which is not waited for."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device.

    A GPU copies by itself from page-locked memory only. From any other the host waits until all that was queued is
    done.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
