"""Numbers from the device to the host: many small tensors, one copy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from spectral_monitor.quantities.readings import Values

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

Raw = dict[int, dict[str, Values]]
"""Layer index -> name -> values."""


class RawScalars:
    """A bag of small named tensors, and of parts of them."""

    def __init__(self) -> None:
        self._items: dict[tuple[int, str], tuple[Tensor, slice]] = {}
        self._known: dict[tuple[int, str], float] = {}

    def put(self, layer: int, name: str, value: Tensor) -> None:
        """Add or replace a value of any shape."""
        self._items[(layer, name)] = value.detach().reshape(-1), slice(value.numel())

    def put_each(self, name: str, spans: Mapping[int, slice], values: Tensor) -> None:
        """Add or replace a value of each of some layers, which are parts of one flat tensor.

        With the tensors of every layer by themselves, to make them and to put them together would take longer than
        what they are the result of.
        """
        values = values.detach()
        self._items.update({(layer, name): (values, span) for layer, span in spans.items()})

    def note(self, layer: int, name: str, number: float) -> None:
        """Add or replace a number that the host knows."""
        self._known[(layer, name)] = number

    def get(self, layer: int, name: str) -> Tensor:
        """Return a value that was put before, flat, still on its device."""
        values, span = self._items[(layer, name)]
        return values[span]

    def fetch(self) -> Raw:
        """Return everything as numbers: one copy from each device, which waits for what is queued there."""
        groups: dict[torch.device, dict[torch.dtype, dict[int, Tensor]]] = defaultdict(lambda: defaultdict(dict))
        for values, _ in self._items.values():
            groups[values.device][values.dtype][id(values)] = values
        arrays: dict[int, np.ndarray] = {}
        for dtypes in groups.values():
            # All as float64, which holds the others.
            flat = torch.cat([torch.cat(list(same.values())).double() for same in dtypes.values()]).cpu()
            arrays.update(_unpacked(flat, [values for same in dtypes.values() for values in same.values()]))
        raw: Raw = defaultdict(dict)
        for (layer, name), (values, span) in self._items.items():
            part = arrays[id(values)][span]
            raw[layer][name] = torch.from_numpy(part) if len(part) > MANY else part.tolist()
        for (layer, name), number in self._known.items():
            raw[layer][name] = [number]
        return dict(raw)


def _unpacked(flat: Tensor, tensors: Sequence[Tensor]) -> dict[int, np.ndarray]:
    """Return by ``id`` what tensors hold, whose entries lie one after the other on the host."""
    array, end = flat.numpy(), 0
    found = {}
    for values in tensors:
        found[id(values)] = array[end : end + len(values)]
        end += len(values)
    return found


def one_each(layers: Iterable[int]) -> dict[int, slice]:
    """Return where each of some layers has its one entry, in their order."""
    return {i: slice(k, k + 1) for k, i in enumerate(layers)}
