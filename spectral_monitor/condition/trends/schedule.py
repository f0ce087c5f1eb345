"""The learning rate over time: schedules that end long before training, or warm-ups that are longer than training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from spectral_monitor.condition.findings import AT_ONCE, Finding
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.optimizers.plans import FADED, FINAL
from spectral_monitor.condition.verdict import NETWORK
from spectral_monitor.measurement import Measurement

TIMES = 2
"""A schedule ended too early if training takes this many times the steps of the schedule."""
STEPS = 32
"""First step at which that is said."""
HALF = 0.5
"""A warm-up is longer than training if less than this part of the learning rate is reached by the end."""


class ScheduleTrend:
    """Remembers the highest learning rate so far, and when it fell to a small part of that."""

    def __init__(self) -> None:
        self._highest, self._since, self._faded = 0.0, 0, 0.0

    def findings(self, measurement: Measurement, network: Network) -> Iterator[Finding]:
        """Yield the findings on warm-up and decay of the learning rate, healthy or not."""
        trained = [row.settings for row in network.rows if not row.settings.frozen]
        reached = max((its.reached for its in trained), default=1.0)
        yield Finding("warmup", NETWORK, "lr", reached, 1.0, (HALF, math.inf), AT_ONCE)
        lasts = max((its.lasts for its in trained), default=1.0)
        if lasts < 1 / TIMES:
            against = (
                f"will have fallen below {100 * FINAL:.0f} % of its highest value after {100 * lasts:.2g} % of training"
            )
            yield Finding("faded", NETWORK, "lr", lasts, 1.0, (1 / TIMES, 1.0), AT_ONCE, against)
            return
        lr, step = network.top_lr, measurement.step
        if not lr > 0:
            return
        self._highest = max(self._highest, lr)
        part = lr / self._highest
        if part > FADED:
            self._since = 0
        elif not self._since:
            self._since, self._faded = step, lr
        over = self._since > 0 and step >= max(TIMES * self._since, STEPS)
        band = (FADED if over else 0.0, 1.0)
        against = (
            f"has fallen from {self._highest:.2g} to {self._faded:.2g} by step {self._since}, and training goes on"
        )
        yield Finding("faded", NETWORK, "lr", part, 1.0, band, AT_ONCE, against)

    def state_dict(self) -> dict[str, Any]:
        """Return plain types."""
        faded = {"faded": self._faded} if self._faded else {}
        return {"highest": self._highest, "since": self._since, **faded}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, which is empty if an older version saved it."""
        self._highest, self._since = float(state.get("highest", 0.0)), int(state.get("since", 0))
        self._faded = float(state.get("faded", 0.0))
