"""The loss as a sign of steps that are too large, or of a loss that nothing bounds from below."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

from spectral_monitor.condition.findings import AT_ONCE, Finding
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.trends.memory import Memory
from spectral_monitor.condition.trends.pace import SETTLED
from spectral_monitor.condition.verdict import NETWORK
from spectral_monitor.fitting.medians import nanmax
from spectral_monitor.measurement import Measurement

RACING = 0.35
"""Few healthy networks reach this relative update of the median layer, and only in their first steps."""
RETURN, SMALL_PART, PROGRESS = 3.0, 0.25, 0.9
"""A loss has returned if it is ``RETURN`` times the lowest so far and above ``SMALL_PART`` of the first. It has made no
progress if it is above ``PROGRESS`` of the first. The learning rate is the cause only if steps are large: moving
targets, as in reinforcement learning, have the same effect.
"""
EDGE, EDGES = 2.0, 5
"""Steps of this edge no longer lower the loss of their own batch; number of steps whose median counts.

The edge stays below 1.3 in healthy networks, also with momentum and small batches. With full batches it may settle at
2. If gradients are not those of the loss (straight-through estimators, fixed targets) it may be 3 in healthy training,
so the loss has to agree.
"""
FEW_EDGES = 3
"""If the median of at least this number of known edges is below 1, steps are not too long, whatever the loss does:
targets that do not depend on the inputs, or weight decay that removes all weights, keep it where it began.
"""
MOST_OF_LOSS = 3.0
"""If steps would by their gradients lower a loss by this times itself, the gradient holds for a part of each step only.
The median over :data:`EDGES` measurements stays below 1 in healthy networks.
"""

DEPTH, FALLS = 1e4, 4
"""A loss that nothing bounds from below falls below 0 by more than ``DEPTH`` times its size at the start, and has a new
lowest value at ``FALLS`` measurements in a row. Likelihoods of densities fall below 0, too, but less far.
"""


@dataclass
class LossTrend(Memory):
    """Remembers losses, the edges of the latest steps, and the decreases that their gradients predict."""

    edges: list[list[float]] = field(default_factory=list)  # the latest known edges, each with its loss
    losses: list[float] = field(default_factory=list)  # the first and the lowest, if known
    promised: list[float] = field(default_factory=list)  # predicted decreases of the latest steps over the loss
    signed: bool = False  # whether the loss was ever below 0, so that it need not end at 0
    start: float = 0.0  # largest size of the loss in the first steps
    deepest: float = 0.0  # lowest loss below 0 so far
    falls: int = 0  # number of consecutive measurements at which the loss was lower than ever
    boundless: bool = False  # whether such a loss has been too far below 0

    def findings(self, measurement: Measurement, network: Network, pace: float) -> Iterator[Finding]:
        """Yield the findings on the loss, healthy or not.

        ``pace``: largest relative update of the median layer so far.
        """
        yield from self._lost_ground(measurement, network, pace)
        yield from self._overshooting(measurement)
        yield from self._promising(measurement, network)

    def endless(self, measurement: Measurement, network: Network) -> Iterator[Finding]:
        """Compare how far a loss has fallen below 0 with its size at the start.

        With several optimizers there may be several losses, so there is no finding.
        """
        loss = measurement.summary.get("loss", math.nan)
        if not math.isnan(loss):
            self.start = max(self.start, float(f"{abs(loss):.2g}")) if network.is_early else self.start
            self.falls = self.falls + 1 if loss < self.deepest else 0
            self.deepest = min(self.deepest, loss)
        if not self.start or len({row.settings.owner for row in network.rows} - {-1}) > 1:
            return
        depth = min(-self.deepest / self.start, 1e300)
        self.boundless |= depth > DEPTH and self.falls >= FALLS
        value = depth if self.boundless else 0.0
        against = f"{self.deepest:.2g}, {depth:.2g} times its size at the start"
        yield Finding("endless", NETWORK, "loss", value, 1.0, (0.0, DEPTH), AT_ONCE, against, measured=False)

    def _lost_ground(self, measurement: Measurement, network: Network, pace: float) -> Iterator[Finding]:
        """Compare the loss with the first and the lowest one, in a network whose steps are large.

        With several optimizers losses may compete and need not fall; but they should not rise either.
        """
        loss = measurement.summary.get("loss", math.nan)
        if not self.losses and network.is_early and not math.isnan(loss):
            self.losses = [loss, loss]
        if not self.losses or math.isnan(loss):
            return
        first, lowest = self.losses
        edges = [edge for edge, _ in self.edges]
        short_steps = len(edges) >= FEW_EDGES and statistics.median(edges) < 1
        if min(loss, lowest) > 0 and network.step >= SETTLED and pace > RACING and not short_steps:
            factor = RETURN if len(network.parts) > 1 else PROGRESS
            limits = [(factor * first, f"it began at {first:.2g} and should have fallen")]
            if loss >= SMALL_PART * first:
                limits.append((RETURN * lowest, f"it was {lowest:.2g} before"))
            limit, against = min(limits)
            yield Finding("loss_returns", NETWORK, "loss", loss, limit, (0.0, 1.0), 1.5, against)
        self.losses = [first, min(loss, lowest)]

    def _overshooting(self, measurement: Measurement) -> Iterator[Finding]:
        """Yield the median edge of the latest steps, at most 1 while the loss falls."""
        edge, loss = (measurement.summary.get(key, math.nan) for key in ("edge", "loss"))
        if not math.isnan(edge):
            self.edges = [*self.edges, [edge, loss]][-EDGES:]
        if len(self.edges) < EDGES:
            return
        median = statistics.median(edge for edge, _ in self.edges)
        losses = [loss for _, loss in self.edges]
        if max(losses[-2:]) < min(losses[:2]):
            median = min(median, 1.0)
        if median > 0:
            against = "the step after which the loss is lowest"
            yield Finding("global_lr_too_large", NETWORK, "edge", median, 1.0, (0.0, EDGE), 1.5, against)

    def _promising(self, measurement: Measurement, network: Network) -> Iterator[Finding]:
        """Yield the median predicted decrease of the latest steps over the loss.

        With several optimizers there may be several losses, of which only one is known.
        """
        change, loss = (measurement.summary.get(key, math.nan) for key in ("loss_change_predicted", "loss"))
        self.signed |= loss < 0
        if loss > 0 and not math.isnan(change):
            # The first steps of RMSprop are larger than the next ones.
            young = nanmax((1.0, *(row.settings.rectified for row in network.peers)))
            decrease = float(f"{-change / loss / young:.6g}")  # in few digits, to keep checkpoints small
            self.promised = [*self.promised, decrease][-EDGES:]
        if len(self.promised) < EDGES or self.signed or len(network.parts) > 1:
            return
        value = max(statistics.median(self.promised), 0.0)
        band, against = (0.0, MOST_OF_LOSS), "the loss itself"
        yield Finding("beyond_loss", NETWORK, "loss_change_predicted", value, 1.0, band, 1.5, against)
