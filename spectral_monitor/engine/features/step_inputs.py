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
    # what the backward pass started from, to tell whether the loss a model returns is that one
    loss: Tensor | None = None
    accumulated: int = 1  # what the model's loss was divided by to become that
    loss_scale: float = 1.0  # what it was multiplied by before the backward pass, to keep half precision from underflow
    # of how many losses, of processes and micro-batches, that of the step is the sum; 1 if it is their mean
    loss_parts: int = 1
    context: Context = nullcontext  # precision the replayed forward runs under, besides the autocast that was recorded
    only_if_stepped: bool = False  # measure nothing if no optimizer has stepped
    # whether the loss is given what is no input for it, as :func:`has_unfit_input` has it; ``None`` where the loss was
    # not seen
    unfit_loss_input: bool | None = None

    def trained_on(self, root: Replayable) -> Tensor | None:
        """Return the loss of a forward; NaN if training uses another one, or one of which that is a part."""
        if not isinstance(root, RootCall):
            told = None if self.loss is None else self.loss * self.accumulated
            return told if told is None or root.first_loss is None else root.first_loss
        if root.loss is None:
            return None
        if self.loss is None:
            whole = root.flow is not None and root.flow.whole(self.accumulated, self.loss_parts)
        else:
            whole = ((root.loss / self.accumulated).to(self.loss) == self.loss).all()
        before = root.loss if root.first_loss is None else root.first_loss
        return torch.where(torch.as_tensor(whole, device=before.device), before, math.nan)

    def begun(self, before: Tensor | None) -> Tensor | None:
        """Return the loss that the backward pass began with, before it was divided; ``None`` or NaN if not known.

        ``before``: the loss that the forward returned, as :meth:`trained_on` has it.
        """
        if self.loss is not None:
            return self.loss * self.accumulated
        return None if before is None else before * self.loss_parts

    def up_to_loss(self, again: Replayable | None) -> tuple[Replayable | None, Tensor | float]:
        """Return the forward that ends with the loss, and the gradient with which the backward pass began there.

        ``again``: the forward that can be run again, if there is one.
        """
        if isinstance(again, RootCall) and again.flow is not None and len(again.flow.gradients) == 1:
            loss = None if self.loss is None else self.trained_on(again)
            if bool(again.flow.alone() if loss is None else ~loss.isnan()):
                return again, again.flow.gradients[0]
        step = self.training_step if again is None or isinstance(again, RootCall) else again
        if again is None or step is None or step.obstacles or step.uncopied or self.loss is None:
            return None, 0.0
        return step, self.loss_scale / self.accumulated
