"""Weight decay over time: weights that it takes away faster than gradients build them up."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from spectral_monitor.condition.findings import Finding
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.row import Row
from spectral_monitor.measurement import Measurement

LEFT = 0.5
"""Part of a weight's Frobenius norm that is left: of healthy recipes, trained for hundreds of steps, at least 0.6."""
FAST = 0.006
"""Part of it that goes with each step; of 60 healthy recipes less than 0.002. Long runs lose as much of their
weights, a hundred times as slowly.
"""
SPAN = 8
"""Steps that this must last: a single one may shorten a small weight by as much."""
EXPLAINED = 1 / 3
"""Part of that loss which decay must explain, where the settings tell how much it takes."""
TINY = 1e-300
"""In the place of 0, which has no logarithm."""


class DecayTrend:
    """Remembers the size that weights began with, and how fast they have lost it."""

    def __init__(self) -> None:
        self._first: dict[str, float] = {}  # layer -> Frobenius norm of its weight
        self._before: dict[str, tuple[int, float]] = {}  # layer -> step and norm, at least a span ago
        self._fast: set[str] = set()  # layers that have lost their size fast

    def findings(self, measurement: Measurement, network: Network) -> Iterator[Finding]:
        """Yield what is left of each weight that decays, healthy or not."""
        if "weight_fro" not in measurement.values:
            return
        decaying = [row for row in network.rows if row.info.is_matrix and row.settings.weight_decay > 0]
        for row in decaying:
            self._look(row, network.step)
        left = {row.info.name: self._left(row) for row in decaying}
        fast = {name for name in self._fast if left.get(name, math.nan) < LEFT}
        # Where gradients are normalized with decay, a weight that the loss hardly depends on loses its size by itself.
        coupled = {row.info.name for row in decaying if math.isnan(_decay_of_step(row))}
        if 2 * len(fast & coupled) < len(coupled):
            fast -= coupled
        for row in decaying:
            name = row.info.name
            if left[name] >= 0 and name not in network.from_zero:
                band = (LEFT if name in fast else 0.0, math.inf)
                value, first = row.get("weight_fro"), self._first[name]
                yield Finding("decay", name, "weight_fro", value, first, band, 1.5, "it began with")

    def _look(self, row: Row, now: int) -> None:
        """Compare the size of a weight with that of a span ago."""
        name, size = row.info.name, row.get("weight_fro")
        if not 0 <= size < math.inf:
            return
        self._first.setdefault(name, size)
        step, before = self._before.setdefault(name, (now, size))
        if now < step + SPAN:
            return
        self._before[name] = now, size
        lost = math.log(max(before, TINY) / max(size, TINY)) / (now - step)
        if lost > FAST and _explains(row, lost):
            self._fast.add(name)

    def _left(self, row: Row) -> float:
        """Return what part of its size a weight has left; NaN where it began at 0, or is not known."""
        first = self._first.get(row.info.name, 0.0)
        return row.get("weight_fro") / first if first > 0 else math.nan

    def state_dict(self) -> dict[str, Any]:
        """Return plain types; nothing where nothing decays."""
        if not self._first:
            return {}
        before = {name: list(pair) for name, pair in self._before.items()}
        return {"first": dict(self._first), "before": before, "fast": sorted(self._fast)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; from nothing where a judge of before did not look at decay."""
        self._first, self._fast = dict(state.get("first", {})), set(state.get("fast", ()))
        self._before = {name: (int(step), float(size)) for name, (step, size) in state.get("before", {}).items()}


def _explains(row: Row, lost: float) -> bool:
    """Return whether decay may be what takes this part of a weight in a step; what is not known speaks for it."""
    if not math.isnan(taken := _decay_of_step(row)):
        return taken >= EXPLAINED * min(lost, 1.0)
    # It is normalized with the gradient: then it must be as large as that.
    entry = row.get("weight_fro") / math.sqrt(math.prod(row.info.shape))
    return not row.settings.weight_decay * entry < EXPLAINED * row.gradient_entry


def _decay_of_step(row: Row) -> float:
    """Return what part of a weight its decay takes with each step; NaN where gradients are normalized with it.

    Under SGD momentum adds up what decay has added to earlier gradients.
    """
    settings = row.settings
    if not settings.decoupled and settings.family != "sgd":
        return math.nan
    rate = row.get("lr")
    taken = settings.weight_decay * (settings.lr if math.isnan(rate) else rate)
    return taken if settings.decoupled else taken / max(1 - settings.momentum, 1e-3)
