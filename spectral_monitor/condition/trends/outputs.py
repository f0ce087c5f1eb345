"""The outputs of layers: of usual size as training begins, near what the loss wants, and not growing since."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from spectral_monitor.condition.findings import AT_ONCE, Finding
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.verdict import NETWORK
from spectral_monitor.measurement import Measurement

FEATURE_LIMIT = 25.0
"""Root mean square of a layer's outputs at the start; of healthy networks at most 2.5."""
GROWN_LIMIT = 50.0
"""The same of hidden layers later on, at most 6 in healthy networks."""
GROWTH = 4.0
"""What was large from the start has grown if it is this many times as large."""
DISTANCE_LIMIT = 37.5
"""``loss_distance`` at the start over the size of the outputs, or over 1 where they are smaller; at most 2.3 in healthy
networks.
"""
FEATURE_LEAST = 1e-4
"""The same of the smallest outputs that the next matrix does not read at usual size, at least 0.0026."""
HEAVY = 5.0
"""A gain that explains large outputs."""


class OutputTrend:
    """Remembers how large the outputs of layers were at the first measurement.

    Attributes:
        large_outputs: the first layer whose outputs were far too large then; empty if none.
    """

    def __init__(self) -> None:
        self._first: dict[str, float] = {}  # RMS of features at the first measurement
        self._smallest = 0.0  # of them, where the next matrix is left with small inputs; 0 if none is known
        self._late = False  # whether that was when training had gone on for a while
        self._distance = 0.0  # of the loss, at the first measurement that has one; 0 if none is known
        self.large_outputs = ""

    def findings(self, measurement: Measurement, network: Network) -> Iterator[Finding]:
        """Yield what can be said of outputs, healthy or not."""
        yield from self._growth(network)
        yield from self._features(network)
        yield from self.targets(measurement, network)

    def _features(self, network: Network) -> Iterator[Finding]:
        """Yield the largest and the smallest outputs of a layer at the first measurement: later, steps are to blame."""
        rows = [row for row in network.peers if row.get("feature_rms") >= 0]
        if not self._first:
            self._first = {row.info.name: row.get("feature_rms") for row in rows}
            self._late = not network.is_early
            starved = [row for row in rows if row.info.name not in network.from_zero and not network.is_read(row)]
            self._smallest = min((x for row in starved if (x := row.get("feature_rms")) > 0), default=0.0)
            # Later on only the first layer tells: the inputs of the others may have grown.
            hidden = [row.info.name for row in network.peers if row.info.role == "operator"]
            seen = [row for row in rows if row.info.name in hidden[:1]] if self._late else rows
            self.large_outputs = next((row.info.name for row in seen if row.get("feature_rms") > FEATURE_LIMIT), "")
        if not self._first:
            return
        own = network.row(self.large_outputs)
        bias = network.vectors.get(f"{self.large_outputs}.bias")
        heavy = own is not None and own.gain > HEAVY  # then its weights are to blame, or its bias, not its inputs
        heavy |= bias is not None and bias.get("weight_natural") > FEATURE_LIMIT / 2
        largest = self._first.get(self.large_outputs, 1.0 if self._late else max(self._first.values()))
        if not heavy and (network.fresh or not self._late):
            yield Finding("features", NETWORK, "feature_rms", largest, 1.0, (0.0, FEATURE_LIMIT), 1.5, "usual")
        if self._smallest and network.fresh and not self._late:
            band = (FEATURE_LEAST, math.inf)
            yield Finding("features_vanish", NETWORK, "feature_rms", self._smallest, 1.0, band, 1.5, "usual")

    def targets(self, measurement: Measurement, network: Network) -> Iterator[Finding]:
        """Yield how far the loss wanted the outputs to move at the start, beside what networks begin with: size 1."""
        distance = measurement.summary.get("loss_distance", math.nan)
        if not (self._distance or math.isnan(distance)) and network.is_early:
            sizes = [row.get("feature_rms") for row in network.peers if row.info.role == "readout"]
            self._distance = distance / max([1.0, *sizes])  # NaN is no maximum of what comes before it
        if self._distance > 0:
            limits = (0.0, DISTANCE_LIMIT)  # one observation, however often it is looked at
            yield Finding("targets", NETWORK, "loss_distance", self._distance, 1.0, limits, AT_ONCE, "usual")

    def _growth(self, network: Network) -> Iterator[Finding]:
        """Yield the largest outputs of a hidden layer after the first steps: too large steps let them grow."""
        if not self._first:
            return
        sizes = [row.get("feature_rms") for row in network.moved_by_rate if row.info.role == "operator"]
        largest = max((size for size in sizes if not math.isnan(size)), default=math.nan)
        limit = max(GROWN_LIMIT, GROWTH * max(self._first.values(), default=0.0))
        if not network.is_early and not math.isnan(largest):
            yield Finding("features_grow", NETWORK, "feature_rms", largest, limit, (0.0, 1.0), against="usual")

    def state_dict(self) -> dict[str, Any]:
        """Return plain types."""
        return {
            "first": dict(self._first),
            "smallest": self._smallest,
            **({"late": True} if self._late else {}),
            "distance": self._distance,
            "large_outputs": self.large_outputs,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._first, self._smallest = dict(state["first"]), float(state.get("smallest", 0.0))
        self._late, self._distance = bool(state.get("late", False)), float(state.get("distance", 0.0))
        self.large_outputs = str(state["large_outputs"])
