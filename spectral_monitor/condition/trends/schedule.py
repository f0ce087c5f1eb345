"""The learning rate over time: schedules that end long before training, or warm-ups that are longer than training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from spectral_monitor.condition.findings import AT_ONCE, Finding
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.optimizers.plans import FADED, FINAL
from spectral_monitor.condition.trends.memory import Memory
from spectral_monitor.condition.verdict import NETWORK
from spectral_monitor.measurement import Measurement

TIMES = 2
"""A schedule ended too early if training takes this many times its steps."""
STEPS = 32
"""First step at which a schedule may be found to have ended too early."""
HALF = 0.5
"""A warm-up is longer than training if less than this part of the learning rate is reached by the end."""


@dataclass
class ScheduleTrend(Memory):
    """Remembers the highest learning rate so far, and when it fell to a small part of that."""

    highest: float = 0.0
    since: int = 0  # step at which it fell; 0 if it has not
    faded: float = 0.0  # learning rate at that step

    def findings(self, measurement: Measurement, network: Network) -> Iterator[Finding]:
        """Yield the findings on warm-up and decay of the learning rate, healthy or not."""
        trained = [row.settings for row in network.rows if not row.settings.frozen]
        reached = max((settings.reached for settings in trained), default=1.0)
        yield Finding("warmup", NETWORK, "lr", reached, 1.0, (HALF, math.inf), AT_ONCE)
        lasts = max((settings.lasts for settings in trained), default=1.0)
        if lasts < 1 / TIMES:
            against = (
                f"will have fallen below {100 * FINAL:.0f} % of its highest value after {100 * lasts:.2g} % of training"
            )
            yield Finding("faded", NETWORK, "lr", lasts, 1.0, (1 / TIMES, 1.0), AT_ONCE, against)
            return
        lr, step = network.top_lr, measurement.step
        if not lr > 0:
            return
        self.highest = max(self.highest, lr)
        share = lr / self.highest
        if share > FADED:
            self.since = 0
        elif not self.since:
            self.since, self.faded = step, lr
        ended = self.since > 0 and step >= max(TIMES * self.since, STEPS)
        band = (FADED if ended else 0.0, 1.0)
        against = f"has fallen from {self.highest:.2g} to {self.faded:.2g} by step {self.since}, and training goes on"
        yield Finding("faded", NETWORK, "lr", share, 1.0, band, AT_ONCE, against)
