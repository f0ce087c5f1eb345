"""Numbers of a run as metrics in TensorBoard's HPARAMS tab, beside the hyperparameters that a logger wrote.

Of several session infos or experiments in a run TensorBoard shows the first it reads and ignores the others; it reads
the files of a run in the order of their names. What a logger has written is therefore read, and written once more with
the metrics added, to a file that comes before the logger's. The logger's own file is as it was, and if it is written
to again nothing is lost: of its hyperparameters TensorBoard would have shown the first all the same. A TensorBoard that
has read the logger's file before there is another shows the metrics when it is started again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from typing import Any

FIRST = "events.out.tfevents.0000000000.spectral_monitor"
"""Comes before all files of other writers, which have the time at this place."""
MAX_EVENTS = 200
"""Events of a file; loggers write hyperparameters at the beginning."""


def merge(logdir: str, metrics: Sequence[str]) -> bool:
    """Add metrics, tags of scalars whose last values are shown, to the hyperparameters of a run, if there are any yet.

    What was written to the run must have been flushed. Return whether there were hyperparameters.

    Raises:
        OSError: the folder cannot be written to.
    """
    from tensorboard.compat import tf
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata
    from tensorboard.summary.writer.record_writer import RecordWriter

    found, when = _first(logdir)
    if metadata.SESSION_START_INFO_TAG not in found:
        return False
    for content in found.values():
        _add(content, metrics)
    file = RecordWriter(tf.io.gfile.GFile(os.path.join(logdir, FIRST), "wb"))
    values = [Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(of)) for tag, of in found.items()]
    for event in (Event(file_version="brain.Event:2"), Event(summary=Summary(value=values))):
        event.wall_time = when
        file.write(event.SerializeToString())
    file.close()
    return True


def _first(logdir: str) -> tuple[dict[str, Any], float]:
    """Return the first experiment and session info in the files of a run, by their tags, and when they were written."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.compat import tf
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    found: dict[str, Any] = {}
    when = 0.0
    for path in sorted(tf.io.gfile.glob(os.path.join(logdir, "*tfevents*"))):
        if os.path.basename(path) == FIRST:
            continue
        for event in islice(EventFileLoader(path).Load(), MAX_EVENTS):
            for value in event.summary.value:
                if value.tag in (metadata.EXPERIMENT_TAG, metadata.SESSION_START_INFO_TAG) and value.tag not in found:
                    found[value.tag] = HParamsPluginData.FromString(value.metadata.plugin_data.content)
                    when = event.wall_time
        if found:
            break
    return found, when


def _add(content: Any, metrics: Sequence[str]) -> None:
    """Add metrics to an experiment; a session info has none."""
    from tensorboard.plugins.hparams.api_pb2 import MetricInfo, MetricName

    if content.HasField("experiment"):
        known = {info.name.tag for info in content.experiment.metric_infos}
        new = [MetricInfo(name=MetricName(tag=tag)) for tag in metrics if tag not in known]
        content.experiment.metric_infos.extend(new)
