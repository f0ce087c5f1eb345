"""A limit of infinite width beside a training run: a run of its own in the folder ``limit``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from spectral_monitor.measurement import Measurement
from spectral_monitor.reporting.files.jsonlines import JSONLinesSink, read_measurements
from spectral_monitor.reporting.sinks import Sink
from spectral_monitor.reporting.tensorboard_sink.sink import TensorBoardSink

FOLDER = "limit"
FILE = "limit.jsonl"
"""It differs from the name of a run's file, so that a search for runs does not find it."""


def write_limit(
    measurements: Iterable[Measurement], folder: str | os.PathLike[str], sinks: Sequence[Sink] = ()
) -> Path:
    """Write a limit as a run of its own, beside a training run.

    It writes a file of JSON lines to ``folder/limit``, which ``spectral-monitor report folder`` draws as dashed lines.
    It also writes TensorBoard events with the tags of the training run, so that TensorBoard shows the run ``limit`` in
    the same charts. For W&B pass ``sinks=[WandbSink(wandb.init(group=..., name="limit"))]`` with the group of the
    training run.

    Args:
        measurements: at infinite width, such as :func:`spectral_monitor.scaling.reference_run` returns.
        folder: of the training run.
        sinks: further receivers of the measurements.

    Returns:
        The folder ``folder/limit``.

    Raises:
        ValueError: there are no measurements.
        FileExistsError: there is a limit already.
    """
    from torch.utils.tensorboard import SummaryWriter

    measurements = list(measurements)
    if not measurements:
        raise ValueError("there is no limit to write: no measurements")
    target = Path(folder) / FOLDER
    if (target / FILE).exists():
        raise FileExistsError(f"{str(target)!r} already has a limit")
    writer: Any = SummaryWriter(str(target))
    all_sinks: list[Sink] = [JSONLinesSink(target / FILE), TensorBoardSink(writer, heatmap_every=0), *sinks]
    for sink in all_sinks:
        for measurement in measurements:
            sink.write(measurement)
        sink.close()
    writer.close()
    return target


def read_limit(folder: str | os.PathLike[str]) -> list[Measurement]:
    """Return the limit in the folder of a run, which may be given by a file in it; empty if there is none."""
    folder = Path(folder)
    path = (folder.parent if folder.is_file() else folder) / FOLDER / FILE
    return list(read_measurements(path)) if path.is_file() else []
