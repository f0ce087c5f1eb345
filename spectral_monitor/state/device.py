"""Devices that work on by themselves."""

from __future__ import annotations

import torch


def asynchronous(device: torch.device) -> bool:
    """Return whether work is queued on a device, so that a result waits for all that was queued before."""
    return device.type != "cpu"
