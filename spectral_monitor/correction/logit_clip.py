"""A limit on attention logits: above it the learning rates of queries and keys are lowered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from spectral_monitor.correction.multiplier import Change
from spectral_monitor.layers.attention import AttentionBlock
from spectral_monitor.measurement import Measurement

QUANTITY = "attention_logit_max"
MIN_FACTOR = 1e-3
"""The smallest factor. Slower weights hardly change, so large logits have another cause then."""
RISE = 2.0
"""Growth of a factor at each measurement, once logits are below the limit again."""


class LogitClip:
    """Factors on the learning rates of queries and keys, 1 unless logits have passed the limit.

    At each measurement above the limit, a factor is divided by the square of the ratio between the block's largest
    logit and the limit, for a logit is a product of query and key. Weights are never touched.

    Attributes:
        factors: index of a layer that makes queries or keys -> its factor.

    Source: the limit on logits is that of QK-clip (arXiv 2507.20534, section 2.1), which divides weights instead.
    """

    def __init__(self, limit: float, blocks: Sequence[AttentionBlock]) -> None:
        self._limit = limit
        self._blocks = blocks
        self.factors = {part.layer: 1.0 for block in blocks for part in (block.query, block.key)}

    def update(self, measurement: Measurement) -> list[Change]:
        """Adapt the factors to the logits of a measurement; return the changes, one for each block, at its queries."""
        changes = []
        for block in self._blocks:
            logit = float(measurement.values[QUANTITY][block.layer])
            if math.isnan(logit):
                continue
            before = self.factors[block.layer]
            ratio = logit / self._limit
            after = max(before / ratio**2, MIN_FACTOR) if ratio > 1 else min(before * RISE, 1.0)
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
        """Go on from a state; at 1 if the earlier run had no limit."""
        self.factors = {layer: float(state.get(str(layer), 1.0)) for layer in self.factors}
