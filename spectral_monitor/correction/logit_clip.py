"""Attention logits that pass a limit: the learning rates of the queries and keys that make them are lowered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from spectral_monitor.correction.multiplier import Change
from spectral_monitor.layers.attention import AttentionBlock
from spectral_monitor.measurement import Measurement

QUANTITY = "attention_logit_max"
LEAST = 1e-3
"""The smallest factor. What is slower than that no longer changes, and logits that stay large are not its doing."""
RISE = 2.0
"""By what a factor rises, at each measurement, once logits are below the limit again."""


class LogitClip:
    """Factors on the learning rates of queries and keys, 1 unless logits have passed the limit.

    At each measurement above the limit, a factor is divided by how many times the limit the largest logit of the block
    is, squared, for a logit is a product of both; weights are never touched.

    Attributes:
        factors: layer index -> the factor, of queries and keys.

    Source: the limit on logits is that of QK-clip (arXiv 2507.20534, section 2.1), which divides weights instead.
    """

    def __init__(self, limit: float, blocks: Sequence[AttentionBlock]) -> None:
        self._limit = limit
        self._blocks = blocks
        self.factors = {part.layer: 1.0 for block in blocks for part in (block.query, block.key)}

    def update(self, measurement: Measurement) -> list[Change]:
        """Look at the logits of a measurement; return the changes, one for each block, at its queries."""
        changes = []
        for block in self._blocks:
            logit = float(measurement.values[QUANTITY][block.layer])
            if math.isnan(logit):
                continue
            before = self.factors[block.layer]
            over = logit / self._limit
            after = max(before / over**2, LEAST) if over > 1 else min(before * RISE, 1.0)
            self.factors |= {part.layer: after for part in (block.query, block.key)}
            if after != before:
                name = measurement.layers[block.layer].name
                multiplier = float(measurement.values["lr_multiplier"][block.layer])
                changes.append(Change(name, multiplier, multiplier * after / before, logit, self._limit, QUANTITY))
        return changes

    def state_dict(self) -> dict[str, float]:
        """Return plain numbers, by the index of the layer."""
        return {str(layer): factor for layer, factor in self.factors.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; at 1 where a run of before had no limit."""
        self.factors = {layer: float(state.get(str(layer), 1.0)) for layer in self.factors}
