"""A user's own function that computes the loss of a step, to be called again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor, nn

from spectral_monitor.capture.replay.eager_pass import precisely
from spectral_monitor.capture.replay.graph_replay import gradients_kept
from spectral_monitor.capture.replay.loss_flow import loss_in
from spectral_monitor.capture.replay.replay import Repeatable
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
