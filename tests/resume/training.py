"""Trains two small networks; run as a script, in a process of its own that may kill itself.

python -m tests.resume.training whole|killed|resumed FOLDER
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from spectral_monitor import SpectralMonitor, SpectralMonitorWarning
from tests.noninterference import zoo
from tests.noninterference.recorder import RecordingLogger, Run

EPOCH = 6
"""Batches, and steps, per epoch."""


class Seeds(pl.Callback):
    """Makes a batch the same whether or not there were others before it in this process."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        seed = 10 + trainer.global_step
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)


class Dies(pl.Callback):
    """Without a word, in the middle of the second epoch."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == EPOCH + 3:
            os.kill(os.getpid(), signal.SIGKILL)


def measurements(monitor):
    """All that was measured but its cost, NaN as None."""
    return [
        {
            "step": m.step,
            "values": {k: [None if x != x else x for x in v.tolist()] for k, v in m.values.items()},
            "summary": {k: None if v != v else v for k, v in m.summary.items() if k != "overhead_ms"},
            "reasons": m.reasons,
        }
        for m in monitor.measurements
    ]


def train(kind, folder, epochs, ckpt_path=None, callbacks=()):
    """One run with a checkpoint at the end of every epoch; measured steps and the weights at the end."""
    torch.manual_seed(0)
    module = zoo.Classifier(zoo.cnn) if kind == "called once" else zoo.EncoderThenHead()
    monitor = SpectralMonitor(every_n_steps=2, drift_every=2)
    saves = ModelCheckpoint(folder, save_last=True)
    data = zoo.loader("images", count=EPOCH)
    callbacks = [Seeds(), *callbacks, monitor, saves]
    zoo.fit(
        module,
        data,
        callbacks,
        RecordingLogger(Run()),
        ckpt_path=ckpt_path,
        max_epochs=epochs,
        enable_checkpointing=True,
    )
    weights = {key: value.tolist() for key, value in module.state_dict().items()}
    return {"measured": measurements(monitor), "weights": weights}


def main(mode, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("error", SpectralMonitorWarning)
    parts, once = folder / "parts", folder / "once"
    if mode == "whole":
        found = {"parts": train("parts", folder / "a", 3), "once": train("called once", folder / "b", 3)}
    elif mode == "killed":
        train("parts", parts, 1)
        train("called once", once, 3, callbacks=[Dies()])
        found = {"died": False}
    else:
        found = {
            "parts": train("parts", parts, 3, parts / "last.ckpt"),
            "once": train("called once", once, 3, once / "last.ckpt"),
        }
    (folder / f"{mode}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
