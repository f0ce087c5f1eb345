"""The best scores of lazy networks: kernels of infinitely wide networks, trained on the same batches."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from spectral_monitor.limits.kernels import relu_kernels, softmax_derivative, square_derivative
from spectral_monitor.limits.linear import check_sizes

Batch = tuple[Tensor, Tensor]
Kind = Literal["nngp", "ntk"]

EXAMPLES = 4096
"""The largest number of training examples: their kernel takes 64 MB in float32."""


@dataclass(frozen=True)
class LazyScore:
    """The best score that a network with fixed features reaches.

    Attributes:
        kernel: ``"nngp"`` (only the readout learns) or ``"ntk"`` (all layers, in first order).
        loss: the lowest on held-out batches over all steps, which favours the kernel.
        accuracy: on held-out labels at that step; NaN for squared losses.
        step: of that loss.
        examples: number of training examples.
        stopped: whether time was up before the last step.
    """

    kernel: Kind
    loss: float
    accuracy: float
    step: int
    examples: int
    stopped: bool

    def __str__(self) -> str:
        accuracy = "" if math.isnan(self.accuracy) else f", {self.accuracy:.1%} right"
        note = "; time was up" if self.stopped else ""
        scores = f"loss {self.loss:.4g}{accuracy} (step {self.step}{note})"
        return f"{self.kernel.upper()} of {self.examples} examples: {scores}"


@torch.no_grad()
def lazy_scores(
    train: Iterable[Batch],
    held_out: Iterable[Batch],
    *,
    depth: int = 1,
    sb: float = 0.0,
    kernels: Sequence[Kind] = ("nngp", "ntk"),
    steps: int = 300,
    examples: int = EXAMPLES,
    seconds: float = 60.0,
    progress: bool = True,
) -> list[LazyScore]:
    """Return the scores of ReLU kernels of a perceptron's depth on batches of your training.

    Each kernel is trained by gradient descent in the space of functions, on all its examples at once, with the largest
    rate that is certainly stable. Its score is the lowest held-out loss on the way. If your network does not get below
    it, its features do not learn, or learning them gains nothing.

    Args:
        train: batches ``(inputs, targets)``; inputs are flattened and scaled to norm ``sqrt(d)`` on average, targets
            are labels (B,), for cross entropy, or numbers (B, ...), for half the squared error.
        held_out: batches to score on; at most as many examples of them as of ``train``.
        depth: number of hidden layers.
        sb: standard deviation of the hidden layers' biases.
        kernels: those to train.
        steps: of gradient descent.
        examples: largest number of training examples; memory grows with its square, and time with the steps times that.
        seconds: largest time of each kernel's descent.
        progress: show scores on stderr.

    Raises:
        ValueError: no batches, batches that are no pairs of tensors, an unknown kernel or a number below 1.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
        >>> batches = [(x, torch.tensor([0, 1, 0, 1]))]
        >>> for score in lazy_scores(batches, batches, steps=50, progress=False):
        ...     print(score.kernel, score.accuracy)
        nngp 1.0
        ntk 1.0
    """
    check_sizes(depth=depth, steps=steps, examples=examples)
    for kernel in kernels:
        if kernel not in ("nngp", "ntk"):
            raise ValueError(f"kernels must be 'nngp' or 'ntk', got {kernel!r}")
    x, y = _collected(train, examples, "train")
    z, target = _collected(held_out, examples, "held_out")
    if x.shape[1] != z.shape[1] or y.is_floating_point() != target.is_floating_point():
        raise ValueError(f"train and held_out differ: {x.shape[1]} inputs and {z.shape[1]}, or labels and numbers")
    scale = x.square().sum(1).mean().sqrt() / math.sqrt(x.shape[1])
    x, z = x / scale, z / scale
    outputs = int(max(y.max(), target.max())) + 1 if not y.is_floating_point() else y.shape[1]
    scores = []
    for kernel in kernels:
        own, cross = (_kernel(part, x, kernel, depth, sb) for part in (x, z))
        score = _descent(kernel, own, cross, y, target, outputs, steps, seconds)
        scores.append(score)
        if progress:
            print(f"lazy network: {score}", file=sys.stderr)
    return scores


def _collected(batches: Iterable[Batch], limit: int, name: str) -> Batch:
    """Return the first examples of batches, flattened and on the CPU."""
    inputs, targets, count = [], [], 0
    for batch in batches:
        is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
        if not is_pair or not all(isinstance(part, Tensor) for part in batch):
            raise ValueError(f"{name} must yield pairs of tensors (inputs, targets), got a {type(batch).__name__}")
        x, y = (part.detach().cpu()[: limit - count] for part in batch)
        inputs.append(x.flatten(1).float())
        targets.append(y if not y.is_floating_point() and y.ndim == 1 else y.float().reshape(len(y), -1))
        count += len(x)
        if count >= limit:
            break
    if not inputs:
        raise ValueError(f"{name} has no batches")
    return torch.cat(inputs), torch.cat(targets)


def _kernel(x: Tensor, z: Tensor, kernel: Kind, depth: int, sb: float) -> Tensor:
    """Return a kernel (B, C) of networks whose features keep their size, computed in blocks of rows."""
    su = 1 / math.sqrt(x.shape[1])
    # The inputs are scaled by su rather than the first matrix, so that it learns at the same rate as the others.
    blocks = [
        relu_kernels(su * part, su * z, depth=depth, su=math.sqrt(2), sv=math.sqrt(2), sb=sb)[kernel == "ntk"]
        for part in x.split(512)
    ]
    return torch.cat(blocks)


def _descent(
    kernel: Kind, own: Tensor, cross: Tensor, y: Tensor, target: Tensor, outputs: int, steps: int, seconds: float
) -> LazyScore:
    """Return the best score of ``f <- f - lr K chi`` from f = 0."""
    # Loss curvature is at most 1 / B for half the squared error, and 1 / (2 B) for cross entropy.
    slack, derivative = (1.0, square_derivative) if y.is_floating_point() else (2.0, softmax_derivative)
    # The largest row sum is a tight upper bound of the largest eigenvalue.
    rate = slack * len(y) / own.abs().sum(1).max().item()
    q = torch.zeros(len(y), outputs)
    started, best, stopped = time.monotonic(), LazyScore(kernel, math.inf, math.nan, 0, len(y), False), False
    for step in range(steps + 1):
        loss, accuracy = _loss(cross @ q, target)
        if loss < best.loss:
            best = LazyScore(kernel, loss, accuracy, step, len(y), False)
        if time.monotonic() - started > seconds:
            stopped = step < steps
            break
        q = q - rate * derivative(own @ q, y)
    return replace(best, stopped=stopped)


def _loss(f: Tensor, target: Tensor) -> tuple[float, float]:
    """Return the mean loss and the accuracy."""
    if target.is_floating_point():
        return (f - target).square().sum(1).mean().item() / 2, math.nan
    accuracy = (f.argmax(1) == target).double().mean().item()
    return torch.nn.functional.cross_entropy(f, target).item(), accuracy
