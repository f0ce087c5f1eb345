"""Gradients that an optimizer is given twice: never cleared, or stepped with again."""

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
    """Looks at one small parameter of each optimizer, while armed: of an output layer, if it has one.

    Those are the first to get gradients: where outputs begin at 0, no other layer has any at the first step.

    If a backward pass finds the gradient that the latest step left behind, unchanged, and it is still there when
    the optimizer steps, it is used again. A loop that clears gradients between two backward passes, as those of a GAN
    do, has none of the first left when it steps. One that does not may add another network's gradients to them before
    the measured step ends. Nothing is copied: a tensor is known by itself and by its version.

    That takes two steps in a row. Where the second is not measured, it is watched all the same, once.

    Attributes:
        steps: of optimizers that were looked at since it was armed.
    """

    def __init__(self, optimizers: Sequence[Optimizer], harmless: Harmless) -> None:
        """``harmless``: to be entered around what hooks do."""
        self._optimizers, self._harmless = optimizers, harmless
        self.steps = 0
        self._decided = False  # whether a step was looked at that follows another one that was
        self._handles: list[GradientHook] = []
        self._watched: dict[int, Tensor] = {}  # optimizer -> its parameter
        self._looked_at: dict[int, int] = {}  # optimizer -> id of the parameter that was watched last
        # Optimizer -> gradient after its latest step, or with what was added since, and 1 if a step has used that.
        self._left: dict[int, tuple[ReferenceType[Tensor], int, Tensor | None]] = {}
        self._found: dict[int, Tensor] = {}  # since its latest step: 1 used before, 0 new, NaN unknown
        self._known: dict[int, Tensor] = {}  # found, but not reported yet

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy keeps: gradients are known by their place in memory, which is another one there."""
        return self.__dict__ | {"_left": {}, "_known": {}}

    @property
    def is_open(self) -> bool:
        """Return whether a step has left gradients behind, and none was seen that follows such a step."""
        return bool(self._left) and not self._decided

    def arm(self, outputs: Sequence[Tensor]) -> None:
        """Register the hooks; ``outputs`` are parameters of output layers."""
        self.disarm()
        ends = set(map(id, outputs))
        for optimizer in self._optimizers:
            some = [
                p
                for p in parameters_of(optimizer)
                if p.requires_grad and p.is_leaf and not is_lazy(p) and p.numel() > 1 and not is_distributed(p)
            ]
            if some:
                key = id(optimizer)
                # The first steps show which layers are outputs; what a step has left is that parameter's it looked at.
                same = [p for p in some if key in self._left and id(p) == self._looked_at[key]]
                p = min(same or [p for p in some if id(p) in ends] or some, key=Tensor.numel)
                self._watched[key], self._looked_at[key] = p, id(p)
                self._handles.append(GradientHook(p, partial(self._arrive, key)))

    def disarm(self) -> None:
        """Remove the hooks; safe to call at any time."""
        while self._handles:
            self._handles.pop().remove()
        for key, found in self._found.items():  # by backward passes since its latest step
            self._leave(key, found)
        self._watched.clear()
        self._found.clear()
        self.steps = 0

    def _arrive(self, key: int, _: Any) -> None:
        """Look at what is there already when a gradient arrives."""
        with self._harmless("looking at gradients that were not cleared"):
            held, known = self._watched[key].grad, self._found.get(key)
            new = torch.zeros((), device=self._watched[key].device)
            if held is None or held.is_sparse:
                self._found[key] = new if held is None else new.fill_(torch.nan)
            elif known is None:
                self._found[key] = self._again(key, held)
            else:  # cleared in between, perhaps
                self._found[key] = torch.where(held.any(), known, new)

    def _again(self, key: int, held: Tensor) -> Tensor:
        """Return 1 if a gradient is the one that was left behind, 0 if it was cleared, NaN if neither is known, as of
        one that was left behind as zeros; no waiting.
        """
        left, version, used = self._left.get(key, (None, -1, None))
        unknown = torch.full((), torch.nan, device=held.device)
        if left is not None and left() is held and held._version == version:
            return torch.where(held.any(), torch.ones_like(unknown) if used is None else used, unknown)
        return torch.where(held.any(), unknown, torch.zeros_like(unknown))

    def stepping(self, optimizer: Optimizer) -> Tensor | None:
        """Return what is known of the gradients that an optimizer is about to use; ``None`` if nothing is."""
        key = id(optimizer)
        if key not in self._watched:
            return None
        self.steps += 1
        self._decided |= key in self._left
        held = self._watched[key].grad
        if key in self._found or held is None or held.is_sparse:
            found = self._found.pop(key, None)
        else:  # no backward pass since the latest step
            found = self._again(key, held)
        if found is None or key not in self._known:
            return found
        return torch.where(found.isnan(), self._known.pop(key), found)

    def keep(self, optimizer: Optimizer, found: Tensor) -> None:
        """Remember what was found at a step that reports nothing, for the next one if nothing is known of that."""
        self._known[id(optimizer)] = found

    def stepped(self, optimizer: Optimizer) -> None:
        """Note what a step leaves behind."""
        key = id(optimizer)
        self._left.pop(key, None)
        if key in self._watched:
            self._leave(key, None)

    def _leave(self, key: int, used: Tensor | None) -> None:
        """Remember a gradient that is there now, and whether a step has used it; ``None`` where one just has."""
        gradient = self._watched[key].grad
        if gradient is not None and not gradient.is_sparse:
            self._left[key] = ref(gradient), gradient._version, used
