"""Trains for long with the monitor and prints, as JSON, what memory did and what was left. Run by test_memory.py.

    python -m tests.endurance.endure 10000

Samples are taken every 100 steps after a collection of garbage: resident memory, live tensors, live objects of the
monitor's, hooks.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.utils.data import DataLoader

from spectral_monitor import SpectralMonitor
from tests.noninterference.recorder import of_module, of_optimizer

PAGE = os.sysconf("SC_PAGE_SIZE")
EVERY, HISTORY, SAMPLE = 10, 50, 100
GLOBAL_HOOKS = [name for name in vars(nn.modules.module) if name.startswith("_global_") and name.endswith("_hooks")]


def resident() -> int:
    """Bytes of memory this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def hooks(module: pl.LightningModule, *optimizers: torch.optim.Optimizer) -> dict[str, int]:
    """Where -> how many, on modules, parameters, optimizers and on all modules at once."""
    found = {name: len(getattr(nn.modules.module, name)) for name in GLOBAL_HOOKS}
    for record in (of_module(module), *map(of_optimizer, optimizers)):
        found |= {path: n for path, n in record.items() if path.startswith("hooks/") and n is not None}
    return {where: n for where, n in found.items() if n}


class Batches(torch.utils.data.Dataset):
    """Of every size, so that nothing may be kept for each."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        rows = 20 + (7 * index) % 200
        return torch.randn(rows, 16, generator=generator), torch.randint(4, (rows,), generator=generator)


class Small(pl.LightningModule):
    """Large enough for estimated norms, small enough for ten thousand steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(16, 72), nn.BatchNorm1d(72), nn.ReLU(inplace=True)),
            *(nn.Linear(72, 72), nn.Dropout(0.1), nn.Tanh()),
            nn.Linear(72, 4),
        )

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Forgetful(Logger):
    """Takes everything, keeps the number of calls."""

    taken = 0

    @property
    def name(self) -> str:
        return "forgetful"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: object, **kwargs: object) -> None:
        """Nothing."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.taken += "spectral_update_ratio/net.0" in metrics


class Sampler(pl.Callback):
    def __init__(self) -> None:
        self.samples: list[tuple[int, int, int, int, int]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *rest: object) -> None:
        if trainer.global_step % SAMPLE:
            return
        gc.collect()
        objects = gc.get_objects()
        tensors = sum(issubclass(type(item), torch.Tensor) for item in objects)
        ours = sum(str(type(item).__module__).startswith("spectral_monitor") for item in objects)
        left = sum(hooks(module, *trainer.optimizers).values())
        del objects
        self.samples.append((trainer.global_step, resident(), tensors, ours, left))


class Leaky(SpectralMonitor):
    """Keeps a little of every measured step."""

    kept: list[torch.Tensor]
    bytes = 0

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *rest: object) -> None:
        if self.bytes and self._engine.armed:
            self.kept.append(torch.ones(self.bytes // 4))
        super().on_train_batch_end(trainer, module, *rest)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--leak", type=int, default=0, help="bytes to be kept of every measured step, on purpose")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    kind = Leaky if args.leak else SpectralMonitor
    monitor, sampler, logger, module = kind(EVERY, max_rows=16, history=HISTORY), Sampler(), Forgetful(), Small()
    monitor.bytes, monitor.kept = args.leak, []
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=args.steps,
        callbacks=[monitor, sampler],
        logger=logger,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    optimizers = []
    module.on_train_start = lambda: optimizers.extend(trainer.optimizers)
    trainer.fit(module, DataLoader(Batches(), batch_size=None))
    report = {
        "steps": trainer.global_step,
        "measured": [m.step for m in monitor.measurements],
        "logged": logger.taken,
        "finite": len(monitor.latest.scalars()),
        "samples": sampler.samples,
        "hooks": hooks(module, *optimizers),
        "optimizers": len(optimizers),
    }
    print("REPORT " + json.dumps(report))


if __name__ == "__main__":
    main()
