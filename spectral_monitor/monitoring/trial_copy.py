"""A copy of a model and its optimizer, trained on one batch without a change to the originals."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import Parameter
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spectral_monitor.capture.replay.loss_flow import loss_in
from spectral_monitor.capture.replay.replay import clone_tree
from spectral_monitor.capture.unwrap import unwrap_model, unwrap_optimizers
from spectral_monitor.condition.optimizers.hyperparameters import learning_rate
from spectral_monitor.condition.optimizers.plans import highest_rate

HOW = "call check(model, (inputs, targets), optimizer, loss), or use a model that returns its loss"


class TrialCopy:
    """A copy to train.

    Args:
        batch: as :func:`~spectral_monitor.check` takes it.
        optimizer: one or several; ``None`` for those that ``configure_optimizers`` makes.
        loss: of outputs and targets; ``None`` where the model has it.

    Attributes:
        root: the module whose call is one forward; its layers have the same names as in the model.
        optimizers: of the copy's parameters.
        notes: differences from the model, in sentences.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: the model cannot be copied, or no optimizer holds a parameter of it.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        optimizer: Optimizer | Iterable[Optimizer] | None,
        loss: Callable[[Any, Any], Tensor] | None,
    ) -> None:
        self.notes: list[str] = []
        self._batch, self._loss = batch, loss
        model = unwrap_model(model)
        originals = [] if optimizer is None else unwrap_optimizers(optimizer, model)
        try:
            self.model, self.optimizers = copy.deepcopy((model, originals))
        except Exception as error:
            raise ValueError(
                f"{type(model).__name__} and its optimizer cannot be copied ({type(error).__name__}: {error})"
            ) from error
        if optimizer is None:
            self.optimizers = _configured(self.model)
        if any(isinstance(item, torch.optim.LBFGS) for item in self.optimizers):
            raise ValueError("check cannot step LBFGS, which runs the model several times in a step")
        if not self.model.training:
            self.model.train()
            self.notes.append("the model is in evaluation mode; its copy was trained in training mode")
        self._raise_rates()
        self._steps_itself = loss is None and hasattr(self.model, "training_step")
        self.root = (
            _TrainingStepModule(self.model, partial(training_step, self.model)) if self._steps_itself else self.model
        )

    def step(self) -> Tensor:
        """Train on the batch once; return the loss before the step.

        Raises:
            ValueError: the model returns no loss.
        """
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self._forward()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()

    def timed(self) -> float:
        """Return the seconds that a step takes, with the work of the device."""
        self._wait()
        begin = perf_counter()
        self.step()
        self._wait()
        return perf_counter() - begin

    def _wait(self) -> None:
        for device in {p.device for p in self.model.parameters() if p.device.type == "cuda"}:
            torch.cuda.synchronize(device)

    def _forward(self) -> Tensor:
        batch = clone_tree(self._batch)
        if self._loss is not None:
            *inputs, targets = batch
            return self._loss(self._called(*inputs), targets)
        if self._steps_itself:
            output = self.root(batch)
        elif isinstance(batch, Mapping):
            output = self._called(**batch)
        else:
            output = self._called(*batch) if isinstance(batch, tuple | list) else self._called(batch)
        loss = loss_in(output)
        if loss is None:
            raise ValueError(f"no loss in what {type(self.model).__name__} returns, {type(output).__name__}: {HOW}")
        return loss

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model for the parts of the batch.

        Raises:
            TypeError: it does not take them.
        """
        try:
            return self.root(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"{type(self.model).__name__} was called with the parts of the batch as arguments and failed "
                f"({error}): {HOW}. Without a loss, a tuple is passed as arguments, (batch,) as a single argument and "
                "a mapping as keywords"
            ) from error

    def _raise_rates(self) -> None:
        """Set learning rates that a schedule has lowered to their peak: the first steps of a warm-up show no faults."""
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            peak = highest_rate(group)
            if peak > learning_rate(group):
                self.notes.append("learning rates that a schedule has lowered were used at their peak")
                group["lr"] = peak


def training_step(model: nn.Module, batch: Any, index: int = 0) -> Any:
    """Call a module's ``training_step``, with the batch's index if it takes one, as Lightning does."""
    step: Any = model.training_step
    kinds = [parameter.kind for parameter in inspect.signature(step).parameters.values()]
    positional = sum(kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
    return step(batch, index) if positional > 1 or Parameter.VAR_POSITIONAL in kinds else step(batch)


def optimizers_and_schedulers(configuration: Any) -> tuple[list[Any], list[Any]]:
    """Return the parts of what ``configure_optimizers`` returns, from any form that Lightning allows."""
    optimizers, schedulers = configuration, list[Any]()
    if isinstance(optimizers, Sequence) and len(optimizers) == 2 and isinstance(optimizers[0], Sequence):
        optimizers, schedulers = optimizers
        schedulers = list(schedulers) if isinstance(schedulers, Sequence) else [schedulers]
    items = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
    schedulers += [item["lr_scheduler"] for item in items if isinstance(item, Mapping) and "lr_scheduler" in item]
    return [item.get("optimizer") if isinstance(item, Mapping) else item for item in items], schedulers


class _TrainingStepModule(nn.Module):
    """A module with the children of another one, and that module's training step as its forward."""

    def __init__(self, model: nn.Module, forward: Callable[[Any], Any]) -> None:
        super().__init__()
        for table in ("_modules", "_parameters", "_buffers"):
            object.__setattr__(self, table, getattr(model, table))
        self._call = forward

    def forward(self, batch: Any) -> Any:
        """Return what the training step returns."""
        return self._call(batch)


def _configured(model: nn.Module) -> list[Optimizer]:
    """Return the optimizers that a ``LightningModule`` makes.

    Raises:
        TypeError: it has no ``configure_optimizers``.
        ValueError: that fails without a trainer.
    """
    make: Any = getattr(model, "configure_optimizers", None)
    if make is None:
        raise TypeError("check needs an optimizer: check(model, batch, optimizer, loss)")
    try:
        configured = make()
    except Exception as error:
        raise ValueError(
            f"configure_optimizers fails without a trainer ({type(error).__name__}: {error}): give check an optimizer"
        ) from error
    return unwrap_optimizers(optimizers_and_schedulers(configured)[0], model)
