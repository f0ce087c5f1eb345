"""The course of Lightning's schedules of learning rates, for a correction that needs their peaks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from spectral_monitor.correction.peak_rates import planned_rates

if TYPE_CHECKING:
    import lightning.pytorch as pl

MOST = 20_000
"""Calls of a schedule that are looked ahead: a third of a second."""


def planned_peaks(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[tuple[list[nn.Parameter], float]]:
    """Yield the parameters of each group that is scheduled, and the highest learning rate it comes to in this fit.

    A schedule that goes by a metric begins with its peak. What cannot be looked ahead is left out. So is one that would
    go below what its group names and never move: its function looks at something else than the step it is given.
    """
    for config in trainer.lr_scheduler_configs:
        scheduler = config.scheduler
        if isinstance(scheduler, ReduceLROnPlateau):
            yield from ((group["params"], float(group["lr"])) for group in scheduler.optimizer.param_groups)
            continue
        try:
            rates = planned_rates(scheduler, _calls(trainer, config.interval, config.frequency), [trainer, module])
        except Exception:
            continue
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            if rate > float(group["lr"]) or rate >= float(group.get("initial_lr", 0.0)):
                yield group["params"], rate


def _calls(trainer: pl.Trainer, interval: str, frequency: int) -> int:
    """Return how often a schedule steps in this fit."""
    length = trainer.max_epochs if interval == "epoch" else trainer.estimated_stepping_batches
    if length is None or not 0 <= length < math.inf:
        return MOST
    return min(math.ceil(length / frequency), MOST)
