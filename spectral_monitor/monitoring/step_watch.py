"""Steps of a plain loop: which are watched, and the losses that are reported in them, to be computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from typing import Any

from torch import Tensor, nn

from spectral_monitor.capture.hooks.registration import Hooks, Removable, in_backward, in_transform
from spectral_monitor.capture.replay.eager_pass import precisely
from spectral_monitor.capture.replay.graph_replay import gradients_kept
from spectral_monitor.capture.replay.loss_flow import loss_in, tensors_in
from spectral_monitor.capture.replay.loss_graph import embedding_scales, has_unfit_input
from spectral_monitor.capture.replay.replay import Repeatable
from spectral_monitor.engine import STEP_LOSS, Engine, still_due
from spectral_monitor.engine.features.step_inputs import StepInputs
from spectral_monitor.engine.features.step_loss import MicroBatch
from spectral_monitor.layers import compiled_modules
from spectral_monitor.measurement import Measurement
from spectral_monitor.state.rng import RandomState
from spectral_monitor.state.snapshot import Snapshot


class LossReplay(Repeatable):
    """The loss of a step in a plain loop: a function that computes it, and the state that it began from.

    Made when the step begins; :attr:`function` comes with the loss. Iterators are no obstacles, for the function has
    what it needs.

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
        """Return the loss; gradients are left alone, even if the function adds to them."""
        precision = precisely(self._module) if self._precisely else nullcontext()
        with gradients_kept(self._module.parameters()), self._randomness.replayed(), precision:
            return None if self.function is None else loss_in(self.function())


class StepWatch:
    """Arms the engine for a step that is measured, keeps what the loop tells of its loss, and has it measured.

    Accelerate's own optimizers say whether a block ends with a step; a block that only accumulates gradients is the
    beginning of the next one.
    """

    def __init__(self, engine: Engine, optimizers: object, asks_for_loss: bool) -> None:
        """``optimizers``: as they were given; ``asks_for_loss``: whether the loss after a step is asked for where the
        loop says how it is computed, which a correction does by itself.
        """
        self._engine, self._asks_for_loss = engine, asks_for_loss
        given: Iterable[Any] = optimizers if isinstance(optimizers, Iterable) else [optimizers]
        self._accelerated = [item for item in given if hasattr(item, "gradient_state")]
        self._postponed: frozenset[str] = frozenset()
        self._blocks = 1
        self._replayable = False
        self._handles: list[Removable] = []
        self._hooks: Hooks[nn.Module] = Hooks()
        self.forget()

    def forget(self) -> None:
        """Drop what was kept of the step that is watched."""
        self._hooks.remove(self._handles)
        self._keys: frozenset[str] = frozenset()
        self._loss: Tensor | None = None
        self._unfit_loss_input: bool | None = None
        self._replay: LossReplay | None = None
        self._earlier: list[MicroBatch] = []

    def begin(self, due: frozenset[str]) -> None:
        """Arm, if something is due at the step that begins."""
        self._keys = still_due(due, self._postponed)
        if self._replayable and "feature_change" in self._keys:
            self._keys |= {STEP_LOSS}
        if self._keys:
            self._engine.arm(self._keys)
            model = self._engine.model
            self._replay = LossReplay(model) if self._engine.step_loss.wanted else None
            if self._engine.embedding_scales is None and not compiled_modules(model):
                self._handles += self._hooks.add(model, model.register_forward_hook, self._returned)

    def _returned(self, model: nn.Module, args: Any, output: Any) -> None:
        """Read off the graph of what the model returns how it scales embeddings."""
        if in_backward() or in_transform():
            return
        with suppress(Exception):  # then it is not known
            for x in (x for x in tensors_in(output) if x.grad_fn is not None):
                self._engine.embedding_scales = embedding_scales(x)
                return

    def report_loss(self, loss: Tensor, again: Callable[[], Tensor] | None) -> None:
        """Take the loss of a micro-batch, and the function that computes it again."""
        self._replayable |= again is not None and self._asks_for_loss
        if self._keys:
            self._loss = loss.detach().reshape(()).clone()
            with suppress(Exception):  # then it is not known
                self._unfit_loss_input = bool(self._unfit_loss_input) or has_unfit_input(loss)
            if self._replay is not None and again is not None:
                self._replay.function = again
                self._engine.step_loss.offer(self._replay, earlier=self._earlier)
                self._earlier.append(MicroBatch(self._replay, self._loss))
                self._replay = LossReplay(self._engine.model)  # of the next micro-batch, if there is one

    def postpone(self) -> bool:
        """Return whether the block that ends was no step; what was due is then due in the next block."""
        if all(item.gradient_state.sync_gradients for item in self._accelerated):
            return False
        self._postponed, self._blocks = self._keys, self._blocks + 1
        return True

    def end(self, step: int, accumulated: int, loss_parts: int) -> Measurement | None:
        """Return what was measured of the step, if it was watched; arguments are as for the probe's ``end_step``."""
        keys, loss, blocks, unfit = self._keys, self._loss, self._blocks, self._unfit_loss_input
        self._postponed, self._blocks = frozenset(), 1
        self.forget()
        if not keys:
            return None
        if blocks > 1:  # Accelerate has divided the loss where nobody sees it
            accumulated, loss = blocks, None if loss is None else loss / blocks
        given = StepInputs(loss=loss, accumulated=accumulated, loss_parts=loss_parts, unfit_loss_input=unfit)
        return self._engine.finish(step, given)
