"""Running ``training_step`` once more, for models whose forward is called in several parts."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from spectral_monitor.callbacks.lightning_packages import package_of
from spectral_monitor.capture.replay.batch_slicing import Samples, slice_batch
from spectral_monitor.capture.replay.eager_pass import precisely
from spectral_monitor.capture.replay.loss_flow import loss_in
from spectral_monitor.capture.replay.replay import clone_tree, copied, modes, obstacles_in
from spectral_monitor.state.rng import RandomState
from spectral_monitor.state.serialize import pack, pack_state, put_state, unpack
from spectral_monitor.state.snapshot import Snapshot, preserved

if TYPE_CHECKING:
    import lightning.pytorch as pl


class TrainingStepReplay:
    """One call of ``training_step``, ready to be made again: the batch, the module's state, the same randomness.

    Attributes:
        randomness: of the moment this was made, which must be that of the call.
        obstacles: reasons why it must not be run again, as
            :func:`~spectral_monitor.capture.replay.replay.obstacles_in` has them.
        uncopied: why the batch could not be copied, if it could not.
        module: whose step it is.
        given: the batch, copied.
        modes: whether each module inside was training.
        drew: whether it has drawn random numbers when it was last made again.
        first_loss: the loss when it was first made again eagerly and in full precision.
    """

    def __init__(self, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self.module: nn.Module = module
        self.given, self.uncopied = copied(batch, None)
        self.modes = modes(module)
        self.drew = False
        self.first_loss: Tensor | None = None
        self._precisely = False
        self._batch_idx = batch_idx
        self._state = Snapshot(module, weights=False)
        self.obstacles = obstacles_in(batch, self._state)
        self.randomness = RandomState.now()

    def rewind(self) -> None:
        """Give the module the state it had before the step."""
        self._state.restore()

    def __call__(self) -> Tensor | None:
        """Return the loss of the step's forward; to be called under :func:`logging_suppressed`."""
        return loss_in(self.output())

    def output(self) -> Any:
        """Return what the step returns; to be called under :func:`logging_suppressed`."""
        step: Any = self.module.training_step
        arguments = (clone_tree(self.given), self._batch_idx)[: 2 if _takes_index(step) else 1]
        with self.randomness.replayed(), precisely(self.module) if self._precisely else nullcontext():
            output = step(*arguments)
            self.drew = not self.randomness.same(RandomState.now())
        return output

    def precise(self) -> TrainingStepReplay:
        """Return the same step made eagerly and in full precision, whatever was compiled."""
        precise = copy.copy(self)
        precise._precisely = True
        return precise

    def part(self, which: Samples) -> TrainingStepReplay:
        """Return the same step with some samples of its batch."""
        part = copy.copy(self)
        part.given = slice_batch(self.given, which)
        return part

    def pack(self, model: nn.Module) -> dict[str, Any]:
        """In plain types, to be made again in another process; to be asked for right after :meth:`rewind`.

        Raises:
            NotPlainError: naming what in the batch or the module's state is none.
        """
        return {
            "kind": "training_step",
            "batch": pack(self.given, "batch"),
            "batch_idx": self._batch_idx,
            "state": pack_state(self.module),
            "randomness": self.randomness.pack(),
            "precisely": self._precisely,
        }

    @classmethod
    def unpack(cls, packed: dict[str, Any], module: pl.LightningModule) -> TrainingStepReplay:
        """Return the step that was packed, to be made by ``module``.

        Raises:
            Exception: if the module is not built like the one that made it.
        """
        with preserved(module):
            put_state(module, packed["state"])
            step = cls(module, unpack(packed["batch"], module.device), packed["batch_idx"])
            step.rewind()  # hooks that come later are not the forward's
        step.randomness = RandomState.unpack(packed["randomness"])
        step._precisely = bool(packed.get("precisely", False))
        return step


def can_run_again(module: pl.LightningModule) -> bool:
    """Return whether ``training_step`` can be called with the same batch again: not if it draws batches from an
    iterator.
    """
    return "dataloader_iter" not in inspect.signature(module.training_step).parameters


def _takes_index(step: Any) -> bool:
    """Lightning passes the batch's index to a step that takes two arguments or one of that name."""
    kinds = inspect.signature(step).parameters
    many = any(p.kind is p.VAR_POSITIONAL for p in kinds.values())
    return many or "batch_idx" in kinds or len(kinds) >= 2


@contextmanager
def logging_suppressed(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[None]:
    """Inside, forwards run at the trainer's precision and nobody hears of them.

    ``self.log`` and the loggers take everything and keep nothing; learning rates and schedules, which a training step
    may set by itself, come back.
    """
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
    """Inside, ``self.log`` and the loggers take everything and keep nothing."""
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
