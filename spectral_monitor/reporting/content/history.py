"""The history of a run for pictures: values of layers over steps, a bounded number of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spectral_monitor.measurement import LayerInfo, Measurement

MAX_COLUMNS = 256
"""Steps that are kept, at most: a picture has no room for more."""
EARLY = (3, 10)
"""Measurements that are followed by pictures whatever the interval: most happens at the beginning."""


def is_drawn(count: int, interval: int) -> bool:
    """Return whether pictures are made after measurement number ``count``; an interval of 0 means never.

    Example:
        >>> [count for count in range(1, 61) if is_drawn(count, 20)]
        [3, 10, 20, 40, 60]
    """
    return interval > 0 and (count % interval == 0 or (count in EARLY and count < interval))


class Thinned:
    """Measurements, thinned out evenly if they become too many: the newest and every n-th before it.

    Args:
        columns: how many are kept, at most.

    Attributes:
        layers: the layers of all measurements; when they change, earlier measurements are dropped.
    """

    def __init__(self, columns: int = MAX_COLUMNS) -> None:
        self.layers: tuple[LayerInfo, ...] = ()
        self._columns = columns
        self._stride = 1
        self._count = 0  # all measurements, kept or not
        self._kept: list[Measurement] = []
        self._latest: Measurement | None = None

    def add(self, measurement: Measurement) -> None:
        """Add the next measurement."""
        if measurement.layers is not self.layers and measurement.layers != self.layers:
            self.layers, self._stride, self._count, self._kept = measurement.layers, 1, 0, []
        if self._count % self._stride == 0:
            if len(self._kept) == self._columns:
                self._kept, self._stride = self._kept[::2], 2 * self._stride
            if self._count % self._stride == 0:
                self._kept.append(measurement)
        self._count += 1
        self._latest = measurement

    @property
    def measurements(self) -> list[Measurement]:
        """The measurements that were kept, and the latest."""
        if self._latest is None or (self._kept and self._kept[-1] is self._latest):
            return list(self._kept)
        return [*self._kept, self._latest]

    @property
    def steps(self) -> list[int]:
        """The steps of the measurements."""
        return [measurement.step for measurement in self.measurements]

    def values(self, quantity: str) -> Tensor:
        """Return the values of a quantity, (layers, steps); NaN where it was not measured."""
        return self._stacked([measurement.values.get(quantity) for measurement in self.measurements])

    def bands(self, quantity: str) -> Tensor:
        """Return low, high and reference, (layers, steps, 3); NaN where it was compared with nothing."""
        return self._stacked([measurement.bands.get(quantity) for measurement in self.measurements], 3)

    def _stacked(self, columns: Sequence[Tensor | None], *shape: int) -> Tensor:
        missing = torch.full((len(self.layers), *shape), math.nan, device="cpu")
        tensors = [missing if column is None else column for column in columns]
        return torch.stack([missing, *tensors], dim=1)[:, 1:]  # there may be no columns

    def ratios(self, quantity: str) -> Tensor:
        """Return values over references, (layers, steps); NaN where there is no reference."""
        return self.values(quantity) / self.bands(quantity)[..., 2]

    def __len__(self) -> int:
        return len(self.measurements)


class History(Thinned):
    """The measurements of a run, and those that have each quantity: both thinned out evenly.

    Args:
        columns: how many are kept, at most, in all and for each quantity.

    Example:
        >>> history = History(columns=4)
        >>> layers = (LayerInfo("a", "operator", 8, 8, (8, 8)),)
        >>> for step in range(1, 8):
        ...     values = {key: torch.tensor([0.1 * step]) for key in ("lr", "bfa") if key == "lr" or step % 3 == 0}
        ...     history.add(Measurement(step, layers, values, {}))
        >>> history.steps, history.values("lr").shape, history.of("bfa").steps
        ([1, 3, 5, 7], torch.Size([1, 4]), [3, 6])
    """

    def __init__(self, columns: int = MAX_COLUMNS) -> None:
        super().__init__(columns)
        self._by_quantity: dict[str, Thinned] = {}

    def add(self, measurement: Measurement) -> None:
        """Add the next measurement."""
        super().add(measurement)
        for key in measurement.values:
            self._by_quantity.setdefault(key, Thinned(self._columns)).add(measurement)

    def union(self) -> list[Measurement]:
        """Return all measurements that were kept, for any quantity, in their order."""
        thinned = (self, *self._by_quantity.values())
        kept = {id(m): m for history in thinned for m in history.measurements if m.layers == self.layers}
        return sorted(kept.values(), key=lambda measurement: measurement.step)

    def of(self, quantity: str) -> Thinned:
        """Return the measurements that have a quantity, of the same layers; empty if it was not measured."""
        history = self._by_quantity.get(quantity)
        if history is None or history.layers != self.layers:
            history = Thinned(self._columns)
            history.layers = self.layers
        return history
