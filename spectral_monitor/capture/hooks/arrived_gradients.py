"""Gradients as backward passes leave them, before a loop clips them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from spectral_monitor.capture.hooks.registration import GradientHook
from spectral_monitor.state.dtensor import is_distributed


class ArrivedGradients:
    """Takes the norm of every gradient when it has arrived, while armed; nothing is copied.

    Of a single process: of several, gradients are averaged after that. The norms are those that the latest backward
    pass has left, earlier micro-batches included.
    """

    def __init__(self) -> None:
        self._handles: list[GradientHook] = []
        self._norms: dict[Tensor, Tensor] = {}

    def arm(self, optimizers: Sequence[Optimizer], harmless: Callable[[str], Any]) -> None:
        """Register the hooks."""
        self.disarm()
        self._harmless = harmless
        held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        for p in dict.fromkeys(held):
            if p.requires_grad and p.is_leaf and not is_lazy(p) and not is_distributed(p):
                self._handles.append(GradientHook(p, partial(self._arrived, p), after=True))

    def disarm(self) -> None:
        """Remove the hooks and forget the norms; safe to call at any time."""
        while self._handles:
            self._handles.pop().remove()
        self._norms.clear()

    @torch.no_grad()
    def _arrived(self, p: Tensor, *_: Any) -> None:
        with self._harmless("looking at gradients that have arrived"):
            self._norms.pop(p, None)
            if p.grad is not None and not p.grad.is_sparse:
                (self._norms[p],) = torch._foreach_norm([p.grad])  # rounded as those of all together are later

    def of(self, optimizer: Optimizer) -> tuple[tuple[Tensor, ...], Tensor] | None:
        """Return the parameters of an optimizer that is about to step whose gradients have arrived, and their norms as
        loss scaling would have left them; ``None`` if there are none.
        """
        mine = [p for group in optimizer.param_groups for p in group["params"] if p in self._norms]
        if not mine:
            return None
        norms = torch.stack([self._norms[p].to(self._norms[mine[0]]) for p in mine])
        return tuple(mine), norms / scale_in_use()


def scale_in_use() -> float:
    """Return the loss scale of the ``GradScaler`` that makes an optimizer step right now; 1 if none does.

    It has taken the scale out of the gradients by then, and leaves no mark on the optimizer. So it is looked for among
    the callers.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is GradScaler.step.__code__:
            return float(frame.f_locals["self"].get_scale())
        frame = frame.f_back
    return 1.0
