"""Networks whose trainings leave files behind, and one of which kills its process."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections import Counter
from pathlib import Path

import torch

from tests.scaling.sweeping import Noisy

WIDTHS, STEPS = (8, 16, 32, 64, 128), 3


class Witnessed(Noisy):
    """Leaves a file when its training begins and when it ends."""

    def __init__(self, width, folder, killed=None):
        super().__init__(width)
        self.folder, self.killed = Path(folder), killed
        self.name = f"{width}-{torch.initial_seed()}"

    def leave(self, what):
        (self.folder / what / f"{self.name}-{uuid.uuid4().hex}").touch()

    def configure_optimizers(self):
        self.leave("begun")
        return {"optimizer": super().configure_optimizers(), "lr_scheduler": {"scheduler": self, "interval": "step"}}

    taken = 0

    def step(self):
        """After every optimizer step, as a scheduler."""
        self.taken += 1
        if self.taken == STEPS:
            self.leave("done")
        if self.taken == 2 and self.killed == self.head.in_features:
            self.kill_once()

    def kill_once(self):
        try:
            (self.folder / "killed").touch(exist_ok=False)
        except FileExistsError:
            return
        done, file = len(list((self.folder / "done").iterdir())), self.folder / "sweep.jsonl"
        end = time.monotonic() + 60
        while done > len(file.read_text().splitlines() if file.exists() else []) and time.monotonic() < end:
            time.sleep(0.05)  # until what was done before has arrived
        while held_by_dask() and time.monotonic() < end:
            time.sleep(0.05)  # until dask's scheduler has heard that nobody wants it any more, which comes later
        os.kill(os.getpid(), signal.SIGKILL)


def held_by_dask():
    """How many results this process keeps for dask; none where it is no worker of dask's."""
    try:
        from distributed import get_worker

        return len(get_worker().data)
    except (ImportError, ValueError):
        return 0


def witnesses(folder):
    """How often each point's training began, and ended."""
    return [Counter(file.name.rpartition("-")[0] for file in (folder / what).iterdir()) for what in ("begun", "done")]
