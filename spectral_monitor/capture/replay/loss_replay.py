"""A user's own function that computes the loss of a step, to be called again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor, nn

from spectral_monitor.capture.replay.eager_pass import precisely
from spectral_monitor.capture.replay.graph_replay import gradients_kept
from spectral_monitor.capture.replay.loss_flow import loss_in
from spectral_monitor.state.rng import RandomState
from spectral_monitor.state.snapshot import Snapshot


class LossReplay:
    """The loss of a step in a plain loop: a function that computes it, and the state that it began from.

    Made when the step begins; :attr:`function` comes with the loss.

    Attributes:
        function: computes the loss of the same batch.
        obstacles, uncopied: as in :class:`~spectral_monitor.capture.replay.replayable.Repeatable`; iterators are none,
            for the function has what it needs.
    """

    def __init__(self, module: nn.Module) -> None:
        self.uncopied: Exception | None = None
        self.function: Callable[[], Tensor] | None = None
        self._module, self._precisely = module, False
        self._state = Snapshot(module, weights=False)
        self.obstacles = self._state.refused
        self._randomness = RandomState.now()

    def rewind(self) -> None:
        """Give the module the state it had before the step."""
        self._state.restore()

    def __call__(self) -> Tensor | None:
        """Return the loss; gradients are left alone, even if the function adds to them."""
        precision = precisely(self._module) if self._precisely else nullcontext()
        with gradients_kept(self._module.parameters()), self._randomness.replayed(), precision:
            return None if self.function is None else loss_in(self.function())

    def precise(self) -> LossReplay:
        """Return the same, eagerly and in full precision."""
        precise = copy.copy(self)
        precise._precisely = True
        return precise
