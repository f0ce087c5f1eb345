"""Attention over time: logits that grow without bound, and heads that attend to a single key for long."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from spectral_monitor.condition.findings import AT_ONCE, Finding
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.trends.memory import Memory
from spectral_monitor.measurement import Measurement

LOGIT_LIMIT = 50.0
"""At larger logits the softmax attends to a single key; diverging runs pass this limit."""
GROWTH = 1.5
"""Logits are growing if they are this many times the smallest so far; those of a trained model may just be large."""
ENTROPY_LIMIT = 0.05
"""A head whose entropy is below this part of the maximum attends to one key."""
LONG = 8
"""Consecutive measurements with such a head that make a finding."""


@dataclass
class AttentionTrend(Memory):
    """Remembers the smallest logit of each attention block, and for how long its entropy has been low."""

    smallest: dict[str, float] = field(default_factory=dict)  # block -> smallest logit so far
    collapsed: dict[str, int] = field(default_factory=dict)  # block -> consecutive measurements of low entropy

    def findings(self, measurement: Measurement, network: Network) -> Iterator[Finding]:
        """Yield the findings on each attention block, healthy or not."""
        for row in network.rows:
            name = row.name
            logit, entropy = row.get("attention_logit_max"), row.get("attention_entropy_lowest")
            if "attention_logit_max" in measurement.values and logit > 0:
                smallest = self.smallest[name] = min(logit, self.smallest.get(name, math.inf))
                high = LOGIT_LIMIT if logit > GROWTH * smallest else math.inf
                against = f"grown from {smallest:.2g}"
                yield Finding("logits_exploding", name, "attention_logit_max", logit, 1.0, (0.0, high), against=against)
            if (key := "attention_entropy_lowest") in measurement.values and entropy >= 0:
                count = self.collapsed[name] = self.collapsed.get(name, 0) + 1 if entropy < ENTROPY_LIMIT else 0
                band = (ENTROPY_LIMIT if count >= LONG else 0.0, math.inf)
                yield Finding("attention_collapsed", name, key, entropy, 1.0, band, AT_ONCE, "a healthy head")
