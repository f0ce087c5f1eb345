"""What goes wrong on one process only: what the others then do, and what each has to say about it."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor

from spectral_monitor import SpectralMonitor, SpectralMonitorWarning
from tests.distributed.fitting import fit
from tests.distributed.models import Batch, Training
from tests.distributed.ways import WAYS
from tests.noninterference.recorder import RecordingLogger, Run

STEPS = 4


class Steps(pl.Callback):
    """Counts what each process has behind it."""

    def __init__(self) -> None:
        self.ended, self.hooks = 0, -1

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *rest: Any) -> None:
        self.ended += 1
        self.hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.net.modules())


class Raises(Training):
    """In the training step, on one process, at the second step, which is measured."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 1 and dist.get_rank() == 1:
            raise RuntimeError("the user's own")
        return super().training_step(batch, batch_idx)


class Refuses(RecordingLogger):
    """A full disk, say."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if any(key.startswith("spectral") for key in metrics):
            raise OSError("no space left")
        super().log_metrics(metrics, step)


def owner_of(name: str) -> tuple[Any, str]:
    """Return what holds a part of the engine, and the attribute it has there."""
    package, module, *owners, attribute = name.split(".")
    target = importlib.import_module(f"spectral_monitor.engine.{package}.{module}")
    for owner in owners:
        target = getattr(target, owner)
    return target, attribute


@contextmanager
def broken(name: str, only: int = 1, times: int = 1) -> Iterator[None]:
    """A part of the engine raises on one process, the first ``times`` it is called."""
    target, attribute = owner_of(name)
    original, left = getattr(target, attribute), [times]

    def fail(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == only and left[0]:
            left[0] -= 1
            raise RuntimeError("broken on purpose")
        return original(*args, **kwargs)

    setattr(target, attribute, fail)
    try:
        yield
    finally:
        setattr(target, attribute, original)


PARTS = {
    "forward": "features.stage.RowStage.forward",  # between the end of the training step and the replay
    "weights": "weights.stage.MatrixStage.before",  # inside the optimizer's step
    "update": "weights.stage.MatrixStage.after",
    "inputs": "features.stage.input_rows",
    "rows": "results.measurement.layer_row",  # when all is sent and done
    "replay": "features.replays.Replays._same_batch",
}


def happen(way: str, network: str, mishap: str) -> dict[str, Any]:
    """Train with a mishap; what this process came through it with."""
    steps, monitor = Steps(), SpectralMonitor(every_n_steps=1, drift_every=2)
    kind = Raises if mishap == "training step" else Training
    module = kind(network, "sgd", WAYS[way].shard)
    logger = (Refuses if mishap == "logger" and dist.get_rank() == 0 else RecordingLogger)(Run())
    error = ""
    breaking = broken(PARTS[mishap]) if mishap in PARTS else nullcontext()
    with warnings.catch_warnings(record=True) as said, breaking:
        warnings.simplefilter("always", SpectralMonitorWarning)
        try:
            fit(way, network, STEPS, [monitor, steps], module=module, logger=logger)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
    return {
        "error": error,
        "ended": steps.ended,
        "hooks": steps.hooks,
        "measured": [m.step for m in monitor.measurements],
        "said": [str(w.message) for w in said if issubclass(w.category, SpectralMonitorWarning)],
        "weights": [float(p.to_local().sum() if hasattr(p, "to_local") else p.sum()) for p in module.parameters()],
        "spectral": [step for step, _ in logger.spectral],
    }


def without(way: str, network: str) -> list[float]:
    """The weights of the same training with no monitor and no mishap."""
    module = fit(way, network, STEPS)
    return [float(p.to_local().sum() if hasattr(p, "to_local") else p.sum()) for p in module.parameters()]
