"""The outputs of layers: their size at the start, their growth, and their distance from what the loss asks for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from spectral_monitor.condition.findings import AT_ONCE, Finding
from spectral_monitor.condition.network import MIN_SPREAD, Network
from spectral_monitor.condition.trends.memory import Memory
from spectral_monitor.condition.verdict import NETWORK
from spectral_monitor.fitting.medians import geometric_median, nanmax
from spectral_monitor.measurement import Measurement

FEATURE_LIMIT = 25.0
"""Root mean square of a layer's outputs at the start; at most 2.5 in healthy networks."""
GROWN_LIMIT = 50.0
"""The same for hidden layers later on; at most 6 in healthy networks."""
GROWTH = 4.0
"""Outputs that were large from the start have grown if they are this many times as large."""
DISTANCE_LIMIT = 10.0
"""``loss_distance`` at the start over the size of the outputs, or over 1 if that is smaller; at most 2.3 in healthy
networks. From 10 on, regressions end at more than twice the loss that they reach with standardized targets.
"""
INPUTS_DIFFER = 0.01
"""Spread of the inputs of some layer if samples differ."""
FEATURE_LEAST = 1e-4
"""RMS of the smallest outputs that leave the next matrix with small inputs; at least 0.0026 in healthy networks."""
HEAVY = 5.0
"""A gain above this explains large outputs."""
LEAST_GAIN = 0.35
"""Median gain of initial weights below which they are small. It is at least 0.44 in healthy networks without norms, and
0.14 with norms, which make up for it.
"""
LEAST_SPREAD = 1e-5
"""If the inputs of output layers differ by less between samples (``input_stable_rank`` minus 1), the signal is lost on
its way. They differ by at least 0.04 in healthy networks.
"""


HEAD_LIMIT, HEAD_OUTPUTS = 5.0, 2.0
"""Gain of an output layer's initial weights over the median gain, and RMS of its first outputs: both together are off.
In healthy new networks they are at most 2.3 and 0.6. Strides of a transposed convolution make the first number larger.
"""
ROUNDING = 1e-6
"""A smaller spread between samples may be rounding: the inputs are one vector, such as a learned query."""


