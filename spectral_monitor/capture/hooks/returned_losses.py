"""Calls of a model that return the loss, recorded to be repeated after the optimizer's step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from spectral_monitor.capture.hooks.registration import Harmless, Hooks, in_backward, in_transform
from spectral_monitor.capture.replay.replay import RootCall


class ReturnedLosses:
    """Records each call of a model that returns a loss with a graph, and the gradients of that loss, while armed.

    Attributes:
        calls: one for each micro-batch, in order.
    """

    def __init__(self, model: nn.Module, harmless: Harmless) -> None:
        """``harmless``: entered around the work of hooks."""
        self._model, self._harmless = model, harmless
        self.calls: list[RootCall] = []
        self._hooks: Hooks[nn.Module] = Hooks()
        self._depth = 0
        self._open: RootCall | None = None

    def arm(self) -> None:
        """Register the hooks."""
        self.disarm()
        self._hooks.add_around(self._model, self._enter, self._leave)

    def close(self) -> None:
        """Remove the hooks before the optimizer steps, but keep the calls."""
        self._hooks.remove()

    def disarm(self) -> None:
        """Remove the hooks and drop the calls; safe to call at any time."""
        self.close()
        self.calls, self._depth, self._open = [], 0, None

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if in_backward() or in_transform():
            return
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled():
            with self._harmless("the start of the forward pass"):
                self._open = RootCall(module, args, kwargs)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if in_backward() or in_transform():
            return
        self._depth -= 1
        if self._depth == 0 and self._open is not None:
            call, self._open = self._open, None
            with self._harmless("the end of the forward pass"):
                self._hooks.handles += call.keep_loss(output)
                if call.flow is not None:
                    self.calls.append(call)
