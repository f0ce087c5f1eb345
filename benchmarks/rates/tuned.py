"""Five small tasks with tuned recipes: multilayer perceptrons, a conv net, a character transformer.

Where CIFAR-10 and Shakespeare are not at hand, the digits of scikit-learn and this project's licence stand in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.char_transformer import CharTransformer, Windows, read_text
from spectral_monitor import Measurement, SpectralProbe

DATA = Path(__file__).parents[3] / "shared" / "data"
Loss = Callable[[], Tensor]
Rule = Callable[[str, nn.Parameter], float]


@dataclass
class Run:
    """A model in training: ``loss()`` of a fresh batch; ``step()`` is the caller's."""

    model: nn.Module
    optimizer: Optimizer
    schedule: LambdaLR
    loss: Loss


@dataclass(frozen=True)
class Task:
    """A healthy recipe: tuned over factors of 2 in its learning rate, warmed up over a tenth, then decayed.

    Attributes:
        model: width and folder of the data -> model.
        data: folder -> inputs and targets, or a text.
        optimizer: groups -> optimizer.
        lr: at its peak.
    """

    name: str
    model: Callable[[int, Path], nn.Module]
    optimizer: Callable[[list[dict[str, object]], float], Optimizer]
    batches: Callable[[Path, torch.Generator], Callable[[], tuple[Tensor, Tensor]]]
    lr: float
    width: int
    steps: int = 300


class Flat(nn.Module):
    """A multilayer perceptron on flattened images."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        pairs = pairwise(sizes)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairs)

    def forward(self, x: Tensor) -> Tensor:
        h = x.flatten(1)
        for layer in self.layers[:-1]:
            h = layer(h).relu()
        return self.layers[-1](h)


class Conv(nn.Module):
    """Four convolutions with batch norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        channels = (3, width, 2 * width, 2 * width, 4 * width)
        pairs = list(pairwise(channels))
        self.convs = nn.ModuleList(nn.Conv2d(*pair, 3, padding=1, bias=False) for pair in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in channels[1:])
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for conv, norm in zip(self.convs, self.norms, strict=True):
            h = nn.functional.max_pool2d(norm(conv(h)).relu(), 2)
        return self.head(h.mean((2, 3)))


class Residual(nn.Module):
    """A residual perceptron with layer norm."""

    def __init__(self, width: int, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(3072, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth + 1))
        self.into = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x.flatten(1))
        for norm, into, out in zip(self.norms, self.into, self.out, strict=False):
            h = h + out(nn.functional.gelu(into(norm(h))))
        return self.head(self.norms[-1](h))


@cache
def digits() -> tuple[Tensor, Tensor]:
    x, y = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    x = x.float() / 16
    return ((x - x.mean(0)) / x.std(0).clamp(min=1e-6)).clamp(-3, 3), y


@cache
def images(data: Path) -> tuple[Tensor, Tensor]:
    """CIFAR-10's, where they are; otherwise the digits, as large and in colour."""
    if (path := data / "cifar10_small.npz").exists():
        arrays = np.load(path)
        x, y = torch.as_tensor(arrays["train_images"]).float() / 255, torch.as_tensor(arrays["train_labels"]).long()
        return (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True), y
    x, y = digits()
    return interpolate(x.view(-1, 1, 8, 8), (32, 32)).repeat(1, 3, 1, 1), y


def drawn(x: Tensor, y: Tensor, size: int, generator: torch.Generator) -> Callable[[], tuple[Tensor, Tensor]]:
    def batch() -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(x), (size,), generator=generator)
        return x[rows], y[rows]

    return batch


@cache
def text(data: Path, context: int) -> Windows:
    path = data / "tinyshakespeare.txt"
    return Windows(read_text(str(path) if path.exists() else None), context)


def windows(data: Path, generator: torch.Generator) -> Callable[[], tuple[Tensor, Tensor]]:
    all_windows = text(data, 64)

    def batch() -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(all_windows), (16,), generator=generator).tolist()
        x, y = zip(*(all_windows[row] for row in rows), strict=True)
        return torch.stack(x), torch.stack(y)

    return batch


TASKS = {
    task.name: task
    for task in (
        Task(
            "digits MLP, Adam",
            lambda width, data: Flat(64, width, width, width, 10),
            lambda groups, lr: Adam(groups, lr=lr),
            lambda data, generator: drawn(*digits(), 128, generator),
            2e-3,
            256,
        ),
        Task(
            "CIFAR MLP, SGD",
            lambda width, data: Flat(3072, width, width, width, 10),
            lambda groups, lr: SGD(groups, lr=lr, momentum=0.9),
            lambda data, generator: drawn(*images(data), 128, generator),
            0.08,
            256,
        ),
        Task(
            "CIFAR conv net, SGD",
            lambda width, data: Conv(width),
            lambda groups, lr: SGD(groups, lr=lr, momentum=0.9, weight_decay=5e-4),
            lambda data, generator: drawn(*images(data), 64, generator),
            0.05,
            16,
        ),
        Task(
            "char transformer, AdamW",
            lambda width, data: CharTransformer(vocab=text(data, 64).vocab, width=width, depth=2, heads=4, context=64),
            lambda groups, lr: AdamW(groups, lr=lr, weight_decay=0.1),
            windows,
            1.6e-2,
            64,
        ),
        Task(
            "CIFAR residual MLP, AdamW",
            lambda width, data: Residual(width),
            lambda groups, lr: AdamW(groups, lr=lr, weight_decay=0.05),
            lambda data, generator: drawn(*images(data), 128, generator),
            1e-3,
            128,
        ),
    )
}


def start(
    task: Task,
    data: Path = DATA,
    *,
    seed: int = 0,
    lr: float | None = None,
    width: int | None = None,
    steps: int | None = None,
    plant: Callable[[nn.Module], None] = lambda model: None,
    rule: Rule = lambda name, parameter: 1.0,
    warmup: bool = True,
) -> Run:
    """A task ready to train, with a fault planted in its weights or its learning rates."""
    steps = steps or task.steps
    torch.manual_seed(seed)
    model = task.model(width or task.width, data)
    plant(model)
    lr = lr or task.lr
    groups: list[dict[str, object]] = [
        {"params": [parameter], "lr": lr * rule(name, parameter)} for name, parameter in model.named_parameters()
    ]
    optimizer = task.optimizer(groups, lr)
    rise = max(steps // 10, 1) if warmup else 0
    schedule = LambdaLR(
        optimizer,
        lambda t: min(1.0, (t + 1) / rise) if t < rise else 0.5 * (1 + math.cos(math.pi * (t - rise) / (steps - rise))),
    )
    batch = task.batches(data, torch.Generator().manual_seed(seed))

    def loss() -> Tensor:
        x, y = batch()
        return model(x, y) if isinstance(model, CharTransformer) else cross_entropy(model(x), y)

    return Run(model, optimizer, schedule, loss)


def train(run: Run, steps: int, every: int) -> tuple[list[Measurement], list[float]]:
    """Measurements and losses."""
    probe = SpectralProbe(run.model, run.optimizer, every_n_steps=every, quantities="light", mode="observe")
    losses = []
    for _ in range(steps):
        with probe.step():
            run.optimizer.zero_grad()
            loss = run.loss()
            loss.backward()
            run.optimizer.step()
        run.schedule.step()
        losses.append(loss.item())
    return list(probe.measurements), losses
