"""Norms of gradients at the end of backward passes, before a loop clips them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from spectral_monitor.capture.hooks.registration import (
    GradientHook,
    Harmless,
    Hooks,
    WrappedCall,
    after_backward,
    backward_pass,
    in_backward,
    in_transform,
)
from spectral_monitor.capture.replay.loss_flow import tensors_in
from spectral_monitor.capture.unwrap import parameters_of
from spectral_monitor.layers import compiled_modules, entrances
from spectral_monitor.state.dtensor import is_distributed


class ArrivedGradients:
    """Takes the norms of gradients at the end of backward passes, while armed; nothing is copied.

    Processes have averaged the gradients by then. The norms are those after the latest backward pass, with earlier
    micro-batches. A pass is noticed where it reaches parameters. Sharded weights have other parameters than the
    optimizer in the graph, so a pass is also noticed at the outputs of their modules.

    Args:
        model: the model of several processes, with FSDP's wrapper if there is one; ``None`` in a single process.
        flat: ids of the parameters that FSDP1 shards.
        norms_of: returns the norms of the local gradients of parameters.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        model: nn.Module | None,
        flat: Collection[int],
        norms_of: Callable[[Sequence[Tensor]], Tensor],
        harmless: Harmless,
    ) -> None:
        self._optimizers, self._model, self._flat = optimizers, model, flat
        self._norms_of, self._harmless = norms_of, harmless
        self._hooks: Hooks[nn.Module] = Hooks()
        self._norms: dict[Tensor, Tensor] = {}
        self._sharded: list[Tensor] = []
        self._reached: dict[Tensor, int] = {}  # parameter -> the latest backward pass that has reached it
        self._noticed: set[int] = set()  # backward passes that have called :meth:`_begun`

    def arm(self) -> None:
        """Register the hooks."""
        self.disarm()
        model = self._model
        for p in dict.fromkeys(p for optimizer in self._optimizers for p in parameters_of(optimizer)):
            if not p.requires_grad or is_lazy(p):
                continue
            if is_distributed(p) or id(p) in self._flat:
                self._sharded.append(p)
            elif p.is_leaf:
                self._hooks.handles.append(GradientHook(p, partial(self._reaching, p)))
        if model is not None:
            for module in entrances(model, compiled_modules(model).values()):
                if module is not model and not any(map(is_distributed, module.parameters(recurse=False))):
                    continue
                if getattr(module, "_compiled_call_impl", None) is not None:
                    self._hooks.handles.append(WrappedCall(module, lambda *_: None, self._called))
                else:
                    self._hooks.add(module, module.register_forward_hook, self._called, with_kwargs=True)

    def disarm(self) -> None:
        """Remove the hooks and forget the norms; safe to call at any time."""
        self._hooks.remove()
        self._norms.clear()
        self._sharded.clear()
        self._reached.clear()
        self._noticed.clear()

    def _called(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if in_backward() or in_transform():
            return
        with self._harmless("the end of a module's forward pass"):
            self._hooks.handles += [x.register_hook(self._begun) for x in tensors_in(output) if x.grad_fn is not None]

    def _reaching(self, p: Tensor, *_: Any) -> None:
        self._reached[p] = backward_pass()
        self._begun()

    def _begun(self, *_: Any) -> None:
        """Take the norms at the end of the running backward pass."""
        number = backward_pass()
        if number not in self._noticed:
            self._noticed.add(number)
            # Processes average gradients at the end too. They have queued that when the outer function is called.
            after_backward(lambda: after_backward(partial(self._ended, number)))

    @torch.no_grad()
    def _ended(self, number: int) -> None:
        """Take the norms of the gradients of a pass, and of the passes inside it (checkpoints, for example)."""
        with self._harmless("reading gradients that have arrived"):
            arrived = [p for p, latest in self._reached.items() if latest >= number]
            dense = [p for p in (*arrived, *self._sharded) if p.grad is not None and not p.grad.is_sparse]
            for p in arrived:
                self._norms.pop(p, None)
            self._norms.update(zip(dense, self._norms_of(dense).unbind(), strict=True))

    def of(self, optimizer: Optimizer) -> tuple[tuple[Tensor, ...], Tensor] | None:
        """Return the parameters of a stepping optimizer whose gradients have arrived, and their norms without the loss
        scale; ``None`` if there are none.
        """
        parameters = tuple(p for p in parameters_of(optimizer) if p in self._norms)
        if not parameters:
            return None
        norms = torch.stack([self._norms[p].to(self._norms[parameters[0]]) for p in parameters])
        return parameters, norms / scale_in_use()


def scale_in_use() -> float:
    """Return the loss scale of the ``GradScaler`` that runs the current optimizer step; 1 if none does.

    The scaler has unscaled the gradients by then, and the optimizer does not know it. So it is looked up among the
    callers.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is GradScaler.step.__code__:
            return float(frame.f_locals["self"].get_scale())
        frame = frame.f_back
    return 1.0
