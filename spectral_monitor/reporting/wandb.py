"""Weights & Biases: the same in one call per measured step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spectral_monitor.measurement import Measurement


class WandbSink:
    """Logs measurements to a W&B run."""

    def __init__(self, run: Any, settings: Mapping[str, Any] | None = None, heatmap_every: int = 20) -> None:
        self._run = run

    def write(self, measurement: Measurement) -> None:
        self._run.log({**measurement.scalars(), "trainer/global_step": measurement.step})

    def close(self) -> None:
        pass
