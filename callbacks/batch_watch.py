"""Batches of a Lightning fit: when to measure, and the training steps to run again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from spectral_monitor.callbacks.training_step_replay import TrainingStepReplay, can_run_again, logging_suppressed
from spectral_monitor.capture.replay.loss_faults import LossCheck
from spectral_monitor.capture.replay.loss_flow import loss_in
from spectral_monitor.engine import STEP_LOSS, Engine, still_due
from spectral_monitor.engine.features.step_inputs import StepInputs
from spectral_monitor.engine.features.step_loss import UNNOTICED, MicroBatch
from spectral_monitor.measurement import Measurement

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch import Tensor


class BatchWatch:
    """Arms the engine for a batch in which the optimizer steps, if that step is due.

    With manual optimization it is unknown beforehand whether an optimizer steps, so batches are counted instead of
    steps. If no optimizer steps in a batch that is due, the next batch is due. Which passes belong to a step
    is then up to the user.
    """

    def __init__(
        self,
        engine: Engine,
        due: Callable[[int], frozenset[str]],
        harmless: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """``due``: returns what is due at a step, counted from 1; ``harmless``: turns an error into a warning."""
        self._engine, self._due, self._harmless = engine, due, harmless
        self._overdue: frozenset[str] = frozenset()
        self._loss_scale = 1.0
        self._loss_check = LossCheck(reads_targets=engine.processes is None)
        self.forget()

    def forget(self) -> None:
        """Drop everything about the current step."""
        self._training_step: TrainingStepReplay | None = None
        self._micro_batches: list[MicroBatch] = []
        self._loss_check.begin()

    def begin(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Arm the engine if the optimizer steps in this batch and its step is due.

        For earlier batches that accumulate gradients for that step, keep the training step if its loss is needed.
        """
        engine, automatic = self._engine, module.automatic_optimization
        if automatic:
            keys = self._due(trainer.global_step + 1)
        else:
            keys = self._overdue = still_due(self._due(_batches(trainer)), self._overdue)
        if not keys:
            return
        if automatic and trainer.fit_loop._should_accumulate():
            if STEP_LOSS in keys and can_run_again(module):
                with self._harmless(UNNOTICED):
                    self._training_step = TrainingStepReplay(module, batch, batch_idx)
            return
        self._training_step, self._loss_scale = None, 1.0
        if not automatic:
            engine.arm(keys)
            return

        def remember() -> None:
            engine.features.begin_forward()
            if (engine.features.wanted or engine.step_loss.wanted) and can_run_again(module):
                self._training_step = TrainingStepReplay(module, batch, batch_idx)

        engine.arm(keys, remember)
        engine.features.begin_forward()
        if _scaler(trainer) is not None:  # then the forward is not inside the optimizer's step
            remember()

    def end_forward(self, module: pl.LightningModule) -> None:
        """Close the forward window: the training step is done."""
        if self._engine.armed and module.automatic_optimization:
            self._engine.features.end_forward()

    def begin_backward(self, trainer: pl.Trainer, module: pl.LightningModule, loss: Tensor) -> None:
        """Count gradients from here on as those of the step's backward pass."""
        if not self._engine.armed:
            return
        with self._harmless("checking the inputs of the loss"):
            self._loss_check.look(loss)
            if self._engine.on_loss is not None:
                self._engine.on_loss(loss)
        scaler = _scaler(trainer)
        if scaler is not None:
            self._loss_scale = float(scaler.get_scale())
        if module.automatic_optimization:
            self._engine.features.begin_backward()
            if self._training_step is not None:
                gradient = self._loss_scale / trainer.accumulate_grad_batches
                context = partial(logging_suppressed, trainer, module)
                self._engine.features.offer(self._training_step, gradient, context)
                self._engine.step_loss.offer(self._training_step, context, self._micro_batches)

    def end_backward(self, module: pl.LightningModule) -> None:
        """Ignore later gradients."""
        if self._engine.armed and module.automatic_optimization:
            self._engine.features.end_backward()

    def end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any) -> Measurement | None:
        """Return the measurement of a batch that was due; else keep its training step if the loss is needed again."""
        replay, calls, automatic = self._training_step, self._engine.calls, module.automatic_optimization
        if not self._engine.armed:
            self._training_step = None
            if replay is not None and (loss := loss_in(outputs)) is not None:
                self._micro_batches.append(MicroBatch(replay, loss.detach()))
            return None
        if replay and calls and _scaler(trainer) is not None and not replay.randomness.same(calls[0].randomness):
            replay = None  # it was recorded too early: random numbers have been drawn since
        step_inputs = StepInputs(
            training_step=replay,
            loss=loss_in(outputs) if automatic else None,
            accumulated=trainer.accumulate_grad_batches,
            loss_scale=self._loss_scale,
            context=partial(logging_suppressed, trainer, module),
            only_if_stepped=not automatic,
            loss_fault=self._loss_check.fault,
        )
        measurement = self._engine.finish(trainer.global_step if automatic else _batches(trainer), step_inputs)
        self.forget()
        if automatic or not self._engine.idle:
            self._overdue = frozenset()
        return measurement


def _scaler(trainer: pl.Trainer) -> Any:
    """Return the loss scaler of 16-mixed, if there is one."""
    return getattr(trainer.precision_plugin, "scaler", None)


def _batches(trainer: pl.Trainer) -> int:
    """Return the number of training batches begun so far, including the current one."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.ready)
