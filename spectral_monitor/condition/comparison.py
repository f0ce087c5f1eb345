"""Layers beside each other: how large updates are over the typical one, and what others have."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from spectral_monitor.condition.optimizers.rates import RULES
from spectral_monitor.fitting.medians import geometric_median

if TYPE_CHECKING:
    from spectral_monitor.condition.network import Network
    from spectral_monitor.condition.row import Row


class Comparison:
    """Compares layers with their peers; medians are computed once."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._sized: dict[tuple[int, str], tuple[dict[str, float], float]] = {}
        self._logs: dict[str, tuple[dict[str, float], list[float]]] = {}

    def relative_size(self, row: Row) -> float:
        """Return the size of a layer's update over the typical one, 1 for the median layer; NaN if it has no peers.

        Learning rates that differ by a rule, on purpose or as declared are taken out; others are not.
        """
        sizes, middle = self._sizes(row)
        return sizes.get(row.info.name, math.nan) / middle

    def _sizes(self, row: Row) -> tuple[dict[str, float], float]:
        """Return the sizes of the updates of a layer's peers, by name, and their median."""
        key = (row.settings.owner, row.settings.family)
        if key not in self._sized:
            moved = [other for other in self._network.peers_of(row) if other.has_gradient]
            some = {other.info.name: self._size(other) / self._meant(other) for other in moved}
            sizes = {name: size for name, size in some.items() if 0 < size < math.inf}
            self._sized[key] = sizes, geometric_median(sizes.values()) if len(sizes) > 1 else math.nan
        return self._sized[key]

    def _size(self, row: Row) -> float:
        return row.get("update_natural") if self._meant_natural(row) else row.size

    def _meant(self, row: Row) -> float:
        """Return the learning rate that a layer is meant to have, up to a factor common to its peers."""
        rate = self._network.rates.get(row.info.name)
        if self._network.corrected or rate is None:
            return 1.0
        meant = rate.lr if rate.purpose else rate.usual
        return meant / RULES[rate.rule](row.info) if self._meant_natural(row) else meant

    def _meant_natural(self, row: Row) -> bool:
        """Return whether updates are meant to have equal natural norms: that is what SGD's rates in muP are for."""
        rate = self._network.rates.get(row.info.name)
        spectral = rate is not None and rate.rule == "fan_out/fan_in" and row.settings.family == "sgd"
        return self._network.corrected or spectral

    def others(self, quantity: str, row: Row) -> float:
        """Return the geometric median over the peers but one."""
        if quantity not in self._logs:
            known = {peer.info.name: self._read(peer, quantity) for peer in self._measures(quantity)}
            found = {name: math.log(value) for name, value in known.items() if 0 < value < math.inf}
            self._logs[quantity] = found, sorted(found.values())
        logs, ordered = self._logs[quantity]
        own = logs.get(row.info.name)
        count = len(ordered) - (own is not None)
        if not count:
            return math.nan
        # The place of its own is passed over, for sorting the others of each of thousands would take seconds.
        place = len(ordered) if own is None else bisect_left(ordered, own)
        low, high = (ordered[k + (k >= place)] for k in ((count - 1) // 2, count // 2))
        return math.exp((low + high) / 2)

    @staticmethod
    def _read(row: Row, quantity: str) -> float:
        return row.gain if quantity == "weight_natural" else row.get(quantity)

    def _measures(self, quantity: str) -> Sequence[Row]:
        """Return the peers that others are held against: what began at zero says nothing of the size of weights."""
        if quantity != "weight_natural":
            return self._network.peers
        return [row for row in self._network.peers if row.info.name not in self._network.from_zero and not row.scaled]
