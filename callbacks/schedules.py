"""Lightning's learning-rate schedules, simulated before training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from spectral_monitor.callbacks.lightning_packages import package_of
from spectral_monitor.condition.optimizers.plans import LookAhead, Plan

if TYPE_CHECKING:
    import lightning.pytorch as pl

MAX_CALLS = 20_000
"""Largest number of simulated calls of a schedule: a third of a second."""


class Schedules:
    """Simulates the schedulers of a fit on copies, from its first step on.

    Schedulers are copied before a checkpoint is loaded, which moves them on to its step. Without a checkpoint they are
    copied when training begins: until then another callback may change the learning rate.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._shared = [trainer, module, getattr(trainer, "datamodule", None)]
        resumed = trainer.lr_scheduler_configs if trainer.ckpt_path is not None else []
        self._copies = [(config.scheduler, self._copy(config.scheduler)) for config in resumed]

    def plans(self, trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[tuple[list[nn.Parameter], Plan]]:
        """Yield the parameters of each scheduled group with the plan of its learning rate in this fit.

        A schedule that depends on a metric begins at its peak. Schedules that cannot be simulated are left out. So are
        those that stay below the group's initial rate and would not rise after the fit either, because their function
        depends on more than the step. Call this after data are loaded, since their number gives the length of the fit.
        """
        stops = bool(trainer.early_stopping_callbacks)
        for config in trainer.lr_scheduler_configs:
            groups = config.scheduler.optimizer.param_groups
            if isinstance(config.scheduler, ReduceLROnPlateau):
                yield from ((group["params"], Plan(lr := float(group["lr"]), lr)) for group in groups)
                continue
            ahead = next((copied for scheduler, copied in self._copies if scheduler is config.scheduler), None)
            ahead = ahead or self._copy(config.scheduler)
            try:
                calls, certain = _calls(trainer, module, config.interval, config.frequency)
                plans = [] if ahead is None else ahead.plans(calls)
            except Exception:
                continue
            for group, plan in zip(groups, plans, strict=False):  # groups may have been added since
                if not certain:
                    plan = Plan(plan.first, plan.highest)
                elif stops or config.interval != "step":  # the last epochs may never come
                    plan = plan._replace(lasts=1.0)
                if plan.rises or plan.highest > plan.first or plan.highest >= float(group.get("initial_lr", 0.0)):
                    yield group["params"], plan

    def _copy(self, scheduler: LRScheduler) -> LookAhead | None:
        """Return a copy to simulate; ``None`` if the scheduler cannot be copied."""
        try:
            return LookAhead(scheduler, self._shared)
        except Exception:
            return None


def _calls(trainer: pl.Trainer, module: pl.LightningModule, interval: str, frequency: int) -> tuple[int, bool]:
    """Return the largest number of steps of a schedule before the last one of this fit, and whether it is exact.

    A module that calls it itself may do so after each batch, whatever the interval says.
    """
    own = type(module).lr_scheduler_step is not package_of(trainer).LightningModule.lr_scheduler_step
    by_lightning = module.automatic_optimization and not own
    length = trainer.estimated_stepping_batches
    if by_lightning and interval == "epoch":
        epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
        each = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
        length = min(epochs, math.ceil(length / each) if length >= 0 else math.inf)
    if not 0 <= length / frequency <= MAX_CALLS:
        return MAX_CALLS, False
    return max(0, math.ceil(length / frequency) - 1), by_lightning
