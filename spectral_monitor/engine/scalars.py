"""Numbers on their way from the device to the host: many small tensors, one copy."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

NETWORK = -1
"""Stands for a layer's index where a value is of the whole network."""

Raw = dict[int, dict[str, list[float]]]
"""Layer index -> name -> values, on the host."""


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

    def fetch(self) -> Raw:
        """Everything as numbers, in one copy per device and dtype."""
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, str]]] = defaultdict(list)
        for key, value in self._items.items():
            groups[(value.device, value.dtype)].append(key)
        raw: Raw = defaultdict(dict)
        for keys in groups.values():
            flat = torch.cat([self._items[key] for key in keys]).tolist()
            end = 0
            for layer, name in keys:
                start, end = end, end + self._items[(layer, name)].numel()
                raw[layer][name] = flat[start:end]
        return dict(raw)
