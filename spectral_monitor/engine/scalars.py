"""Numbers on their way from the device to the host: many small tensors, one copy."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from spectral_monitor.snapshot import devices

NETWORK = -1
"""Stands for a layer's index where a value is of the whole network."""

LOSS_CHANGE = "loss.change"
"""Name of the loss after the step less that before it."""

Raw = dict[int, dict[str, list[float]]]
"""Layer index -> name -> values, on the host."""


class Sent:
    """Numbers that are on their way.

    Attributes:
        late: whether to ask for them at once would mean to wait.
    """

    def __init__(self, items: dict[tuple[int, str], Tensor]) -> None:
        groups: dict[torch.device, dict[torch.dtype, list[tuple[int, str]]]] = defaultdict(lambda: defaultdict(list))
        for key, value in items.items():
            groups[value.device][value.dtype].append(key)
        self.late = any(devices.asynchronous(device) for device in groups)
        self._crossings: list[tuple[list[tuple[int, str, int]], devices.Crossing]] = []
        for dtypes in groups.values():
            order = [(*key, items[key].numel()) for keys in dtypes.values() for key in keys]
            # All as float64, which holds the others: one copy for the device.
            flat = [torch.cat([items[key] for key in keys]).double() for keys in dtypes.values()]
            self._crossings.append((order, devices.Crossing(torch.cat(flat))))

    def get(self) -> Raw:
        """The numbers, as soon as they are here."""
        raw: Raw = defaultdict(dict)
        for order, crossing in self._crossings:
            flat = crossing.get()
            end = 0
            for layer, name, size in order:
                start, end = end, end + size
                raw[layer][name] = flat[start:end]
        return dict(raw)


class Scalars:
    """A bag of small named tensors."""

    def __init__(self) -> None:
        self._items: dict[tuple[int, str], Tensor] = {}

    def put(self, layer: int, name: str, value: Tensor) -> None:
        """Add or replace a value of any shape."""
        self._items[(layer, name)] = value.detach().reshape(-1)

    def get(self, layer: int, name: str) -> Tensor:
        """A value put before, flat, still on its device."""
        return self._items[(layer, name)]

    def send(self) -> Sent:
        """Everything, in one copy per device."""
        return Sent(self._items)

    def fetch(self) -> Raw:
        """Everything as numbers, at once."""
        return self.send().get()
