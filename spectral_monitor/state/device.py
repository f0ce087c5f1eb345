"""Devices that work on by themselves."""

from __future__ import annotations

import torch


def asynchronous(device: torch.device) -> bool:
    """Whether work is queued there, so that whoever asks for a result waits for all that was queued before."""
    return device.type != "cpu"
