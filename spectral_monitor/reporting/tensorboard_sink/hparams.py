"""Numbers of a run as metrics in TensorBoard's HPARAMS tab, beside the hyperparameters that a logger wrote.

TensorBoard shows the first session info and experiment of a run and ignores others; it reads the files of a run in the
order of their names. So the logger's entries are read and written again, with the metrics added, to a file that comes
first. The logger's own file does not change. If the logger writes to it again, nothing is lost: TensorBoard would show
the first hyperparameters anyway. A TensorBoard that read the logger's file earlier shows the metrics after a restart.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from typing import Any

FIRST = "events.out.tfevents.0000000000.spectral_monitor"
"""It sorts before the files of other writers, which have the time in place of the zeros."""
MAX_EVENTS = 200
"""Events of a file that are read; loggers write hyperparameters at the beginning."""


def merge(logdir: str, metrics: Sequence[str]) -> bool:
    """Add metrics, the tags of scalars, to the hyperparameters of a run; return whether there were hyperparameters.

    The writer of the run must have been flushed.

    Raises:
        OSError: the folder cannot be written to.
    """
    from tensorboard.compat import tf
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata
    from tensorboard.summary.writer.record_writer import RecordWriter

    contents, wall_time = _first(logdir)
    if metadata.SESSION_START_INFO_TAG not in contents:
        return False
    values = []
    for tag, content in contents.items():
        _add(content, metrics)
        values.append(Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(content)))
    file = RecordWriter(tf.io.gfile.GFile(os.path.join(logdir, FIRST), "wb"))
    for event in (Event(file_version="brain.Event:2"), Event(summary=Summary(value=values))):
        event.wall_time = wall_time
        file.write(event.SerializeToString())
    file.close()
    return True


def _first(logdir: str) -> tuple[dict[str, Any], float]:
    """Return the first experiment and session info in the files of a run, by tag, and the time they were written."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.compat import tf
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    contents: dict[str, Any] = {}
    wall_time = 0.0
    for path in sorted(tf.io.gfile.glob(os.path.join(logdir, "*tfevents*"))):
        if os.path.basename(path) == FIRST:
            continue
        for event in islice(EventFileLoader(path).Load(), MAX_EVENTS):
            for value in event.summary.value:
                tags = {metadata.EXPERIMENT_TAG, metadata.SESSION_START_INFO_TAG} - contents.keys()
                if value.tag in tags:
                    contents[value.tag] = HParamsPluginData.FromString(value.metadata.plugin_data.content)
                    wall_time = event.wall_time
        if contents:
            break
    return contents, wall_time


def _add(content: Any, metrics: Sequence[str]) -> None:
    """Add metrics to an experiment; a session info has none."""
    from tensorboard.plugins.hparams.api_pb2 import MetricInfo, MetricName

    if content.HasField("experiment"):
        tags = {info.name.tag for info in content.experiment.metric_infos}
        infos = [MetricInfo(name=MetricName(tag=tag)) for tag in metrics if tag not in tags]
        content.experiment.metric_infos.extend(infos)
