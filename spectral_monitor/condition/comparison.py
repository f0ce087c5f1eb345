"""Comparison of layers with each other: the size of updates, and medians of the other layers."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING

from spectral_monitor.condition.optimizers.rates import RULES
from spectral_monitor.fitting.medians import geometric_median

if TYPE_CHECKING:
    from spectral_monitor.condition.network import Network
    from spectral_monitor.condition.row import Row


class Comparison:
    """Compares layers with their peers; each median is computed once."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._sized: dict[tuple[int, str], tuple[dict[str, float], float]] = {}
        self._logs: dict[str, tuple[dict[str, float], list[float]]] = {}

    def relative_size(self, row: Row) -> float:
        """Return the size of a layer's update over that of its median peer; NaN if it has no peers.

        Sizes are divided by learning rates that differ by a rule, on purpose or as declared, but not by others.
        """
        key = (row.settings.owner, row.settings.family)
        if key not in self._sized:
            moved = [other for other in self._network.peers_of(row) if other.has_gradient]
            relative = {other.name: self._size(other) / self._meant(other) for other in moved}
            sizes = {name: size for name, size in relative.items() if 0 < size < math.inf}
            self._sized[key] = sizes, geometric_median(sizes.values()) if len(sizes) > 1 else math.nan
        sizes, median = self._sized[key]
        return sizes.get(row.name, math.nan) / median

    def _size(self, row: Row) -> float:
        return row.get("update_natural") if self._meant_natural(row) else row.size

    def _meant(self, row: Row) -> float:
        """Return the intended learning rate of a layer, up to a factor that its peers share."""
        rate = self._network.rates.get(row.name)
        if self._network.corrected or rate is None:
            return 1.0
        meant = rate.lr if rate.purpose else rate.usual
        return meant / RULES[rate.rule](row.info) if self._meant_natural(row) else meant

    def _meant_natural(self, row: Row) -> bool:
        """Return whether updates should have equal natural norms: corrections and muP rates under SGD aim at that."""
        rate = self._network.rates.get(row.name)
        spectral = rate is not None and rate.rule == "fan_out/fan_in" and row.settings.family == "sgd"
        return self._network.corrected or spectral

    def others(self, quantity: str, row: Row) -> float:
        """Return the geometric median of a quantity over the peers except one; for ``weight_natural``, of gains."""
        if quantity not in self._logs:
            peers = self._network.peers
            if quantity == "weight_natural":  # what began at zero tells nothing of the size of weights
                peers = tuple(peer for peer in peers if peer.name not in self._network.from_zero and not peer.scaled)
                known = {peer.name: peer.gain for peer in peers}
            else:
                known = {peer.name: peer.get(quantity) for peer in peers}
            found = {name: math.log(value) for name, value in known.items() if 0 < value < math.inf}
            self._logs[quantity] = found, sorted(found.values())
        logs, ordered = self._logs[quantity]
        own = logs.get(row.name)
        count = len(ordered) - (own is not None)
        if not count:
            return math.nan
        # Skip its own place in the sorted list: to sort again for each of thousands of layers would take seconds.
        place = len(ordered) if own is None else bisect_left(ordered, own)
        low, high = (ordered[k + (k >= place)] for k in ((count - 1) // 2, count // 2))
        return math.exp((low + high) / 2)
