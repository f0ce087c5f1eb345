"""Trains, stops and goes on, and returns what was measured."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from spectral_monitor import SpectralMonitor
from spectral_monitor.messages import SpectralMonitorWarning
from tests.distributed.fitting import fit, plain
from tests.distributed.models import batches
from tests.distributed.ways import WAYS

STEPS = 3


def run(way: str, network: str, folder: str, epochs: int, resume: bool = False) -> dict[str, Any]:
    """Epochs of three steps, every one measured, from the start or from a checkpoint after the first."""
    part, parts = WAYS[way].part() if way else (0, 1)
    monitor = SpectralMonitor(every_n_steps=1, drift_every=1, tol=1e-6, replay_samples=None)
    keep = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SpectralMonitorWarning)
        fit(
            way,
            network,
            STEPS,
            [monitor, keep],
            data=batches(network, STEPS, part, parts),
            max_epochs=epochs,
            enable_checkpointing=True,
            default_root_dir=folder,
            ckpt=f"{folder}/epoch=0.ckpt" if resume else None,
        )
    said = [str(one.message) for one in caught if issubclass(one.category, SpectralMonitorWarning)]
    return {"measurements": [plain(m) for m in monitor.measurements], "said": said}


def files(folder: str) -> list[Path]:
    """Those the monitors of all processes wrote, oldest first."""
    return sorted(Path(folder).glob("spectral-monitor-*.pt"), key=lambda path: path.stat().st_mtime_ns)


def story(way: str, network: str, lose: bool = False) -> dict[str, Any]:
    """A run of two epochs, and one that is stopped after the first, and goes on; in between a file may be lost."""
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    folder = shared[0]
    try:
        through = run(way, network, f"{folder}/through", epochs=2)
        first = run(way, network, f"{folder}/stopped", epochs=1)
        dist.barrier()
        written = len(files(f"{folder}/stopped"))
        dist.barrier()
        if lose and dist.get_rank() == 0:
            for path in files(f"{folder}/stopped")[-1:]:
                path.unlink()
        dist.barrier()
        second = run(way, network, f"{folder}/stopped", epochs=2, resume=True)
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return {"through": through, "first": first, "second": second, "written": written}
