"""Copies of small tensors from the host to a device, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a host tensor on a device.

    A GPU copies asynchronously only from page-locked memory. From other memory the host waits for all queued work.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
