"""Layers compared with each other: the size of updates, and medians of the other layers."""

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
        # Owner and family of an optimizer -> the size of each layer's update, and their median.
        self._sizes: dict[tuple[int, str], tuple[dict[str, float], float]] = {}
        # Quantity -> the logarithm of each layer's value, and all of them in order.
        self._logs: dict[str, tuple[dict[str, float], list[float]]] = {}

    def relative_size(self, row: Row) -> float:
        """Return the size of a layer's update over that of its median peer; NaN if it has no peers.

        Sizes are divided by learning rates that differ by a rule, on purpose or as declared, but not by others.
        """
        key = (row.settings.owner, row.settings.family)
        if key not in self._sizes:
            moved = [peer for peer in self._network.peers_of(row) if peer.has_gradient]
            relative = {peer.name: self._size_per_rate(peer) for peer in moved}
            sizes = {name: size for name, size in relative.items() if 0 < size < math.inf}
            self._sizes[key] = sizes, geometric_median(sizes.values()) if len(sizes) > 1 else math.nan
        sizes, median = self._sizes[key]
        return sizes.get(row.name, math.nan) / median

    def _size_per_rate(self, row: Row) -> float:
        """Return the size of an update over the layer's intended learning rate, up to a factor that its peers share.

        Corrections, and muP rates under SGD, aim at equal natural norms.
        """
        if self._network.corrected:
            return row.get("update_natural")
        rate = self._network.rates.get(row.name)
        if rate is None:
            return row.size
        intended = rate.lr if rate.purpose else rate.usual_lr
        if rate.rule == "fan_out/fan_in" and row.settings.family == "sgd":
            return row.get("update_natural") / (intended / RULES[rate.rule](row.info))
        return row.size / intended

    def others(self, quantity: str, row: Row) -> float:
        """Return the geometric median of a quantity over all peers but one; of gains for ``weight_natural``."""
        if quantity not in self._logs:
            peers = self._network.peers
            if quantity == "weight_natural":  # layers that began at zero tell nothing about the size of weights
                peers = tuple(peer for peer in peers if peer.name not in self._network.from_zero and not peer.scaled)
                values = {peer.name: peer.gain for peer in peers}
            else:
                values = {peer.name: peer.get(quantity) for peer in peers}
            logs = {name: math.log(value) for name, value in values.items() if 0 < value < math.inf}
            self._logs[quantity] = logs, sorted(logs.values())
        logs, ordered = self._logs[quantity]
        own_log = logs.get(row.name)
        count = len(ordered) - (own_log is not None)
        if not count:
            return math.nan
        # Skip the layer's own index in the sorted list: sorting again for each of thousands of layers takes seconds.
        skipped = len(ordered) if own_log is None else bisect_left(ordered, own_log)
        low, high = (ordered[k + (k >= skipped)] for k in ((count - 1) // 2, count // 2))
        return math.exp((low + high) / 2)
