"""A limit of infinite width beside a run: a run of its own in the folder ``limit``."""

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
"""Another name than that of a training's file, which is looked for in all folders."""


def write_limit(
    measurements: Iterable[Measurement], folder: str | os.PathLike[str], sinks: Sequence[Sink] = ()
) -> Path:
    """Write a limit as a run of its own, beside that of a training.

    In ``folder/limit`` there is then a file of JSON lines, which ``spectral-monitor report folder`` draws as dashed
    lines. Beside it are TensorBoard events under the same tags as the training's, so that TensorBoard shows the run
    ``limit`` in the same charts. A run of W&B takes ``sinks=[WandbSink(wandb.init(group=..., name="limit"))]``, with
    the group of the training.

    Args:
        measurements: at infinite width, such as :func:`spectral_monitor.scaling.reference_run` returns.
        folder: of the training's run.
        sinks: others that are to have them.

    Returns:
        The folder ``folder/limit``.

    Raises:
        ValueError: there are no measurements.
        FileExistsError: there is a limit already.
    """
    from torch.utils.tensorboard import SummaryWriter

    found = list(measurements)
    if not found:
        raise ValueError("there is no limit to write: no measurements")
    target = Path(folder) / FOLDER
    if (target / FILE).exists():
        raise FileExistsError(f"there is a limit in {str(target)!r} already")
    writer: Any = SummaryWriter(str(target))
    every: list[Sink] = [JSONLinesSink(target / FILE), TensorBoardSink(writer, heatmap_every=0), *sinks]
    for sink in every:
        for measurement in found:
            sink.write(measurement)
        sink.close()
    writer.close()
    return target


def read_limit(folder: str | os.PathLike[str]) -> list[Measurement]:
    """Return the limit in the folder of a run, or in that of a run's file; none if there is none."""
    place = Path(folder)
    path = (place.parent if place.is_file() else place) / FOLDER / FILE
    return list(read_measurements(path)) if path.is_file() else []
