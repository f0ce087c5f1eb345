"""Trains with a budget of time, on processes whose clocks differ, and returns what was measured when."""

from __future__ import annotations

import shutil
import tempfile
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from spectral_monitor import SpectralMonitor
from spectral_monitor.engine import guards
from spectral_monitor.engine import overhead_budget as budget
from tests.distributed.fitting import fit
from tests.distributed.models import batches
from tests.distributed.ways import WAYS

STEPS = 30
"""Of an epoch."""


class Pace(pl.Callback):
    """This process's clock: seconds of a step, and of measuring one."""

    def __init__(self, monitor: SpectralMonitor, plain: float, cost: float) -> None:
        self.now, self.monitor, self.plain, self.cost = 0.0, monitor, plain, cost

    def on_train_batch_end(self, *given: Any) -> None:
        self.now += self.plain + self.cost * self.monitor._engine.armed


def run(way: str, folder: str, epochs: int, ckpt: str | None = None) -> list[tuple[int, list[str], Any]]:
    """Steps that were measured, and what of them; the first process takes half a step, the others ten."""
    rank = dist.get_rank()
    part, parts = WAYS[way].part()
    monitor = SpectralMonitor(
        {"light": 1, "feature_rms": 7}, quantities=["update_norm", "lr", "feature_rms"], max_overhead=0.1
    )
    pace = Pace(monitor, 1.0 + rank, 0.5 if rank == 0 else 20.0)
    clock, others = lambda: pace.now, (budget.perf_counter, guards.time)
    budget.perf_counter, guards.time = clock, SimpleNamespace(perf_counter=clock)
    keep = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
    try:
        data = batches("perceptron", STEPS, part, parts)
        more = {"max_epochs": epochs, "enable_checkpointing": True, "default_root_dir": folder, "ckpt": ckpt}
        fit(way, "perceptron", STEPS, [pace, monitor, keep], data=data, **more)
    finally:
        budget.perf_counter, guards.time = others
    return [(m.step, list(m.values), m.summary.get("interval")) for m in monitor.measurements]


def story(way: str) -> dict[str, Any]:
    """A run of two epochs, and one that goes on after the first."""
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    folder = shared[0]
    try:
        whole = run(way, f"{folder}/whole", epochs=2)
        dist.barrier()
        rest = run(way, f"{folder}/rest", epochs=2, ckpt=f"{folder}/whole/epoch=0.ckpt")
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return {"whole": whole, "rest": rest}
