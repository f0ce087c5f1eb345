"""Raw scalars on their way from the device to the host: many small tensors, one copy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from spectral_monitor.quantities.readings import Values

NETWORK = -1
"""The layer index of values of the whole network."""

LOSS = "loss"
"""Name of the loss with which the backward pass began."""
LOSS_CHANGE = "loss.change"
"""Name of a pair: the loss after the step less that before it, and the loss before it."""

REUSED = "g.reused"
"""Prefix of the names of values that say whether a step used gradients again: 1, 0, or NaN."""

MAX_TUPLE = 64
"""Values that are kept as a tuple; more, such as the thousands of a depthwise convolution, stay a tensor."""

ALL = slice(None)
"""The span of a layer that has a tensor of its own."""

Raw = dict[int, dict[str, Values]]
"""Layer index -> name -> values."""


class RawScalars:
    """Named values of layers, each in a small tensor or a part of one.

    A step has thousands, so few objects are made for them. After many new objects that last, Python's garbage collector
    goes through all objects of the process, which takes a fifth of a second.
    """

    def __init__(self) -> None:
        self._columns: dict[str, list[tuple[Mapping[int, slice], Tensor]]] = defaultdict(list)
        self._numbers: dict[tuple[int, str], float] = {}

    def put(self, layer: int, name: str, value: Tensor) -> None:
        """Add or replace a value of any shape."""
        self.put_each(name, {layer: ALL}, value.reshape(-1))

    def put_each(self, name: str, spans: Mapping[int, slice], values: Tensor) -> None:
        """Add or replace a value for each of several layers, which are parts of one flat tensor.

        Making a tensor for each layer, and concatenating them, would take longer than computing the values.
        """
        self._columns[name].append((spans, values.detach() if values.requires_grad else values))

    def note(self, layer: int, name: str, number: float) -> None:
        """Add or replace a number that is on the host."""
        self._numbers[(layer, name)] = number

    def get(self, layer: int, name: str) -> Tensor:
        """Return a value, flat, still on its device."""
        spans, values = next(column for column in reversed(self._columns[name]) if layer in column[0])
        value: Tensor = values[spans[layer]]
        return value

    def fetch(self) -> Raw:
        """Return all values on the host, with one copy from each device, which waits for its queued work."""
        groups: dict[torch.device, dict[torch.dtype, dict[int, Tensor]]] = defaultdict(lambda: defaultdict(dict))
        for _, values in chain.from_iterable(self._columns.values()):
            groups[values.device][values.dtype][id(values)] = values
        arrays: dict[int, np.ndarray] = {}
        for dtypes in groups.values():
            # float64 holds all other dtypes exactly.
            flat = torch.cat([torch.cat(list(same.values())).double() for same in dtypes.values()]).cpu()
            arrays.update(_unpacked(flat, [values for same in dtypes.values() for values in same.values()]))
        raw: Raw = defaultdict(dict)
        for name, column in self._columns.items():
            for spans, values in column:
                for layer, span in spans.items():
                    part = arrays[id(values)][span]
                    raw[layer][name] = torch.from_numpy(part) if len(part) > MAX_TUPLE else tuple(part.tolist())
        for (layer, name), number in self._numbers.items():
            raw[layer][name] = (number,)
        return dict(raw)


def _unpacked(flat: Tensor, tensors: Sequence[Tensor]) -> dict[int, np.ndarray]:
    """Return the values of tensors by ``id``, from a copy of all their entries on the host."""
    array, end = flat.numpy(), 0
    arrays = {}
    for values in tensors:
        arrays[id(values)] = array[end : end + len(values)]
        end += len(values)
    return arrays


def one_each(layers: Iterable[int]) -> dict[int, slice]:
    """Return the spans of layers with one entry each, in their order."""
    return {i: slice(k, k + 1) for k, i in enumerate(layers)}
