"""Measurements on their way to loggers."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectral_monitor.arguments import is_integer
from spectral_monitor.callbacks.lightning_packages import is_instance
from spectral_monitor.callbacks.progress_bar import StatusLine
from spectral_monitor.measurement import Measurement
from spectral_monitor.messages import WarnOnce
from spectral_monitor.reporting.content.essentials import Log, checked_log, essentials
from spectral_monitor.reporting.content.headline import brief
from spectral_monitor.reporting.content.history import History
from spectral_monitor.reporting.content.tally import is_judged
from spectral_monitor.reporting.files.jsonlines import JSONLinesSink, run_file_name
from spectral_monitor.reporting.html.report import whole_page
from spectral_monitor.reporting.sinks import Sink, Sinks, check_free_space, checked_sinks, is_remote
from spectral_monitor.reporting.tensorboard_sink.sink import TensorBoardSink, can_write_to
from spectral_monitor.reporting.wandb_sink.sink import WandbSink

if TYPE_CHECKING:
    import lightning.pytorch as pl

OFFSET = -1
"""Lightning logs the first optimizer step at 0; measurements count steps from 1."""
PAGE = "spectral_monitor.html"
_REFUSED = re.compile(r"[^\w\-. /]")
"""Characters that MLflow does not allow in keys."""


class LoggerSink:
    """Gives a Lightning logger the essential numbers, and at the end the page, if it takes files (MLflow, Comet).

    The logger saves its numbers at once, and only while the disk has space: a trainer raises an error if its logger
    cannot write them at the end.
    """

    def __init__(self, logger: Any, log: Log = "essential", requested: Sequence[str] = ()) -> None:
        self._logger = logger
        self.name = type(logger).__name__
        self._log, self._requested = log, tuple(requested)
        self._history = History() if is_instance(logger, "loggers.MLFlowLogger", "loggers.CometLogger") else None

    def write(self, measurement: Measurement) -> None:
        """Log all scalars in one call."""
        if is_instance(self._logger, "loggers.CSVLogger"):
            check_free_space(self._logger.log_dir)
        scalars = essentials(measurement, self._log, self._requested)
        if is_instance(self._logger, "loggers.MLFlowLogger"):
            scalars = {_REFUSED.sub("_", key): value for key, value in scalars.items()}
        self._logger.log_metrics(scalars, step=measurement.step + OFFSET)
        self._logger.save()
        if self._history is not None:
            self._history.add(measurement)

    def close(self) -> None:
        """Log the page; the trainer closes its loggers itself."""
        history, self._history = self._history, None
        text = None if history is None else whole_page(history)
        if text is None:
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / PAGE
            path.write_text(text, encoding="utf-8", errors="replace")
            if is_instance(self._logger, "loggers.MLFlowLogger"):
                self._logger.experiment.log_artifact(self._logger.run_id, str(path))
            elif is_instance(self._logger, "loggers.CometLogger"):
                self._logger.experiment.log_asset(str(path), file_name=PAGE, copy_to_tmp=True)


class SinkManager:
    """The receivers of measurements on the first process: loggers, files, the user's sinks, the progress bar.

    Each monitor of a trainer writes its own file, because all measurements in a file must have the same layers.

    Args:
        settings: for the config of W&B.
        warn: receives a message on a sink that fails; each message once.
        requested: quantities that are essential because the user has named them.

    Attributes:
        folder: of the run, with its file of measurements; ``None`` without one.

    Raises:
        TypeError: an object that is no sink.
        ValueError: ``heatmap_every`` is no number of measurements, or ``histograms`` neither true nor false.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        heatmap_every: int,
        histograms: bool,
        settings: Mapping[str, Any],
        warn: WarnOnce,
        log: Log = "essential",
        requested: Sequence[str] = (),
    ) -> None:
        if not is_integer(heatmap_every, 0):
            raise ValueError(f"heatmap_every must be an integer >= 0, got {heatmap_every!r}")
        if not isinstance(histograms, bool):
            raise ValueError(f"histograms must be True or False, got {histograms!r}")
        self.sinks, self.heatmap_every, self.histograms = checked_sinks(sinks), heatmap_every, histograms
        self.log, self._requested = checked_log(log), tuple(requested)
        self._settings = dict(settings)
        self._warn = warn
        self._all: Sinks | None = None
        self._status = StatusLine()
        self.folder: Path | None = None

    def begin(self, trainer: pl.Trainer, index: int) -> None:
        """Open the receivers; ``index``: of this monitor among those of the trainer, from 1."""
        if not trainer.is_global_zero:
            return
        sinks: list[Sink] = []
        for logger in trainer.loggers:
            try:
                sinks.append(self._sink(logger))
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                self._warn(f"{type(logger).__name__} gets no measurements ({reason})", error)
        self.folder = next(filter(None, map(_folder, trainer.loggers)), None)
        if self.folder is not None:
            sinks.append(JSONLinesSink(self.folder / run_file_name(index), _about(trainer)))
        self._all = Sinks([*sinks, *self.sinks], self._warn)
        self._status.begin(trainer)

    def write(self, measurement: Measurement) -> None:
        """Give a measurement to all receivers."""
        if self._all is not None:
            self._all.write(measurement)
            if is_judged(measurement) or not self._status.text:  # else the last text still holds
                self._status.text = brief(measurement)

    def end(self) -> None:
        """Close all receivers; safe to call at any time."""
        self._status.end()
        if self._all is not None:
            self._all.close()
        self._all = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without parts that belong to a fit."""
        return {**vars(self), "_all": None, "_status": StatusLine()}

    def _sink(self, logger: Any) -> Sink:
        if is_instance(logger, "loggers.TensorBoardLogger") and can_write_to(logger.experiment):
            return TensorBoardSink(logger.experiment, self.heatmap_every, self.histograms, **self._options)
        if is_instance(logger, "loggers.WandbLogger"):
            return WandbSink(logger.experiment, self._settings, self.heatmap_every, **self._options)
        return LoggerSink(logger, self.log, self._requested)

    @property
    def _options(self) -> dict[str, Any]:
        return {"log": self.log, "asked": self._requested, "offset": OFFSET}


def _folder(logger: Any) -> Path | None:
    """Return the folder of one run on this machine; Lightning keeps its checkpoints there too."""
    if is_instance(logger, "loggers.TensorBoardLogger", "loggers.CSVLogger"):
        return None if is_remote(logger.log_dir) else Path(logger.log_dir)
    folder = logger.save_dir
    if not isinstance(folder, str | os.PathLike) or is_remote(folder) or logger.version is None:
        return None
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return Path(folder) / str(logger.name) / version


def _about(trainer: pl.Trainer) -> dict[str, str]:
    """Return a description of the run: the classes of its model and its optimizers."""
    optimizers = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in trainer.optimizers))
    return {"model": type(trainer.lightning_module).__name__, **({"optimizer": optimizers} if optimizers else {})}
