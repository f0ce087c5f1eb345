"""Small networks of any width, real data, and three ways to choose learning rates: the tasks of transfer.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.char_transformer import Block
from spectral_monitor import LRCorrection, SpectralProbe

Batch = tuple[Tensor, Tensor]
Sampler = Callable[[torch.Generator], Batch]
CONTEXT = 64


class Perceptron(nn.Module):
    """Three hidden layers."""

    def __init__(self, width: int, features: int, readout: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Linear(features, width), nn.ReLU()),
            *(nn.Linear(width, width), nn.ReLU()),
            *(nn.Linear(width, width), nn.ReLU()),
        )
        self.readout = readout(width, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.readout(self.body(x.flatten(1))), y)


class Convolutional(nn.Module):
    """Three convolutions of stride 2."""

    def __init__(self, width: int, channels: int, readout: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride=2, padding=1), nn.ReLU()),
        )
        self.readout = readout(width, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.readout(self.body(x).mean((2, 3))), y)


class Transformer(nn.Module):
    """Two blocks on characters; the readout may be the embedding."""

    def __init__(self, width: int, vocabulary: int, tied: bool, readout: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(Block(width, 4), Block(width, 4))
        self.norm, self.readout = nn.LayerNorm(width), readout(width, vocabulary, bias=False)
        if tied:
            self.readout.weight = self.tokens.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        return F.cross_entropy(self.readout(self.norm(self.blocks(h))).flatten(0, 1), y.flatten())


@lru_cache
def images(data: str) -> tuple[Tensor, Tensor]:
    """CIFAR-10 images if they are at hand, else scikit-learn's digits; standardized."""
    file = Path(data) / "cifar10_small.npz"
    if file.exists():
        import numpy as np

        arrays = np.load(file)
        pixels, labels = torch.tensor(arrays["train_images"]).float(), torch.tensor(arrays["train_labels"]).long()
    else:
        from sklearn.datasets import load_digits

        digits, labels = map(torch.tensor, load_digits(return_X_y=True))
        pixels, labels = digits.float().view(-1, 1, 8, 8), labels.long()
    return (pixels - pixels.mean()) / pixels.std(), labels


@lru_cache
def characters(data: str) -> tuple[Tensor, int]:
    """Shakespeare's plays if they are at hand, else this project's licence; and how many characters there are."""
    file = Path(data) / "tinyshakespeare.txt"
    text = (file if file.exists() else Path(__file__).parents[2] / "LICENSE").read_text()
    codes = {c: i for i, c in enumerate(sorted(set(text)))}
    return torch.tensor([codes[c] for c in text]), len(codes)


def image_batches(data: str) -> Sampler:
    pixels, labels = images(data)

    def sample(generator: torch.Generator) -> Batch:
        index = torch.randint(len(pixels), (128,), generator=generator)
        return pixels[index], labels[index]

    return sample


def text_batches(data: str) -> Sampler:
    codes, _ = characters(data)

    def sample(generator: torch.Generator) -> Batch:
        starts = torch.randint(len(codes) - CONTEXT - 1, (16,), generator=generator)
        index = starts[:, None] + torch.arange(CONTEXT + 1)
        return codes[index[:, :-1]], codes[index[:, 1:]]

    return sample


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        make: a network of some width, with a class for its readout.
        batches: a sampler, of the folder with data.
        optimizer: "sgd" (momentum 0.9), "adam" or "adamw".
        widths: narrowest first, spanning 16 times.
        steps: of training.
        start: exponents of 2 where the search begins, by method.
    """

    make: Callable[[int, str, type[nn.Linear]], nn.Module]
    batches: Callable[[str], Sampler]
    optimizer: str
    widths: tuple[int, ...]
    steps: int
    start: dict[str, int]


TASKS: dict[str, Task] = {
    "MLP, SGD": Task(
        lambda width, data, readout: Perceptron(width, images(data)[0][0].numel(), readout),
        image_batches,
        "sgd",
        (64, 256, 1024),
        200,
        {"default": -3, "target": -4, "mup": -3},
    ),
    "MLP, Adam": Task(
        lambda width, data, readout: Perceptron(width, images(data)[0][0].numel(), readout),
        image_batches,
        "adam",
        (64, 256, 1024),
        200,
        {"default": -7, "target": -4, "mup": -7},
    ),
    "convolutions, Adam": Task(
        lambda width, data, readout: Convolutional(width, images(data)[0].shape[1], readout),
        image_batches,
        "adam",
        (16, 64, 256),
        200,
        {"default": -6, "target": -3, "mup": -6},
    ),
    "transformer, AdamW": Task(
        lambda width, data, readout: Transformer(width, characters(data)[1], False, readout),
        text_batches,
        "adamw",
        (32, 128, 512),
        150,
        {"default": -6, "target": -2, "mup": -6},
    ),
    "tied transformer, AdamW": Task(
        lambda width, data, readout: Transformer(width, characters(data)[1], True, readout),
        text_batches,
        "adamw",
        (32, 128, 512),
        150,
        {"default": -7, "target": -3},
    ),
}


def schedule(step: int, steps: int) -> float:
    """A tenth of the steps to warm up, then linearly to zero."""
    warm = max(1, steps // 10)
    return (step + 1) / warm if step < warm else (steps - step) / (steps - warm)


def train(name: str, method: str, width: int, lr: float, seed: int, data: str) -> float:
    """The mean training loss over the last tenth of the steps; inf if it diverged."""
    task = TASKS[name]
    torch.manual_seed(seed)
    model = task.make(width, data, nn.Linear)
    if method == "mup":
        model, optimizer = _mup(task, width, lr, data, seed)
    else:
        optimizer = _optimizer(task.optimizer, model.parameters(), lr)
    probe = None
    if method == "target":
        rule = LRCorrection("target", size="lr", spectral_init=True)
        probe = SpectralProbe(
            model, optimizer, every_n_steps=10, quantities=rule.quantities, correction=rule, mode="correct"
        )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, task.steps))
    sample, generator, losses = task.batches(data), torch.Generator().manual_seed(seed + 1), []
    for _ in range(task.steps):
        batch = sample(generator)
        with nullcontext() if probe is None else probe.step():
            optimizer.zero_grad()
            loss = model(*batch)
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
        scheduler.step()
        if not math.isfinite(losses[-1]):
            return math.inf
    tail = losses[-max(10, task.steps // 10) :]
    return sum(tail) / len(tail)


def _optimizer(kind: str, parameters: Any, lr: float) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    return (torch.optim.Adam if kind == "adam" else torch.optim.AdamW)(parameters, lr=lr)


def _mup(task: Task, width: int, lr: float, data: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """microsoft/mup: another readout, base shapes from two narrow models, and its optimizers."""
    import mup

    torch.manual_seed(seed)
    base, delta = (task.make(w, data, mup.MuReadout) for w in (task.widths[0], 2 * task.widths[0]))
    torch.manual_seed(seed)
    model = task.make(width, data, mup.MuReadout)
    mup.set_base_shapes(model, base, delta=delta)
    if task.optimizer == "sgd":
        return model, mup.MuSGD(model.parameters(), lr=lr, momentum=0.9)
    return model, (mup.MuAdam if task.optimizer == "adam" else mup.MuAdamW)(model.parameters(), lr=lr)
