"""Data, batches and losses that the held-out recipes share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

from benchmarks.rates.tuned import DATA, images, text
from benchmarks.recipes.run import Schedule, batches

Criterion = Callable[[Tensor, Tensor], Tensor]
Groups = list[dict[str, object]]

HELD_OUT = 512


def seeded(seed: int) -> torch.Generator:
    return batches(seed)


def wide(size: int, width: float, multiple: int = 8) -> int:
    """A hidden width, scaled and rounded."""
    return max(multiple, round(size * width / multiple) * multiple)


@contextmanager
def still(model: nn.Module) -> Iterator[None]:
    """Hold a model in evaluation mode without gradients; every module's mode is put back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@cache
def small_images() -> tuple[Tensor, Tensor]:
    """Images of 16 by 16 pixels, of unit variance."""
    x, y = images(DATA)
    x = avg_pool2d(x, 2)
    return (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True), y


@cache
def half_of_classes(second: bool) -> tuple[Tensor, Tensor]:
    """Small images of classes 0 to 4 or, renumbered, of 5 to 9."""
    x, y = small_images()
    chosen = (y >= 5) == second
    return x[chosen], y[chosen] % 5


class Supervised:
    """The loss of fresh batches; its last rows are kept for evaluation."""

    def __init__(
        self,
        model: nn.Module,
        data: tuple[Tensor, Tensor],
        size: int,
        seed: int,
        criterion: Criterion = cross_entropy,
        figure: Criterion = cross_entropy,
        held_out: int = HELD_OUT,
    ) -> None:
        self.model, self.size, self.criterion, self.figure = model, size, criterion, figure
        self.generator = seeded(seed)
        (self.x, self.held_out_x), (self.y, self.held_out_y) = (
            (tensor[:-held_out], tensor[-held_out:]) for tensor in data
        )

    def batch(self) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(self.x), (self.size,), generator=self.generator)
        return self.x[rows], self.y[rows]

    def __call__(self) -> Tensor:
        x, y = self.batch()
        return self.criterion(self.model(x), y)

    def evaluate(self) -> float:
        with still(self.model):
            return self.figure(self.model(self.held_out_x), self.held_out_y).item()


def smoothed(label_smoothing: float) -> Criterion:
    return lambda logits, y: cross_entropy(logits, y, label_smoothing=label_smoothing)


def unexplained(prediction: Tensor, y: Tensor) -> Tensor:
    """Mean squared error as a share of the targets' variance."""
    return (prediction - y).square().mean() / y.var(correction=0)


class Corpus:
    """Windows of a text: random ones of its first nine tenths, fixed ones of the rest."""

    def __init__(self, size: int, length: int, seed: int) -> None:
        windows = text(DATA, length)
        self.vocab, self.size, self.length = windows.vocab, size, length
        self.codes = windows.codes
        self.cut = int(0.9 * len(self.codes))
        self.generator = seeded(seed)

    def at(self, starts: Tensor) -> Tensor:
        return self.codes[starts[:, None] + torch.arange(self.length)]

    def batch(self) -> Tensor:
        return self.at(torch.randint(self.cut - self.length, (self.size,), generator=self.generator))

    def held(self, count: int = 64) -> Tensor:
        return self.at(torch.linspace(self.cut, len(self.codes) - self.length - 1, count).long())


class Language:
    """Next-character prediction; a model's ``extra``, where it has one, is added to the loss."""

    def __init__(self, model: nn.Module, corpus: Corpus) -> None:
        self.model, self.corpus = model, corpus
        self.fixed = corpus.held()

    def of(self, windows: Tensor) -> Tensor:
        logits = self.model(windows[:, :-1])
        return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def __call__(self) -> Tensor:
        loss = self.of(self.corpus.batch())
        extra = getattr(self.model, "extra", None)
        return loss if extra is None else loss + extra

    def evaluate(self) -> float:
        with still(self.model):
            return self.of(self.fixed).item()


def decayed(model: nn.Module, weight_decay: float, spared: Sequence[str] = ()) -> Groups:
    """Two groups: matrices with weight decay; vectors, and what matches a pattern, without."""
    matrices, others = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            free = p.ndim < 2 or any(fnmatchcase(name, pattern) for pattern in spared)
            (others if free else matrices).append(p)
    groups: Groups = [{"params": matrices, "weight_decay": weight_decay}]
    return [*groups, {"params": others, "weight_decay": 0.0}] if others else groups


def divided(steps: int, by: float) -> Schedule:
    """Divide rates after half and after three quarters of the steps."""
    return lambda t: by ** -((t >= steps // 2) + (t >= 3 * steps // 4))
