"""Weight decay over time: weights that decay shrinks faster than gradients rebuild them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from spectral_monitor.condition.findings import AT_ONCE, Finding
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.optimizers.hyperparameters import decay_of_sgd
from spectral_monitor.condition.row import Row
from spectral_monitor.condition.trends.memory import Memory
from spectral_monitor.measurement import Measurement

LEFT = 0.5
"""Part of its initial Frobenius norm that a weight should keep; healthy recipes keep 0.6 after hundreds of steps."""
SHRINKING = 0.75
"""The same for most of the weights, if decay is part of a normalized gradient: larger entries then take longer."""
FAST = 0.006
"""Part of its norm that a weight may lose in each step; less than 0.002 in 60 healthy recipes. Long runs lose as much
of their weights, a hundred times as slowly.
"""
SPAN = 8
"""Steps over which the loss of norm is averaged: a single step may shorten a small weight by as much."""
TAKEN = 0.1
"""Part of a weight that decay may take in a step: ten steps then remove what gradients add. Published settings take at
most a thousandth.
"""
EXPLAINED = 1 / 3
"""Part of the loss of norm that decay must explain, if the settings tell how much it takes."""
TINY = 1e-300
"""Replaces 0, which has no logarithm."""


@dataclass
class DecayTrend(Memory):
    """Remembers the initial size of weights, and which of them have shrunk fast."""

    first: dict[str, float] = field(default_factory=dict)  # layer -> Frobenius norm of its weight
    before: dict[str, list[float]] = field(default_factory=dict)  # layer -> [step, norm] at the start of its span
    fast: list[str] = field(default_factory=list)  # layers that have shrunk fast

    def findings(self, measurement: Measurement, network: Network) -> Iterator[Finding]:
        """Yield what decay takes in a step if that is too much, else the remaining part of each weight that decays."""
        rows = [row for row in network.rows if row.settings.weight_decay > 0]
        taken = {row.name: _decay_of_step(row) for row in rows}
        for row in rows:
            if taken[row.name] > TAKEN and row.is_trained:
                part, against = taken[row.name], "the whole weight"
                yield Finding("decay", row.name, "lr", part, 1.0, (0.0, TAKEN), AT_ONCE, against, measured=False)
        if "weight_fro" not in measurement.values:
            return
        decaying = [row for row in rows if not taken[row.name] > TAKEN]
        for row in decaying:
            self._remember(row, network)
        remaining = {row.name: self._remaining(row) for row in decaying}
        fast = {name for name in self.fast if remaining.get(name, math.nan) < LEFT}
        # If decay is part of a normalized gradient, a weight that the loss hardly depends on shrinks by itself.
        coupled = {row.name for row in decaying if math.isnan(taken[row.name])}
        shrinking = {name for name in self.fast if remaining.get(name, math.nan) < SHRINKING}
        if 2 * len(shrinking & coupled) < len(coupled):
            fast -= coupled
        for row in decaying:
            name = row.name
            if remaining[name] >= 0 and name not in network.from_zero:
                value, band = row.get("weight_fro"), (LEFT if name in fast else 0.0, math.inf)
                yield Finding("decay", name, "weight_fro", value, self.first[name], band, 1.5, "it began with")

    def _remember(self, row: Row, network: Network) -> None:
        """Remember the size of a weight, and whether it has shrunk fast since the start of its span."""
        name, size, step, clip_factor = row.name, row.get("weight_fro"), network.step, network.clip_factor
        if not 0 <= size < math.inf or not (name in self.first or row.has_gradient):
            return  # a dead layer shrinks too, but not because of its decay
        self.first.setdefault(name, size)
        start, before = self.before.setdefault(name, [step, size])
        if step < start + SPAN:
            return
        self.before[name] = [step, size]
        shrinkage = math.log(max(before, TINY) / max(size, TINY)) / (step - start)
        if shrinkage > FAST and _explains(row, shrinkage, clip_factor) and name not in self.fast:
            self.fast.append(name)

    def _remaining(self, row: Row) -> float:
        """Return the remaining part of a weight's initial size; NaN if that is 0 or unknown."""
        first = self.first.get(row.name, 0.0)
        return row.get("weight_fro") / first if first > 0 else math.nan


def _explains(row: Row, shrinkage: float, clip_factor: float) -> bool:
    """Return whether decay may explain the part of its size that a weight loses in a step; true if that is unknown."""
    if not math.isnan(taken := _decay_of_step(row)):
        return taken >= EXPLAINED * shrinkage
    # The optimizer normalizes decay with the clipped gradient, so decay must be about as large as that.
    entry = row.get("weight_fro") / math.sqrt(math.prod(row.info.shape))
    return not row.settings.weight_decay * entry < EXPLAINED * row.gradient_entry * clip_factor


def _decay_of_step(row: Row) -> float:
    """Return the part of a weight that decay takes in a step; NaN if decay is part of a normalized gradient.

    Under SGD momentum accumulates what decay adds to gradients.
    """
    settings = row.settings
    if not settings.decoupled and settings.family != "sgd":
        return math.nan
    if settings.decoupled:
        return settings.weight_decay * _rate(row)
    return decay_of_sgd(settings.weight_decay, _rate(row), settings.momentum)


def _rate(row: Row) -> float:
    """Return the present learning rate, including the correction's multiplier."""
    lr = row.get("lr")
    return row.settings.lr if math.isnan(lr) else lr
