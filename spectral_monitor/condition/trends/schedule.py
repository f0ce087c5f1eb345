"""The learning rate over time: whether its schedule ends long before training does, or warms up beyond its end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from spectral_monitor.condition.findings import AT_ONCE, FADED, Finding
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.verdict import NETWORK
from spectral_monitor.measurement import Measurement

TIMES = 2
"""A schedule has ended too early when training has taken so many times the steps after which the rate had faded."""
STEPS = 32
"""From this step on."""
HALF = 0.5
"""A warm-up is longer than training if less than this part of the learning rate is reached by its end."""


class ScheduleTrend:
    """Notes since when the highest learning rate of all layers has been a small part of what it was."""

    def __init__(self) -> None:
        self._highest, self._since = 0.0, 0

    def findings(self, measurement: Measurement, network: Network) -> Iterator[Finding]:
        """Yield the learning rate over the highest so far, once training has gone on for long with so small a one."""
        reached = [row.settings.reached for row in network.rows if not row.settings.frozen]
        yield Finding("warmup", NETWORK, "lr", max(reached, default=1.0), 1.0, (HALF, math.inf), AT_ONCE)
        lr, step = network.top_lr, measurement.step
        if not lr > 0:
            return
        self._highest = max(self._highest, lr)
        part = lr / self._highest
        self._since = (self._since or step) if part <= FADED else 0
        over = self._since > 0 and step >= max(TIMES * self._since, STEPS)
        band = (FADED if over else 0.0, 1.0)
        against = f"has fallen from {self._highest:.2g} to {lr:.2g} by step {self._since}"
        yield Finding("faded", NETWORK, "lr", part, 1.0, band, AT_ONCE, against)

    def state_dict(self) -> dict[str, Any]:
        """Return plain types."""
        return {"highest": self._highest, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; from nothing where a judge of before kept none."""
        self._highest, self._since = float(state.get("highest", 0.0)), int(state.get("since", 0))
