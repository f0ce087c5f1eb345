"""The readout over time: for how long it has been taking nearly all of the loss's decrease."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from spectral_monitor.condition.findings import AT_ONCE, Finding
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.verdict import NETWORK
from spectral_monitor.measurement import Measurement

LIMIT = 0.95
"""Share of the readout in what a step takes off the loss: of healthy networks up to 0.83 at most measurements.

Theorem 6.3 of the Feature Speed paper asks that hidden layers keep a share of their own when networks grow.
"""
LONG = 8
"""Measurements in a row that this must last."""
STEPS = 100
"""Steps that it must last: where a readout begins at zero, hidden layers have no gradient before it has grown."""


class ReadoutTrend:
    """Counts the measurements in a row at which the readout takes nearly all."""

    def __init__(self) -> None:
        self._count = self._since = 0  # measurements in a row, and the step of the first

    def findings(self, measurement: Measurement, network: Network) -> Iterator[Finding]:
        """Yield the readout's share, healthy or not, where hidden layers are there to learn from the start."""
        share = measurement.summary.get("readout_share", math.nan)
        if math.isnan(share) or not _is_to_learn(network):
            return
        self._count = self._count + 1 if share > LIMIT else 0
        self._since = measurement.step if self._count <= 1 else self._since
        lasts = self._count >= LONG and measurement.step - self._since >= STEPS
        band = (0.0, LIMIT if lasts else math.inf)
        share, against = max(share, 0.0), "all of the decrease"
        yield Finding("readout_takes_all", NETWORK, "readout_share", share, 1.0, band, AT_ONCE, against)

    def state_dict(self) -> dict[str, Any]:
        """Return plain types."""
        return {"count": self._count, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; from nothing where a judge of before knew no shares."""
        self._count, self._since = int(state.get("count", 0)), int(state.get("since", 0))


def _is_to_learn(network: Network) -> bool:
    """Return whether all hidden layers are trained from the start, beside a single readout that has no rate of its own.

    Of several readouts, as of an actor and a critic, the one with the largest loss takes all.
    """
    hidden = [row.lr > 0 and not row.settings.frozen for row in network.peers if row.info.role == "operator"]
    heads = [network.rates.get(row.info.name) for row in network.peers if row.info.role == "readout"]
    alike = len(heads) == 1 and (heads[0] is None or not heads[0].purpose)
    return alike and network.fresh and len(hidden) > 1 and all(hidden)
