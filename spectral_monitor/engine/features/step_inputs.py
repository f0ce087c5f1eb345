"""Facts about a step that the training loop knows, and what follows from them for its loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from spectral_monitor.capture.replay.replay import Replayable, RootCall

Context = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class StepInputs:
    """Facts about a step that the training loop knows."""

    # runs the forward of the whole training step again, for models called in several parts
    training_step: Replayable | None = None
    # the loss that the backward pass started from; shows whether the loss a model returns is the one trained on
    loss: Tensor | None = None
    accumulated: int = 1  # the number that the model's loss was divided by to give ``loss``
    loss_scale: float = 1.0  # the factor on the loss before the backward pass, against underflow in half precision
    loss_parts: int = 1  # losses of processes and micro-batches whose sum is the step's loss; 1 if it is their mean
    context: Context = nullcontext  # precision the replayed forward runs under, besides the autocast that was recorded
    only_if_stepped: bool = False  # measure nothing if no optimizer has stepped

    def training_loss(self, forward: Replayable) -> Tensor | None:
        """Return the loss of a forward; NaN if training uses another loss, or a larger one that contains it."""
        first_loss = forward.first_loss
        if not isinstance(forward, RootCall):
            loss = None if self.loss is None else self.loss * self.accumulated
            return loss if loss is None or first_loss is None else first_loss
        if forward.loss is None:
            return None
        if self.loss is None:
            complete = forward.flow is not None and forward.flow.whole(self.accumulated, self.loss_parts)
        else:
            complete = ((forward.loss / self.accumulated).to(self.loss) == self.loss).all()
        loss = forward.loss if first_loss is None else first_loss
        return torch.where(torch.as_tensor(complete, device=loss.device), loss, math.nan)

    def backward_loss(self, loss: Tensor | None) -> Tensor | None:
        """Return the loss that the backward pass began with, before it was divided; ``None`` or NaN if not known.

        ``loss``: the loss of the forward, from :meth:`training_loss`.
        """
        if self.loss is not None:
            return self.loss * self.accumulated
        return None if loss is None else loss * self.loss_parts

    def forward_to_loss(self, forward: Replayable | None) -> tuple[Replayable | None, Tensor | float]:
        """Return a forward that ends with the loss, and the gradient with which the backward pass began there.

        ``forward``: the one that can be run again; ``None`` if there is none.
        """
        if isinstance(forward, RootCall) and forward.flow is not None and len(forward.flow.gradients) == 1:
            loss = None if self.loss is None else self.training_loss(forward)
            if bool(forward.flow.alone() if loss is None else ~loss.isnan()):
                return forward, forward.flow.gradients[0]
        step = self.training_step if isinstance(forward, RootCall) else forward
        if step is None or step.obstacles or step.uncopied or self.loss is None:
            return None, 0.0
        return step, self.loss_scale / self.accumulated
