"""Gradients that an optimizer uses twice: they were not cleared, or no new ones came before the next step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from spectral_monitor.capture.hooks.registration import GradientHook, Harmless
from spectral_monitor.capture.unwrap import parameters_of
from spectral_monitor.state.dtensor import is_distributed


class GradientReuse:
    """Watches the gradient of one small parameter of each optimizer while armed: of an output layer, if possible.

    Output layers get gradients first: if outputs begin at 0, no other layer has any at the first step.

    A gradient is reused if it has not changed between a step and the next backward pass, and is not cleared before the
    next step. A loop that clears gradients between two backward passes, as for a GAN, has none of the first pass when
    it steps. A loop that does not may add another network's gradients before the measured step ends. Nothing is copied:
    a gradient is identified by the tensor and its version.

    All this takes two steps in a row. If the second is not measured, it is watched nevertheless, once.

    Attributes:
        steps: number of watched steps of optimizers since it was armed.
    """

    def __init__(self, optimizers: Sequence[Optimizer], harmless: Harmless) -> None:
        """``harmless``: entered around the work of hooks."""
        self._optimizers, self._harmless = optimizers, harmless
        self.steps = 0
        self._decided = False  # whether two steps in a row were watched
        self._handles: list[GradientHook] = []
        # All by id of the optimizer. A reuse is 1 if a step has used the gradient, 0 if it is new, NaN if unknown.
        self._parameters: dict[int, Tensor] = {}  # the watched one
        self._latest_ids: dict[int, int] = {}  # id of the parameter that was watched last
        # Gradient after the latest step and its version; its reuse if backward passes came since, else ``None``.
        self._previous: dict[int, tuple[ReferenceType[Tensor], int, Tensor | None]] = {}
        self._reuse: dict[int, Tensor] = {}  # as backward passes since the latest step found it
        self._unreported: dict[int, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, whose gradients are other tensors."""
        return self.__dict__ | {"_previous": {}, "_unreported": {}}

    @property
    def is_open(self) -> bool:
        """True if a step was watched, but no two in a row."""
        return bool(self._previous) and not self._decided

    def arm(self, outputs: Sequence[Tensor]) -> None:
        """Register the hooks; ``outputs`` are parameters of output layers."""
        self.disarm()
        output_ids = set(map(id, outputs))
        for optimizer in self._optimizers:
            candidates = [
                p
                for p in parameters_of(optimizer)
                if p.requires_grad and p.is_leaf and not is_lazy(p) and p.numel() > 1 and not is_distributed(p)
            ]
            if candidates:
                key = id(optimizer)
                # The gradient of the previous step must be compared with one of the same parameter, even if the first
                # steps have shown other output layers since.
                same = [p for p in candidates if key in self._previous and id(p) == self._latest_ids[key]]
                p = min(same or [p for p in candidates if id(p) in output_ids] or candidates, key=Tensor.numel)
                self._parameters[key], self._latest_ids[key] = p, id(p)
                self._handles.append(GradientHook(p, partial(self._arrive, key)))

    def disarm(self) -> None:
        """Remove the hooks; safe to call at any time."""
        while self._handles:
            self._handles.pop().remove()
        for key, reuse in self._reuse.items():
            self._keep_gradient(key, reuse)
        self._parameters.clear()
        self._reuse.clear()
        self.steps = 0

    def _arrive(self, key: int, _: Any) -> None:
        """Look at the gradient that a new one will be added to."""
        with self._harmless("checking for gradients that were not cleared"):
            gradient, reuse = self._parameters[key].grad, self._reuse.get(key)
            new = torch.zeros((), device=self._parameters[key].device)
            if gradient is None or gradient.is_sparse:
                self._reuse[key] = new if gradient is None else new.fill_(torch.nan)
            elif reuse is None:
                self._reuse[key] = self._reuse_of(key, gradient)
            else:  # perhaps cleared in between
                self._reuse[key] = torch.where(gradient.any(), reuse, new)

    def _reuse_of(self, key: int, gradient: Tensor) -> Tensor:
        """Return 1 if a gradient is the previous one, 0 if it was cleared, NaN if neither is certain (if the previous
        one was zero, for example); the device is not waited for.
        """
        previous, version, reuse = self._previous.get(key, (None, -1, None))
        unknown = torch.full((), torch.nan, device=gradient.device)
        if previous is not None and previous() is gradient and gradient._version == version:
            return torch.where(gradient.any(), torch.ones_like(unknown) if reuse is None else reuse, unknown)
        return torch.where(gradient.any(), unknown, torch.zeros_like(unknown))

    def stepping(self, optimizer: Optimizer) -> Tensor | None:
        """Return the reuse of the gradients that an optimizer is about to use; ``None`` if it is not watched."""
        key = id(optimizer)
        if key not in self._parameters:
            return None
        self.steps += 1
        self._decided |= key in self._previous
        gradient = self._parameters[key].grad
        if key in self._reuse or gradient is None or gradient.is_sparse:
            reuse = self._reuse.pop(key, None)
        else:  # no backward pass since the latest step
            reuse = self._reuse_of(key, gradient)
        if reuse is None or key not in self._unreported:
            return reuse
        return torch.where(reuse.isnan(), self._unreported.pop(key), reuse)

    def keep(self, optimizer: Optimizer, reuse: Tensor) -> None:
        """Keep the reuse at a step that is not reported, for the next step if its own is unknown."""
        self._unreported[id(optimizer)] = reuse

    def stepped(self, optimizer: Optimizer) -> None:
        """Record the gradient after a step."""
        key = id(optimizer)
        self._previous.pop(key, None)
        if key in self._parameters:
            self._keep_gradient(key, None)

    def _keep_gradient(self, key: int, reuse: Tensor | None) -> None:
        gradient = self._parameters[key].grad
        if gradient is not None and not gradient.is_sparse:
            self._previous[key] = ref(gradient), gradient._version, reuse
