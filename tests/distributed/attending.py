"""Runs in which attention is watched by several processes."""

from __future__ import annotations

import math
from typing import Any

from spectral_monitor import SpectralMonitor
from tests.distributed.fitting import fit

KEYS = (
    "qk_gain",
    "qk_update",
    "attention_logit_max",
    "attention_entropy",
    "attention_entropy_lowest",
    "attention_sink",
)
LAYER = "net.blocks.0.qkv"


def measure(way: str) -> dict[str, Any]:
    """Return the numbers of the first block in each step, and the reasons for those that are missing."""
    monitor = SpectralMonitor(1, quantities=KEYS, mode="observe")
    fit(way, "transformer", 2, [monitor])
    last = monitor.latest
    values = {key: last.value(key, LAYER) for key in KEYS}
    return {"values": values, "why": {key: last.why(key, LAYER) for key in KEYS if math.isnan(values[key])}}
