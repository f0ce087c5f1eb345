"""Devices that work on by themselves."""

from __future__ import annotations

import torch
from torch import Tensor


def asynchronous(device: torch.device) -> bool:
    """Whether work is queued there, so that whoever asks for a result waits for all that was queued before."""
    return device.type != "cpu"


class Crossing:
    """A tensor on its way to the host."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(values.device))
        else:
            self._host = values

    def get(self) -> list[float]:
        """Its values, once they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        values: list[float] = self._host.tolist()
        return values
