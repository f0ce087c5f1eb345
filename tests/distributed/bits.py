"""Two runs on the same processes, one of them watched: what each process has after every batch, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from spectral_monitor import SpectralMonitor
from tests.distributed.fitting import fit
from tests.noninterference import recorder
from tests.noninterference.recorder import AFTER, BEFORE, Bits, Recorder, RecordingLogger, Run


class LocalBits(Bits):
    """Of a distributed tensor, what this process holds: whatever the rest is, its own process compares it."""

    @classmethod
    def of(cls, tensor: Tensor) -> Bits:
        return cls(*Bits.of(tensor.to_local() if isinstance(tensor, DTensor) else tensor))


class Naive(pl.Callback):
    """What a monitor must not do: the forward again, with other dropout, drawn from the generator training uses."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            trainer.strategy.model.train()
            trainer.strategy.training_step(batch, batch_idx)


WATCHERS = {"monitor": lambda: SpectralMonitor(every_n_steps=2, drift_every=1), "naive": Naive, "": None}


def compare(
    way: str,
    network: str,
    watcher: str = "monitor",
    optimizer: str = "adamw",
    accumulate: int = 1,
    precision: str = "32-true",
) -> dict[str, Any]:
    """What differed, where, and how much there was to compare."""
    recorder.Bits = LocalBits  # read by the recorder's functions when they run
    runs, measured = [], 0
    for watch in ("", watcher):
        run = Run()
        watching = WATCHERS[watch]() if watch else None
        callbacks = [Recorder(run, "before", BEFORE, hooks=False), *([watching] if watching else [])]
        callbacks.append(Recorder(run, "after", AFTER, hooks=True))
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        fit(
            way,
            network,
            4 * accumulate,
            callbacks,
            optimizer,
            logger=RecordingLogger(run),
            accumulate_grad_batches=accumulate,
            precision=precision,
            max_epochs=2,
        )
        runs.append(run)
        measured = len(watching.measurements) if isinstance(watching, SpectralMonitor) else 0
    return {
        "differences": recorder.differences(*runs)[:20],
        "measured": measured,
        "compared": {kind: runs[0].tensors(kind) for kind in ("parameter", "grad", "optimizer", "buffer", "random")},
    }
