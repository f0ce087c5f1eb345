"""Attention over time: logits that grow out of bounds, and heads that look at a single key for long."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from spectral_monitor.condition.findings import AT_ONCE, Finding
from spectral_monitor.condition.network import Network
from spectral_monitor.measurement import Measurement

LOGIT_LIMIT = 50.0
"""At larger logits the softmax attends to a single key; diverging runs pass this limit."""
GROWTH = 1.5
"""Logits are growing if they are this many times the smallest so far; those of a trained model may just be large."""
ENTROPY_LIMIT = 0.05
"""A head whose entropy is below this part of the maximum looks at one key."""
LONG = 8
"""Consecutive measurements with such a head that make a finding."""


class AttentionTrend:
    """Remembers the smallest logit of each attention block, and for how long its entropy has been low."""

    def __init__(self) -> None:
        self._smallest: dict[str, float] = {}  # block -> smallest logit so far
        self._collapsed: dict[str, int] = {}  # block -> consecutive measurements of low entropy

    def findings(self, measurement: Measurement, network: Network) -> Iterator[Finding]:
        """Yield the findings on each attention block, healthy or not."""
        for row in network.rows:
            name = row.name
            logit, entropy = row.get("attention_logit_max"), row.get("attention_entropy_lowest")
            if "attention_logit_max" in measurement.values and logit > 0:
                smallest = self._smallest[name] = min(logit, self._smallest.get(name, math.inf))
                high = LOGIT_LIMIT if logit > GROWTH * smallest else math.inf
                against = f"grown from {smallest:.2g}"
                yield Finding("logits_exploding", name, "attention_logit_max", logit, 1.0, (0.0, high), against=against)
            if "attention_entropy_lowest" in measurement.values and entropy >= 0:
                count = self._collapsed[name] = self._collapsed.get(name, 0) + 1 if entropy < ENTROPY_LIMIT else 0
                band = (ENTROPY_LIMIT if count >= LONG else 0.0, math.inf)
                key = "attention_entropy_lowest"
                yield Finding("attention_collapsed", name, key, entropy, 1.0, band, AT_ONCE, "a healthy head")

    def state_dict(self) -> dict[str, Any]:
        """Return plain types; empty where there is no attention."""
        found = {"smallest": dict(self._smallest), "collapsed": dict(self._collapsed)}
        return found if any(found.values()) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, which is empty if an older version saved it."""
        self._smallest = dict(state.get("smallest", {}))
        self._collapsed = dict(state.get("collapsed", {}))
