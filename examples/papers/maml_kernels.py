"""Kernels of the meta-learning experiment: what they reach, and how their standard deviations are chosen.

The labels of a task are drawn at random. A model whose features stand still can therefore learn nothing that serves the
next task: meta-training moves its outputs at random. What counts is the kernel itself, through its standard deviations:
they say how curved it is, and how far the fixed learning rate of the adaptation goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from jobs import progress
from omniglot import WAYS, Characters
from torch import Tensor

from spectral_monitor.limits import KernelMachine, softmax_derivative

ADAPT_LR, TASKS, CLIP, TEST_STEPS = 0.4, 32, 0.5, 20
GRIDS = {
    "linear": {},
    "nngp": {"su": (0.25, 0.5, 1.0, 2.0, 4.0), "sb": (0.25, 0.5, 1.0, 2.0, 4.0)},
    "ntk": dict.fromkeys(("su", "sv", "sb"), (0.25, 0.5, 1.0, 2.0, 4.0)),
}
"""Standard deviations among which each kernel's are chosen; the linear kernel has none."""

META_LR = 0.05
"""The smallest of the authors' grid: a larger one only moves the outputs further at random."""

PER_BATCH = 50
CHOICE_TASKS = 1000

Settings = dict[str, float]
Row = dict[str, Any]


def machine_of(kernel: str, settings: Settings) -> KernelMachine:
    return KernelMachine(kernel, WAYS, **settings)  # type: ignore[arg-type]


def accuracy(machine: KernelMachine, data: Characters, count: int, *, rotated: bool, seed: int = 1) -> float:
    """Of tasks after 20 steps of adaptation, in percent; between tasks nothing but the start is shared."""
    generator, right, target = torch.Generator().manual_seed(seed), 0.0, torch.eye(WAYS)
    for _ in range(count // PER_BATCH):
        x, other, y = data.tasks(PER_BATCH, generator, rotated=rotated)
        both = torch.cat([x, other], 1)  # (tasks, 10, pixels)
        f = machine(both.flatten(0, 1)).view(PER_BATCH, 2 * WAYS, WAYS)
        K = _within(machine, both, x)
        for _ in range(TEST_STEPS):
            f = f - ADAPT_LR * K @ ((f[:, :WAYS].softmax(2) - target) / WAYS)
        right += (f[:, WAYS:].argmax(2) == y).double().mean().item()
    return 100 * right / (count // PER_BATCH)


def _within(machine: KernelMachine, left: Tensor, right: Tensor) -> Tensor:
    """Return the kernel (tasks, p, q) between inputs (tasks, p, d) and (tasks, q, d) of the same task."""
    (tasks, p, _), q = left.shape, right.shape[1]
    every = machine.between(left.flatten(0, 1), right.flatten(0, 1)).view(tasks, p, tasks, q)
    return every[torch.arange(tasks), :, torch.arange(tasks)]


def chosen(kernel: str, train: Characters, tasks: int = CHOICE_TASKS) -> Settings:
    """The standard deviations of highest accuracy on tasks of the training characters, before meta-training."""
    grid: dict[str, Sequence[float]] = GRIDS[kernel]
    every = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    if len(every) == 1:
        return every[0]
    found = [accuracy(machine_of(kernel, s), train, tasks, rotated=True) for s in progress(every, f"{kernel}: grid")]
    return every[max(range(len(every)), key=found.__getitem__)]


def kernel_row(
    train: Characters, test: Characters, kernel: str, seed: int, steps: int, tests: int, choice_tasks: int
) -> Row:
    """Accuracy on test characters before and after meta-training in the space of functions (Algorithm 4)."""
    settings = chosen(kernel, train, choice_tasks)
    machine = machine_of(kernel, settings)
    before = accuracy(machine, test, tests, rotated=False)
    generator = torch.Generator().manual_seed(seed)
    for _ in progress(range(steps), kernel):
        x, other, y = train.tasks(TASKS, generator, rotated=True)
        tasks = [(a, y, b, y) for a, b in zip(x, other, strict=True)]
        machine.meta_step(tasks, softmax_derivative, adapt_lr=ADAPT_LR, lr=META_LR, clip=CLIP)
    said = " ".join(f"{name} {value:g}" for name, value in settings.items())
    return {"settings": said, "before": before, "accuracy": accuracy(machine, test, tests, rotated=False)}
