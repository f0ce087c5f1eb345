"""Calls of a model that return the loss, to be made again once the optimizer has stepped."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from spectral_monitor.capture.hooks.registration import Harmless, Hooks, Removable, in_backward, in_transform
from spectral_monitor.capture.replay.replay import RootCall


class ReturnedLosses:
    """Remembers each call of a model that returns a loss with a graph, and what gradients reach it, while armed.

    Attributes:
        calls: one for each micro-batch, in order.
    """

    def __init__(self, model: nn.Module, harmless: Harmless) -> None:
        """``harmless``: to be entered around what hooks do."""
        self._model, self._harmless = model, harmless
        self.calls: list[RootCall] = []
        self._handles: list[Removable] = []
        self._hooks: Hooks[nn.Module] = Hooks()
        self._depth = 0
        self._open: RootCall | None = None

    def arm(self) -> None:
        """Register the hooks."""
        self.disarm()
        model = self._model
        # First in line, to see the arguments before the user's own pre-hooks change them.
        before, after = model.register_forward_pre_hook, model.register_forward_hook
        self._handles += self._hooks.add(model, before, self._enter, prepend=True, with_kwargs=True)
        self._handles += self._hooks.add(model, after, self._leave, with_kwargs=True, always_call=True)

    def close(self) -> None:
        """Remove the hooks on calls: the optimizer steps now."""
        self._hooks.remove(self._handles)

    def disarm(self) -> None:
        """Remove every hook and drop what was remembered; safe to call at any time."""
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
                self._handles += call.keep_loss(output)
                if call.flow is not None:
                    self.calls.append(call)
