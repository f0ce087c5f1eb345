"""What people see: tables, panels, pictures, files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spectral_monitor.suggestions import lazy

if TYPE_CHECKING:
    from spectral_monitor.reporting.jsonlines import JSONLinesSink, read_measurements
    from spectral_monitor.reporting.role_table import role_table
    from spectral_monitor.reporting.sinks import Sink, Sinks
    from spectral_monitor.reporting.table import measurement_table
    from spectral_monitor.reporting.tensorboard import TensorBoardSink
    from spectral_monitor.reporting.wandb import WandbSink
    from spectral_monitor.reporting.workspace import wandb_workspace

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

_WHERE = {
    "JSONLinesSink": "jsonlines",
    "Sink": "sinks",
    "Sinks": "sinks",
    "TensorBoardSink": "tensorboard",
    "WandbSink": "wandb",
    "measurement_table": "table",
    "read_measurements": "jsonlines",
    "role_table": "role_table",
    "wandb_workspace": "workspace",
}

if not TYPE_CHECKING:  # files are read without torch
    __getattr__ = lazy(__name__, _WHERE)
