"""What the zoo knows of a model: how to build it, feed it and train it for one step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Batch = dict[str, Any]

Row = tuple[str, str, str, dict[str, Any], Callable[[torch.Generator], Batch]]
"""Of transformers: name, the class that builds it, model type, settings, batches."""


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that Hugging Face's models return when they are given labels."""
    return model(**batch)["loss"]


def adamw(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)]


def descend(case: Case, model: nn.Module, optimizers: list[Optimizer], batch: Batch) -> list[float]:
    """One step of one optimizer."""
    (optimizer,) = optimizers
    optimizer.zero_grad()
    loss = case.loss(model, batch)
    loss.backward()
    optimizer.step()
    return [float(loss.detach())]


Step = Callable[["Case", nn.Module, list[Optimizer], Batch], list[float]]


@dataclass(frozen=True)
class Case:
    """One architecture.

    Attributes:
        name: as the table in the documentation shows it.
        family: its heading there.
        build: the model, from the global random state.
        batch: a batch from a generator; always of the same shapes.
        loss: of a model and a batch.
        optimizers: of a model.
        step: forward, backward and update; what it returns is compared too.
        ran_last: where that is not the operator registered last, which the first step must show.
        whole: whether the model is called once per step, so that features after the step can be had.
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor] = own_loss
    optimizers: Callable[[nn.Module], list[Optimizer]] = adamw
    step: Step = descend
    ran_last: str = ""
    whole: bool = True

    def make(self) -> nn.Module:
        """The model, always with the same weights; leaves every global generator at a known place."""
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        torch.manual_seed(5)
        return self.build().train()

    def batches(self, count: int) -> list[Batch]:
        """Always the same ones."""
        generator = torch.Generator().manual_seed(17)
        return [self.batch(generator) for _ in range(count)]
