"""What W&B wrote into the file of an offline run."""

from __future__ import annotations

import struct
import time
from pathlib import Path


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