@dataclass
class OutputTrend(Memory):
    """Remembers the size of the outputs of layers at the first measurement."""

    first: dict[str, float] = field(default_factory=dict)  # layer -> RMS of its outputs at the first measurement
    smallest: float = 0.0  # of the outputs that leave the next matrix with small inputs; 0 if none is known
    late: bool = False  # whether training had gone on for a while before the first measurement
    distance: float = 0.0  # first known distance of the outputs from what the loss asks for; 0 if none is known
    # of the data between samples at the first measurement, if it was too small; 0 if it was not, or not known
    spread: float = 0.0
    large_outputs: str = ""  # first layer whose outputs were far too large at the first measurement; empty if none were
    # median gain of initial weights that were so small that outputs hardly differed; 0 if they were not
    small_gain: float = 0.0

    def findings(self, measurement: Measurement, network: Network) -> Iterator[Finding]:
        """Yield the findings on outputs, healthy or not."""
        yield from self._growth(network)
        yield from self._features(network)
        yield from self._signal(network)
        yield from self._heads(network)
        yield from self.targets(measurement, network)

    def _features(self, network: Network) -> Iterator[Finding]:
        """Check the largest and the smallest outputs of a layer at the first measurement, before steps change them."""
        rows = [row for row in network.peers if row.get("feature_rms") >= 0]
        if not self.first:
            self.first = {row.name: row.get("feature_rms") for row in rows}
            self.late = not network.is_early
            starved = [row for row in rows if row.name not in network.from_zero and not network.is_read(row)]
            self.smallest = min((x for row in starved if (x := row.get("feature_rms")) > 0), default=0.0)
            # After the beginning only the first layer counts, because inputs of the others may have grown.
            hidden = [row.name for row in network.peers if row.info.role == "operator"]
            candidates = [row for row in rows if row.name in hidden[:1]] if self.late else rows
            self.small_gain = _lost_gain(network)
            self.spread = _spread_of_data(network) if network.is_early else 0.0
            self.large_outputs = next((row.name for row in candidates if row.get("feature_rms") > FEATURE_LIMIT), "")
        if not self.first:
            return
        if self.spread and network.fresh:
            band = (MIN_SPREAD, math.inf)
            yield Finding("uncentered", NETWORK, "input_stable_rank", self.spread, 1.0, band, 1.5, "usual")
        layer = network.row(self.large_outputs)
        bias = network.vectors.get(f"{self.large_outputs}.bias")
        heavy = layer is not None and layer.gain > HEAVY  # weights or bias are then the cause, not inputs
        heavy |= bias is not None and bias.get("weight_natural") > FEATURE_LIMIT / 2
        largest = self.first.get(self.large_outputs, 1.0 if self.late else max(self.first.values()))
        if not heavy and (network.fresh or not self.late):
            yield Finding("features", NETWORK, "feature_rms", largest, 1.0, (0.0, FEATURE_LIMIT), 1.5, "usual")
        if self.smallest and network.fresh and not self.late:
            band = (FEATURE_LEAST, math.inf)
            yield Finding("features_vanish", NETWORK, "feature_rms", self.smallest, 1.0, band, 1.5, "usual")

    def _heads(self, network: Network) -> Iterator[Finding]:
        """Compare the initial weights of output layers whose first outputs were large with those of other layers."""
        for row in network.peers:
            large = row.info.role == "readout" and self.first.get(row.name, 0.0) > HEAD_OUTPUTS
            if large and network.fresh and not self.late and (ratio := network.initial_gain(row)) > 0:
                value = row.get("weight_natural")
                yield Finding("head", row.name, "weight_natural", value, value / ratio, (0.0, HEAD_LIMIT))

    def _signal(self, network: Network) -> Iterator[Finding]:
        """Check that small initial weights leave enough of the difference between samples for the output layers.

        Biases may keep features large, but these are then the same for all samples. Once outputs differ, the finding
        ends.
        """
        if not self.small_gain or not (spread := _spread_of_outputs(network)) >= 0:
            return
        spread, band = max(spread, LEAST_SPREAD / 100), (LEAST_SPREAD, math.inf)
        yield Finding("signal_vanishes", NETWORK, "input_stable_rank", spread, 1.0, band, 1.5, "usual")

    def targets(self, measurement: Measurement, network: Network) -> Iterator[Finding]:
        """Compare the distance that the loss asks outputs to move at the start with their usual size, 1."""
        distance = measurement.summary.get("loss_distance", math.nan)
        # The distance tells nothing about targets if the loss gets an unfit input, or has a part without a gradient. If
        # gradients arrive at a layer that no optimizer holds, another one may have been taken for the output layer.
        forgotten = any(row.settings.forgotten for row in network.rows)
        if measurement.summary.get("unfit_loss_input", 0.0) > 0 or network.cut_off or forgotten:
            return
        if not (self.distance or math.isnan(distance)) and network.is_early:
            sizes = [row.get("feature_rms") for row in network.peers if row.info.role == "readout"]
            self.distance = distance / max([1.0, *sizes])  # max ignores NaN that comes after a number
        if self.distance > 0:
            band = (0.0, DISTANCE_LIMIT)
            yield Finding("targets", NETWORK, "loss_distance", self.distance, 1.0, band, AT_ONCE, "usual")

    def _growth(self, network: Network) -> Iterator[Finding]:
        """Check the largest outputs of a hidden layer after the first steps: steps that are too large let them grow."""
        if not self.first or network.is_early:
            return
        largest = nanmax(row.get("feature_rms") for row in network.moved_by_rate if row.info.role == "operator")
        if not math.isnan(largest):
            limit = max(GROWN_LIMIT, GROWTH * max(self.first.values()))
            yield Finding("features_grow", NETWORK, "feature_rms", largest, limit, (0.0, 1.0), against="usual")


def _spread_of_data(network: Network) -> float:
    """Return the spread of data that hardly differ between samples; 0 if they differ, or are embedded."""
    if not network.peers or any(row.info.role == "embedding" for row in network.rows):
        return 0.0
    spread = network.input_spreads.get(network.peers[0].name, 0.0)
    return float(f"{spread:.4g}") if ROUNDING < spread < MIN_SPREAD else 0.0


def _spread_of_outputs(network: Network) -> float:
    """Return the largest spread between samples of the inputs of an output layer; NaN if none is known."""
    spreads = network.input_spreads
    return nanmax(spreads.get(row.name, math.nan) for row in network.peers if row.info.role == "readout")


def _lost_gain(network: Network) -> float:
    """Return the median gain of weights so small that inputs differ but those of output layers do not; 0 for others.

    Branches whose gains begin next to zero leave outputs alike on purpose, as do layers that begin at zero.
    """
    gain = geometric_median(row.gain for row in network.peers)
    inputs = nanmax(row.get("input_stable_rank") for row in network.peers) - 1
    lost = _spread_of_outputs(network) < LEAST_SPREAD and inputs > INPUTS_DIFFER
    early = network.is_early and network.fresh and not (network.from_zero or network.has_small_gains)
    return gain if early and lost and 0 < gain < LEAST_GAIN else 0.0
