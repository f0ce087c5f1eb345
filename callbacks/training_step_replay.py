"""Replay of ``training_step``, for models whose forward is called in several parts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

from spectral_monitor.callbacks.lightning_packages import package_of
from spectral_monitor.capture.replay.eager_pass import precisely
from spectral_monitor.capture.replay.replay import Replayable, clone_tree
from spectral_monitor.monitoring.trial_copy import training_step
from spectral_monitor.state.rng import RandomState
from spectral_monitor.state.serialize import pack, unpack
from spectral_monitor.state.snapshot import preserved

if TYPE_CHECKING:
    import lightning.pytorch as pl


class TrainingStepReplay(Replayable):
    """A call of ``training_step`` that can be repeated under :func:`logging_suppressed`.

    It must be made when the step is called, because it keeps the random state of that moment.
    """

    def __init__(self, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        super().__init__(module, batch)
        self._batch_idx = batch_idx

    def output(self) -> Any:
        """Return the output of the step."""
        batch = clone_tree(self.arguments)
        with self.randomness.replayed(), precisely(self.module) if self._precisely else nullcontext():
            output = training_step(self.module, batch, self._batch_idx)
            self.drew = not self.randomness.same(RandomState.now())
        return output

    def pack(self, model: nn.Module) -> dict[str, Any]:
        """Return the call in plain types, see :meth:`.Replayable.pack`."""
        return {
            "kind": "training_step",
            "batch": pack(self.arguments, "batch"),
            "batch_idx": self._batch_idx,
            **super().pack(model),
        }

    @classmethod
    def unpack(cls, packed: dict[str, Any], module: pl.LightningModule) -> TrainingStepReplay:
        """Return a packed step, to be repeated by ``module``.

        Raises:
            Exception: if the module is not built like the one that made it.
        """
        return cls._again(packed, module, unpack(packed["batch"], module.device), packed["batch_idx"])


def can_run_again(module: pl.LightningModule) -> bool:
    """Return whether ``training_step`` can be called again with the same batch, rather than draw from an iterator."""
    return "dataloader_iter" not in inspect.signature(module.training_step).parameters


@contextmanager
def logging_suppressed(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[None]:
    """Run forwards inside at the trainer's precision, without effects on logs, learning rates and schedules."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    rates = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    schedules = [vars(config.scheduler) for config in trainer.lr_scheduler_configs]
    with preserved(*rates, *schedules), _muted(trainer, module), trainer.precision_plugin.train_step_context():
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                for key in [key for key in group if key != "params" and key not in rate]:
                    del group[key]
                group.update(rate)


@contextmanager
def _muted(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[None]:
    """Make ``self.log`` and the loggers drop everything inside."""
    loggers = trainer.loggers
    names = ("log", "log_dict", "print")
    trainer.loggers = [package_of(trainer).loggers.logger.DummyLogger() for _ in loggers]
    for name in names:
        object.__setattr__(module, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for name in names:
            object.__delattr__(module, name)
        trainer.loggers = loggers
