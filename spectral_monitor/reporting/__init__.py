"""Reports for people: tables, panels, pictures, files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spectral_monitor.suggestions import lazy

if TYPE_CHECKING:
    from spectral_monitor.reporting.files.jsonlines import JSONLinesSink, read_measurements
    from spectral_monitor.reporting.sinks import Sink, Sinks
    from spectral_monitor.reporting.tensorboard_sink.sink import TensorBoardSink
    from spectral_monitor.reporting.text.role_table import role_table
    from spectral_monitor.reporting.text.table import measurement_table
    from spectral_monitor.reporting.wandb_sink.sink import WandbSink
    from spectral_monitor.reporting.wandb_sink.workspace import wandb_workspace

__all__ = [
    "JSONLinesSink",
    "Sink",
    "Sinks",
    "TensorBoardSink",
    "WandbSink",
    "measurement_table",
    "read_measurements",
    "role_table",
    "wandb_workspace",
]

_MODULE_OF = {
    "JSONLinesSink": "files.jsonlines",
    "Sink": "sinks",
    "Sinks": "sinks",
    "TensorBoardSink": "tensorboard_sink.sink",
    "WandbSink": "wandb_sink.sink",
    "measurement_table": "text.table",
    "read_measurements": "files.jsonlines",
    "role_table": "text.role_table",
    "wandb_workspace": "wandb_sink.workspace",
}

if not TYPE_CHECKING:  # lazy, so that files are read without torch
    __getattr__ = lazy(__name__, _MODULE_OF)
