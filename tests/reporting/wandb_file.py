"""An offline W&B run, and what W&B would show of it, read back from its file."""

from __future__ import annotations

import json
import struct
import time
from contextlib import contextmanager
from pathlib import Path

import wandb

AXIS = "trainer/global_step"
FOLDERS = ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR")


def go_offline(monkeypatch, folder):
    """Runs are kept in a folder, and nothing leaves the machine or is said."""
    for name in FOLDERS:
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def wandb_records(folder):
    """All records of the one offline run in a folder, once its file is complete."""
    (path,) = Path(folder).glob("wandb/offline-run-*/run-*.wandb")
    for _ in range(600):
        records = list(_records(path.read_bytes()))
        if records and records[-1].WhichOneof("record_type") == "exit":
            break
        time.sleep(0.05)
    return records


def _records(data):
    """LevelDB's log format: 7 bytes of greeting, then records, cut where blocks of 32 kB end."""
    from wandb.proto import wandb_internal_pb2

    at, parts = 7, b""
    while at + 7 <= len(data):
        if (left := -at % 32768) < 7:  # too little room for a header: the block is padded
            at += left
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4) and at <= len(data):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


@contextmanager
def offline_run(folder, like_lightning=False, **settings):
    """A run, finished afterwards; ``like_lightning``: with the metrics that Lightning's logger defines."""
    run = wandb.init(project="p", dir=str(folder), **settings)
    if like_lightning:
        run.define_metric(AXIS)
        run.define_metric("*", step_metric=AXIS, step_sync=True)
    yield run
    run.finish()


class RunFile:
    """What a finished offline run left in a folder.

    Attributes:
        rows: of the history, key -> value; a dict for a table or a picture.
        metrics: what was defined, name or pattern -> W&B's record, dots as they were escaped.
        config: key -> value; of custom charts ``_wandb/visualize/<key>``.
        summary: key -> value, as it was in the end; an entry of a table ``<key>/<entry>``.
        alerts: as W&B would send them.
        artifacts: records.
        files: folder of the media.
    """

    def __init__(self, folder):
        self.rows, self.metrics, self.config, self.summary, self.alerts, self.artifacts = [], {}, {}, {}, [], []
        (self.files,) = Path(folder).glob("wandb/offline-run-*/files")
        for record in wandb_records(folder):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                self.rows.append(_row(record.history.item))
            elif kind == "metric":
                self.metrics[record.metric.glob_name or record.metric.name] = record.metric
            elif kind == "config":
                self.config |= {_key(item): json.loads(item.value_json) for item in record.config.update}
            elif kind == "summary":
                self.summary |= {_key(item): json.loads(item.value_json) for item in record.summary.update}
                for item in record.summary.remove:
                    self.summary.pop(_key(item), None)
            elif kind == "alert":
                self.alerts.append(record.alert)
            elif kind == "artifact":
                self.artifacts.append(record.artifact)

    def numbers(self):
        """(step, key) -> value of every number of ours; one that was logged twice at a step is an error."""
        found = {}
        for row in self.rows:
            for key, value in row.items():
                if key.startswith("spectral") and isinstance(value, int | float):
                    assert (row[AXIS], key) not in found, f"{key} twice at step {row[AXIS]}"
                    found[row[AXIS], key] = value
        return found

    def media(self, prefix):
        """Step -> key -> the contents of tables, the paths of pictures."""
        found = {}
        for row in self.rows:
            for key, value in row.items():
                if key.startswith(prefix) and isinstance(value, dict):
                    path = self.files / value["path"]
                    assert path.is_file()
                    content = json.loads(path.read_text()) if path.suffix == ".json" else path
                    assert key not in found.setdefault(row[AXIS], {}), f"{key} twice at step {row[AXIS]}"
                    found[row[AXIS]][key] = content
        return found

    def panels(self):
        """Keys of ours that W&B makes a panel for: what is logged and not hidden, and custom charts.

        A full name, in which dots are escaped, counts before any pattern. A pattern is the beginning of a name and a
        ``*``; which of several W&B takes is not said, so a key is hidden only if all of them hide it.
        """
        logged = {key for row in self.rows for key in row if key.startswith("spectral")}
        charts = {key.removeprefix("_wandb/visualize/") for key in self.config if key.startswith("_wandb/visualize/")}
        return {key for key in logged if not self._hidden(key)} | charts

    def _hidden(self, key):
        name = key.replace(".", "\\.")
        if name in self.metrics:
            return self.metrics[name].options.hidden
        matching = [m for glob, m in self.metrics.items() if glob.endswith("*") and key.startswith(glob[:-1])]
        return bool(matching) and all(metric.options.hidden for metric in matching)


def _row(items):
    """Tables and pictures are dicts, of which W&B writes each entry as an item of its own."""
    row = {}
    for item in items:
        *groups, last = item.nested_key or [item.key]
        place = row
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = json.loads(item.value_json)
    return row


def _key(item):
    return item.key or "/".join(item.nested_key)
