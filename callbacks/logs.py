"""Measurements on their way to loggers, and text on its way to the console."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from spectral_monitor.measurement import Measurement
from spectral_monitor.reporting.jsonlines import RUN_FILE, JSONLinesSink
from spectral_monitor.reporting.sinks import Sink
from spectral_monitor.reporting.tensorboard import TensorBoardSink, can_write_to
from spectral_monitor.reporting.wandb import WandbSink
from spectral_monitor.warnings import SpectralConditionWarning

log = logging.getLogger("lightning.pytorch.spectral_monitor")


@rank_zero_only
def show(text: str) -> None:
    """Print, on the first process."""
    print(f"\n{text}\n", flush=True)


@rank_zero_only
def tell(text: str) -> None:
    """A line among Lightning's own."""
    log.info(text)


def warn_of_condition(text: str) -> None:
    """That a layer has begun to violate the condition, on the first process."""
    rank_zero_warn(text, category=SpectralConditionWarning, stacklevel=4)


class LoggerSink:
    """Gives a Lightning logger every number under its key."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self.name = type(logger).__name__

    def write(self, measurement: Measurement) -> None:
        """All scalars in one call."""
        self._logger.log_metrics(measurement.scalars(), step=measurement.step)

    def close(self) -> None:
        """The trainer closes its loggers itself."""


def sinks_of(trainer: pl.Trainer, settings: Mapping[str, Any], heatmap_every: int, histograms: bool) -> list[Sink]:
    """One for each logger of the trainer, and a file of measurements beside what the first one writes.

    Args:
        trainer: with its loggers.
        settings: for tables of hyperparameters.
        heatmap_every: measurements from one set of pictures to the next.
        histograms: whether TensorBoard gets some.
    """
    sinks: list[Sink] = []
    for logger in trainer.loggers:
        sink: Sink = LoggerSink(logger)
        if isinstance(logger, TensorBoardLogger) and can_write_to(logger.experiment):
            sink = TensorBoardSink(logger.experiment, settings, heatmap_every, histograms)
        elif isinstance(logger, WandbLogger):
            sink = WandbSink(logger.experiment, settings, heatmap_every)
        sinks.append(sink)
    folders = [folder for folder in map(_folder, trainer.loggers) if folder is not None]
    return [*sinks, *(JSONLinesSink(folder / RUN_FILE) for folder in folders[:1])]


def _folder(logger: Logger) -> Path | None:
    """Where a logger keeps what belongs to one run; Lightning keeps its checkpoints there too."""
    if isinstance(logger, TensorBoardLogger | CSVLogger):
        return Path(logger.log_dir)
    if not isinstance(logger.save_dir, str | os.PathLike) or logger.version is None:
        return None
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return Path(logger.save_dir) / str(logger.name) / version
