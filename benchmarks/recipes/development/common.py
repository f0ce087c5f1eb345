"""What the development recipes share: splits of real data, fixed evaluations, groups of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, cross_entropy
from torch.optim import Optimizer

from benchmarks.rates.tuned import DATA, digits, images, text
from benchmarks.recipes.run import Run, batches


@dataclass(frozen=True)
class Split:
    """Inputs and targets to train on and to evaluate on."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


@cache
def digit_split() -> Split:
    return split(*digits(), 360)


@cache
def image_split(size: int) -> Split:
    """Split the images, averaged down to a size in pixels."""
    x, y = images(DATA)
    return split(adaptive_avg_pool2d(x, size), y, 512)


def split(x: Tensor, y: Tensor, held_out: int) -> Split:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return Split(x[held_out:], y[held_out:], x[:held_out], y[:held_out])


@cache
def characters() -> tuple[Tensor, int]:
    """Return the text as numbers and how many different ones there are."""
    windows = text(DATA, 64)
    return windows.codes, windows.vocab


def private(seed: int) -> torch.Generator:
    """Make a generator of batches, apart from the one of the weights."""
    return batches(seed + 1000)


def wide(size: int, width: float, multiple: int = 1) -> int:
    """Multiply a width, rounded to a multiple."""
    return max(multiple, round(size * width / multiple) * multiple)


def fixed(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], float]:
    """Make an evaluation without dropout or gradients that leaves every module in the mode it was in."""

    def evaluate() -> float:
        modes = {module: module.training for module in model.modules()}
        model.eval()
        with torch.no_grad():
            value = loss().item()
        for module, mode in modes.items():
            module.training = mode
        return value

    return evaluate


def classification(
    model: nn.Module,
    optimizers: Optimizer | list[Optimizer],
    data: Split,
    seed: int,
    steps: int,
    *,
    batch: int = 64,
    smoothing: float = 0.0,
    generator: torch.Generator | None = None,
    augment: Callable[[Tensor, torch.Generator], Tensor] = lambda x, generator: x,
    **options: object,
) -> Run:
    """Make a run that learns to classify, evaluated by the cross entropy of the test images."""
    source = private(seed) if generator is None else generator

    def loss() -> Tensor:
        rows = torch.randint(len(data.x), (batch,), generator=source)
        return cross_entropy(model(augment(data.x[rows], source)), data.y[rows], label_smoothing=smoothing)

    return Run(
        model,
        optimizers if isinstance(optimizers, list) else [optimizers],
        loss,
        fixed(model, lambda: cross_entropy(model(data.test_x), data.test_y)),
        steps,
        **options,
    )


def flipped(x: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror half of the images."""
    mirrored = torch.rand(len(x), 1, 1, 1, generator=generator) < 0.5
    return torch.where(mirrored, x.flip(-1), x)


def noisy(x: Tensor, generator: torch.Generator) -> Tensor:
    """Add noise, without which the digits are learnt by heart."""
    return x + 0.5 * torch.randn(x.shape, generator=generator)


def language(
    model: nn.Module,
    optimizers: Optimizer | list[Optimizer],
    seed: int,
    steps: int,
    *,
    codes: Tensor | None = None,
    context: int = 64,
    batch: int = 16,
    **options: object,
) -> Run:
    """Make a run that predicts the next character, evaluated on the last tenth of the text."""
    codes = characters()[0] if codes is None else codes
    boundary = int(0.9 * len(codes))
    source = private(seed)
    span = torch.arange(context + 1)
    starts = torch.linspace(boundary, len(codes) - context - 1, 32).long()
    held_out = codes[starts[:, None] + span]

    def entropy(windows: Tensor) -> Tensor:
        return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    def loss() -> Tensor:
        rows = torch.randint(boundary - context - 1, (batch, 1), generator=source)
        return entropy(codes[rows + span])

    return Run(
        model,
        optimizers if isinstance(optimizers, list) else [optimizers],
        loss,
        fixed(model, lambda: entropy(held_out)),
        steps,
        **options,
    )


def decayed(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict]:
    """Group parameters so that biases and gains have no weight decay."""
    parameters = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
