"""Steps of a plain loop: when to measure, and the losses that the loop reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from typing import Any

from torch import Tensor, nn

from spectral_monitor.capture.hooks.registration import Hooks, Removable, in_backward, in_transform
from spectral_monitor.capture.replay.eager_pass import precisely
from spectral_monitor.capture.replay.graph_replay import gradients_kept
from spectral_monitor.capture.replay.loss_faults import LossCheck
from spectral_monitor.capture.replay.loss_flow import loss_in, tensors_in
from spectral_monitor.capture.replay.replay import Repeatable
from spectral_monitor.engine import STEP_LOSS, Engine, still_due
from spectral_monitor.engine.features.step_inputs import StepInputs
from spectral_monitor.engine.features.step_loss import MicroBatch
from spectral_monitor.layers import compiled_modules
from spectral_monitor.measurement import Measurement
from spectral_monitor.state.rng import RandomState
from spectral_monitor.state.snapshot import Snapshot


class LossReplay(Repeatable):
    """The loss of a step in a plain loop, computed again by a function from the state at the start of the step.

    It is made when the step begins; :attr:`function` is set when the loop reports its loss.

    Attributes:
        function: computes the loss of the same batch.
    """

    def __init__(self, module: nn.Module) -> None:
        self.function: Callable[[], Tensor] | None = None
        self._module = module
        self._state = Snapshot(module, weights=False)
        self.obstacles = self._state.refused
        self._randomness = RandomState.now()

    def __call__(self) -> Tensor | None:
        """Return the loss; gradients stay as they are, even if the function adds to them."""
        precision = precisely(self._module) if self._precisely else nullcontext()
        with gradients_kept(self._module.parameters()), self._randomness.replayed(), precision:
            return None if self.function is None else loss_in(self.function())


class StepWatch:
    """Arms the engine for a step that is due, keeps the losses that the loop reports, and ends the measurement.

    Optimizers of Accelerate show whether a block ends with a step. A block that only accumulates gradients belongs to
    the next one.
    """

    def __init__(self, engine: Engine, optimizers: object, asks_for_loss: bool) -> None:
        """``optimizers``: as the user gave them; ``asks_for_loss``: whether to measure the loss after a step where the
        loop can compute it again; a correction asks for it by itself.
        """
        self._engine, self._asks_for_loss = engine, asks_for_loss
        items: Iterable[Any] = optimizers if isinstance(optimizers, Iterable) else [optimizers]
        self._accelerated = [item for item in items if hasattr(item, "gradient_state")]
        self._postponed: frozenset[str] = frozenset()
        self._blocks = 1
        self._replayable = False
        self._handles: list[Removable] = []
        self._hooks: Hooks[nn.Module] = Hooks()
        self._loss_check = LossCheck(reads_targets=engine.processes is None)
        self.forget()

    def forget(self) -> None:
        """Drop everything about the current step."""
        self._hooks.remove(self._handles)
        self._keys: frozenset[str] = frozenset()
        self._loss: Tensor | None = None
        self._loss_check.begin()
        self._replay: LossReplay | None = None
        self._earlier: list[MicroBatch] = []

    def begin(self, due: frozenset[str]) -> None:
        """Arm the engine if something is due at the step that begins."""
        self._keys = still_due(due, self._postponed)
        if self._replayable and "feature_change" in self._keys:
            self._keys |= {STEP_LOSS}
        if self._keys:
            self._engine.arm(self._keys)
            model = self._engine.model
            self._replay = LossReplay(model) if self._engine.step_loss.wanted else None
            if self._engine.on_output is not None and not compiled_modules(model):
                self._handles += self._hooks.add(model, model.register_forward_hook, self._returned)

    def _returned(self, model: nn.Module, args: Any, output: Any) -> None:
        """Read the graph of the model's output."""
        if in_backward() or in_transform():
            return
        with suppress(Exception):  # then it stays unknown
            first = next((tensor for tensor in tensors_in(output) if tensor.grad_fn is not None), None)
            if self._engine.on_output is not None and first is not None:
                self._engine.on_output(first)

    def report_loss(self, loss: Tensor, recompute: Callable[[], Tensor] | None) -> None:
        """Take the loss of a micro-batch, and the function that computes it again."""
        self._replayable |= recompute is not None and self._asks_for_loss
        if self._keys:
            self._loss = loss.detach().reshape(()).clone()
            with suppress(Exception):  # then it stays unknown
                self._loss_check.look(loss)
                if self._engine.on_loss is not None:
                    self._engine.on_loss(loss.reshape(()))
            if self._replay is not None and recompute is not None:
                self._replay.function = recompute
                self._engine.step_loss.offer(self._replay, earlier=self._earlier)
                self._earlier.append(MicroBatch(self._replay, self._loss))
                self._replay = LossReplay(self._engine.model)  # for the next micro-batch, if there is one

    def postpone(self) -> bool:
        """Return whether the block ends without a step; then its quantities are due in the next block."""
        if all(item.gradient_state.sync_gradients for item in self._accelerated):
            return False
        self._postponed, self._blocks = self._keys, self._blocks + 1
        return True

    def end(self, step: int, accumulated: int, loss_parts: int) -> Measurement | None:
        """Return the measurement of the step, if it was due; arguments are those of the probe's ``end_step``."""
        keys, loss, blocks, fault = self._keys, self._loss, self._blocks, self._loss_check.fault
        self._postponed, self._blocks = frozenset(), 1
        self.forget()
        if not keys:
            return None
        if blocks > 1:  # Accelerate has divided the loss inside its backward
            accumulated, loss = blocks, None if loss is None else loss / blocks
        step_inputs = StepInputs(loss=loss, accumulated=accumulated, loss_parts=loss_parts, loss_fault=fault)
        return self._engine.finish(step, step_inputs)
