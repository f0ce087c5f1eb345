"""Numbers from the device to the host: many small tensors, one copy."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

NETWORK = -1
"""Stands for a layer's index where a value is of the whole network."""

LOSS = "loss"
"""Name of the loss that the backward pass began with."""
LOSS_CHANGE = "loss.change"
"""Name of the loss after the step less that before it, and of that before it."""

REUSED = "g.reused"
"""Begins the names of what is known of gradients that a step uses again: 1, 0, or NaN."""

MANY = 64
"""Values beyond which they are kept as a tensor: of a depthwise convolution there are thousands."""

Values = list[float] | Tensor
"""Numbers on the host; many of them as a float64 tensor."""

Raw = dict[int, dict[str, Values]]
"""Layer index -> name -> values."""


class RawScalars:
    """A bag of small named tensors."""

    def __init__(self) -> None:
        self._items: dict[tuple[int, str], Tensor] = {}
        self._known: dict[tuple[int, str], float] = {}

    def put(self, layer: int, name: str, value: Tensor) -> None:
        """Add or replace a value of any shape."""
        self._items[(layer, name)] = value.detach().reshape(-1)

    def note(self, layer: int, name: str, number: float) -> None:
        """Add or replace a number that the host knows."""
        self._known[(layer, name)] = number

    def get(self, layer: int, name: str) -> Tensor:
        """Return a value that was put before, flat, still on its device."""
        return self._items[(layer, name)]

    def fetch(self) -> Raw:
        """Return everything as numbers: one copy from each device, which waits for what is queued there."""
        groups: dict[torch.device, dict[torch.dtype, list[tuple[int, str]]]] = defaultdict(lambda: defaultdict(list))
        for key, value in self._items.items():
            groups[value.device][value.dtype].append(key)
        raw: Raw = defaultdict(dict)
        for dtypes in groups.values():
            # All as float64, which holds the others.
            flat = torch.cat([torch.cat([self._items[key] for key in keys]).double() for keys in dtypes.values()])
            keys = [key for keys in dtypes.values() for key in keys]
            found = _unpacked(flat.cpu(), [self._items[key].numel() for key in keys])
            for (layer, name), values in zip(keys, found, strict=True):
                raw[layer][name] = values
        for (layer, name), number in self._known.items():
            raw[layer][name] = [number]
        return dict(raw)


def _unpacked(flat: Tensor, sizes: list[int]) -> list[Values]:
    """Return values of these sizes, which lie one after the other on the host."""
    parts = flat.split(sizes)
    few = iter(torch.cat([flat[:0], *(part for part in parts if len(part) <= MANY)]).tolist())
    return [part if len(part) > MANY else [next(few) for _ in range(len(part))] for part in parts]
