"""The readout over time: for how long it has taken nearly all of the decrease of the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from spectral_monitor.condition.findings import AT_ONCE, Finding
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.trends.memory import Memory
from spectral_monitor.condition.verdict import NETWORK
from spectral_monitor.measurement import Measurement

LIMIT = 0.95
"""Share of the readout in the decrease of the loss; up to 0.83 in healthy networks at most measurements.

Theorem 6.3 of the Feature Speed paper asks that hidden layers keep a share of their own when networks grow.
"""
LONG = 8
"""Consecutive measurements above the limit that make a finding."""
STEPS = 100
"""Steps that these must span: while a readout that began at zero grows, hidden layers have no gradient."""


@dataclass
class ReadoutTrend(Memory):
    """Counts consecutive measurements at which the readout takes nearly all of the decrease."""

    count: int = 0  # consecutive measurements
    since: int = 0  # step of the first of them

    def findings(self, measurement: Measurement, network: Network) -> Iterator[Finding]:
        """Yield the share of the readout, healthy or not, if hidden layers should learn from the start."""
        share = measurement.summary.get("readout_share", math.nan)
        if math.isnan(share) or not _should_learn(network):
            return
        self.count = self.count + 1 if share > LIMIT else 0
        self.since = measurement.step if self.count <= 1 else self.since
        lasts = self.count >= LONG and measurement.step - self.since >= STEPS
        value, band = max(share, 0.0), (0.0, LIMIT if lasts else math.inf)
        yield Finding("readout_takes_all", NETWORK, "readout_share", value, 1.0, band, AT_ONCE, "all of the decrease")


def _should_learn(network: Network) -> bool:
    """Return whether all hidden layers are trained from the start, with a single readout at the usual rate.

    If there are several readouts, such as of an actor and a critic, the one with the largest loss takes all.
    """
    trained = [row.is_trained for row in network.peers if row.info.role == "operator"]
    rates = [network.rates.get(row.name) for row in network.peers if row.info.role == "readout"]
    one_readout = len(rates) == 1 and (rates[0] is None or not rates[0].purpose)
    return one_readout and network.fresh and len(trained) > 1 and all(trained)
