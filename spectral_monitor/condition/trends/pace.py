"""Steps of the whole network: too far to settle, hardly anywhere, or past where the loss is lowest."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from spectral_monitor.condition.findings import Finding
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.verdict import NETWORK
from spectral_monitor.functional.medians import geometric_median
from spectral_monitor.measurement import Measurement

SPEED_LIMIT = 1.1
"""Healthy weights have moved by less than this, times the root of the number of steps, of the size they began with."""
SLOW = 0.0065
"""The root of the fastest layer's relative update times the median layer's natural one, at the learning rate's peak:
more than four times this in networks that are tuned for the steps they have, about this at published rates that are
meant for many more steps than a small network needs.
"""
NARROW = 32
"""Layers with fewer inputs take steps that are as much smaller at the rates that people use for them."""
SETTLED = 16
"""From this step on a network that hardly moves is said to."""
RACING = 0.35
"""A relative update of the median layer that few healthy networks reach, and only in their first steps."""
RETURN, SMALL_PART, PROGRESS = 3.0, 0.25, 0.9
"""A loss of ``RETURN`` times the lowest so far is back, if it is above ``SMALL_PART`` of the first; one above
``PROGRESS`` of the first has not been lowered. Both are a matter of the learning rate in networks that race only:
targets that move, as in reinforcement learning, do the same.
"""
EDGE, EDGES = 2.0, 5
"""Steps of this edge no longer lower the loss of their own batch; so many of them have a median. Networks that train,
with momentum and small batches too, stay below 1.3, and at 2 where full batches make the rate settle there. Where
gradients are not those of the loss (straight-through estimators, targets that are held fixed) it may be 3 in training
that goes well; hence the loss is looked at too.
"""


class PaceTrend:
    """Watches the steps of all layers together, and the losses that they lead to.

    Attributes:
        pace: the largest relative update of the median layer so far; NaN if none is known.
        first_pace: of the first measurement that has one, when steps are not yet larger for being large.
        fastest: relative update of the fastest layer, at the peak of its learning rate; 0 if none is known.
    """

    def __init__(self) -> None:
        self._natural = 0.0  # natural update of the median layer, there too
        self._rate = math.nan  # highest learning rate at the measurement before
        self._looked = 0
        self._edges: list[tuple[float, float]] = []  # the latest ones that are known, and the losses there
        self._losses: tuple[float, ...] = ()  # the first and the lowest, if they are known
        self.pace = self.first_pace = math.nan
        self.fastest = 0.0

    def findings(self, measurement: Measurement, network: Network) -> Iterator[Finding]:
        """Yield what can be said of its steps, healthy or not."""
        yield from self._speed(network)
        yield from self._lost_ground(measurement, network)
        yield from self._overshooting(measurement)
        yield from self._slowness(network)

    def _speed(self, network: Network) -> Iterator[Finding]:
        """Yield how far the median layer has moved since the start, for so many steps."""
        ratios = [row.get("update_ratio") for row in network.moved_by_rate if not network.began_small(row)]
        ratio = geometric_median(ratios)
        self.pace = self.pace if self.pace >= ratio or math.isnan(ratio) else ratio
        self.first_pace = ratio if math.isnan(self.first_pace) else self.first_pace
        if not math.isnan(network.drift):
            usual = SPEED_LIMIT * math.sqrt(network.step)
            against = "a healthy pace"
            yield Finding("rates_too_large", NETWORK, "drift_ratio", network.drift, usual, (0.0, 1.0), against=against)

    def _lost_ground(self, measurement: Measurement, network: Network) -> Iterator[Finding]:
        """Yield the loss beside the first and the lowest one, in a network whose steps are large."""
        loss = measurement.summary.get("loss", math.nan)
        if not self._losses and network.is_early and not math.isnan(loss):
            self._losses = loss, loss
        if not self._losses or math.isnan(loss):
            return
        first, lowest = self._losses
        if min(loss, lowest) > 0 and network.step >= SETTLED and self.pace > RACING:
            limits = [(PROGRESS * first, f"it began with {first:.2g}")]
            if loss >= SMALL_PART * first:
                limits.append((RETURN * lowest, f"it was {lowest:.2g} before"))
            limit, against = min(limits)
            yield Finding("loss_returns", NETWORK, "loss", loss, limit, (0.0, 1.0), 1.5, against)
        self._losses = first, min(loss, lowest)

    def _overshooting(self, measurement: Measurement) -> Iterator[Finding]:
        """Yield how long steps have been along their own lines, once there are enough; 1 where the loss falls."""
        edge, loss = (measurement.summary.get(key, math.nan) for key in ("edge", "loss"))
        if not math.isnan(edge):
            self._edges = [*self._edges, (edge, loss)][-EDGES:]
        if len(self._edges) < EDGES:
            return
        losses = [loss for _, loss in self._edges]
        falls = max(losses[-2:]) < min(losses[:2])
        median = statistics.median(edge for edge, _ in self._edges)
        if median > 0:
            median = min(median, 1.0) if falls else median
            against = "the step after which the loss is lowest"
            yield Finding("global_lr_too_large", NETWORK, "edge", median, 1.0, (0.0, EDGE), 1.5, against)

    def _slowness(self, network: Network) -> Iterator[Finding]:
        """Yield how large steps have been so far, if the network was not trained before and has taken its time."""
        moving = [row for row in network.moved_by_rate if row.get("update_ratio") > 0 and row.has_gradient]
        own = [row for row in moving if not network.began_small(row)]
        rises, self._rate = network.top_lr > 1.01 * self._rate, network.top_lr
        if not own:
            return
        self._looked += 1
        self.fastest = max(self.fastest, *(row.get("update_ratio") * row.to_peak for row in own))
        # The maximum of a number and NaN is that number.
        self._natural = max(self._natural, geometric_median(row.update * row.to_peak for row in own))
        if network.step < SETTLED or self._looked < 4 or rises or not network.fresh or not self._natural:
            return
        value = math.sqrt(self.fastest * self._natural)
        inputs = geometric_median(row.info.fan_in * row.taps for row in own)
        slow = SLOW * min(1.0, inputs / NARROW)
        yield Finding("rates_too_small", NETWORK, "update_natural", value, slow, (1.0, math.inf), 1.2, "healthy")

    def state_dict(self) -> dict[str, Any]:
        """Return plain types."""
        return {
            "pace": self.pace,
            "first_pace": self.first_pace,
            "fastest": self.fastest,
            "natural": self._natural,
            "rate": self._rate,
            "looked": self._looked,
            "losses": list(self._losses),
            "edges": [list(pair) for pair in self._edges],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.pace, self.first_pace = float(state["pace"]), float(state.get("first_pace", math.nan))
        self.fastest, self._looked = float(state["fastest"]), int(state["looked"])
        self._natural, self._rate = float(state["natural"]), float(state["rate"])
        self._losses = tuple(map(float, state.get("losses", ())))
        self._edges = [(float(edge), float(loss)) for edge, loss in state.get("edges", ())]
