"""Is "wider at the same learning rate" seen against a narrow run's profile, and does what it advises help?

    python -m benchmarks.recipes.width                # every task, the seeds that played no part in the rule
    python -m benchmarks.recipes.width --seeds 0 1    # those that the rule was found on
    python -m benchmarks.recipes.width --tasks "MLP, Adam"

A narrow run with one seed is the profile. Then come, with another seed, the narrow run again, the wide one at the same
learning rate, and the wide one at the rate that the finding advises; that one with the profile's seed too, which the
advice is not from. The finding must come by the fifth measurement in the wide run at the same rate, and never in the
three others. The rule was found on the tasks in :data:`FOUND_ON`; the others played no part.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, mse_loss, scaled_dot_product_attention
from torch.optim import SGD, Adam, AdamW, Optimizer

from benchmarks.recipes.development.common import characters, classification, digit_split, fixed, language, private
from benchmarks.recipes.run import Run
from spectral_monitor import Measurement, SpectralProbe
from spectral_monitor.condition.optimizers.hyperparameters import Hyperparameters, hyperparameters
from spectral_monitor.condition.references.profile import Profile, load_profile, save_profile
from spectral_monitor.condition.references.width_transfer import (
    WidthComparison,
    WidthFinding,
    compare_widths,
    find_width,
)

WIDER = 8
STEPS = 100
SCHEDULE = "1, 2, 4, ..., every 100"
BY = 5
"""Measurements until the finding must be there."""


def perceptron(width: int, outputs: int = 10) -> nn.Module:
    hidden = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), *hidden, nn.Linear(width, outputs))


def convolutional(width: int) -> nn.Module:
    strided = [layer for _ in range(2) for layer in (nn.Conv2d(width, width, 3, 2, 1), nn.ReLU())]
    first = (nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, width, 3, padding=1), nn.ReLU())
    return nn.Sequential(*first, *strided, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.out(gelu(self.fc(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        vocabulary = characters()[1]
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(32, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        positions = self.places(torch.arange(x.shape[1]))
        return self.head(self.norm(self.blocks(self.tokens(x) + positions)))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x.flatten(1))
        for up, down in zip(self.up, self.down, strict=True):
            h = h + down(torch.relu(up(h)))
        return self.head(h)


def digits(model: nn.Module, optimizer: Optimizer, seed: int) -> Run:
    return classification(model, optimizer, digit_split(), seed, STEPS)


def text(model: nn.Module, optimizer: Optimizer, seed: int) -> Run:
    return language(model, optimizer, seed, STEPS, context=32)


def reconstruction(model: nn.Module, optimizer: Optimizer, seed: int) -> Run:
    data, source = digit_split(), private(seed)

    def loss() -> Tensor:
        x = data.x[torch.randint(len(data.x), (64,), generator=source)].flatten(1)
        return mse_loss(model(x), x)

    held_out = data.test_x.flatten(1)
    return Run(model, [optimizer], loss, fixed(model, lambda: mse_loss(model(held_out), held_out)), STEPS)


def momentum(parameters: object, lr: float) -> Optimizer:
    return SGD(parameters, lr, momentum=0.9)


@dataclass(frozen=True)
class Task:
    """A narrow network and its learning rate, within a factor of 2 of the best after :data:`STEPS` steps.

    Attributes:
        model: width -> network, by PyTorch's initialization.
        optimizer: parameters and learning rate -> optimizer.
        lr: of the narrow run.
        width: of the narrow run.
        run: network, optimizer and seed -> run.
    """

    name: str
    model: Callable[[int], nn.Module]
    optimizer: Callable[..., Optimizer]
    lr: float
    width: int
    run: Callable[[nn.Module, Optimizer, int], Run] = digits

    def start(self, seed: int, factor: int = 1, lr: float | None = None) -> Run:
        torch.manual_seed(seed)
        model = self.model(self.width * factor)
        return self.run(model, self.optimizer(model.parameters(), lr=self.lr if lr is None else lr), seed)


TASKS = (
    Task("MLP, Adam", perceptron, Adam, 0.008, 32),
    Task("MLP, SGD", perceptron, SGD, 0.4, 32),
    Task("CNN, Adam", convolutional, Adam, 0.01, 16),
    Task("CNN, SGD", convolutional, momentum, 0.1, 16),
    Task("GPT, Adam", Transformer, AdamW, 0.02, 16, text),
    Task("GPT, SGD", Transformer, momentum, 0.8, 16, text),
    Task("residual MLP, Adam", Residual, Adam, 0.004, 32),
    Task("autoencoder, SGD", lambda width: perceptron(width, 64), momentum, 0.8, 32, reconstruction),
)
FOUND_ON = tuple(task.name for task in TASKS[:6])


@dataclass(frozen=True)
class Watched:
    """What a run left behind: measurements, settings at its end, its loss on fixed data."""

    measurements: Sequence[Measurement]
    settings: dict[str, Hyperparameters]
    loss: float

    def compared(self, profile: Profile) -> list[WidthComparison]:
        comparisons = (compare_widths(profile, measurement, self.settings) for measurement in self.measurements)
        return [comparison for comparison in comparisons if comparison is not None]

    def first(self, profile: Profile) -> WidthFinding | None:
        """Return the first finding of the run."""
        compared = self.compared(profile)
        findings = (find_width(compared[: i + 1]) for i in range(len(compared)))
        return next((finding for finding in findings if finding is not None), None)


def watch(run: Run) -> Watched:
    probe = SpectralProbe(run.model, run.optimizers, every_n_steps=SCHEDULE, quantities="light", mode="observe")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(run.steps):
            with probe.step():
                run.step()
    settings = hyperparameters(probe.anatomy.layers, run.optimizers)
    return Watched(tuple(probe.measurements), settings, run.evaluate())


def narrow_profile(run: Watched) -> Profile:
    """Write a profile and read it back, as users do."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        save_profile(run.measurements, path, run.settings)
        return load_profile(path)


@dataclass(frozen=True)
class Result:
    """A task with one seed for the profile and another for the rest.

    Attributes:
        wide: at the narrow run's rate.
        advised: at the rate that the finding on ``wide`` advises; at ``wide``'s if there is none.
        elsewhere: at the same rate as ``advised``, with the profile's seed.
        losses: of the narrow run, the wide one and the advised one.
    """

    task: str
    narrow: WidthFinding | None
    wide: WidthFinding | None
    advised: WidthFinding | None
    elsewhere: WidthFinding | None
    ratios: tuple[float, ...]
    advised_ratios: tuple[float, ...]
    losses: tuple[float, float, float]

    @property
    def named(self) -> bool:
        """Tell whether the wide run at the same rate is named in time."""
        return self.wide is not None and self.wide.measurements <= BY

    @property
    def false(self) -> int:
        """Count those of the three others that are named."""
        return sum(finding is not None for finding in (self.narrow, self.advised, self.elsewhere))


def study(task: Task, tuned: int, other: int) -> Result:
    profile = narrow_profile(watch(task.start(tuned)))
    narrow, wide = watch(task.start(other)), watch(task.start(other, WIDER))
    finding = wide.first(profile)
    lr = task.lr if finding is None else finding.lr_after
    advised = watch(task.start(other, WIDER, lr))
    return Result(
        task.name,
        narrow.first(profile),
        finding,
        advised.first(profile),
        watch(task.start(tuned, WIDER, lr)).first(profile),
        tuple(each.ratio for each in wide.compared(profile)),
        tuple(each.ratio for each in advised.compared(profile)),
        (narrow.loss, wide.loss, advised.loss),
    )


def row(result: Result) -> str:
    finding = result.wide
    named = "-" if finding is None else f"{finding.measurements}: / {finding.divisor:.2f}"
    ratios = ["  ".join(f"{ratio:5.2f}" for ratio in values) for values in (result.ratios, result.advised_ratios)]
    losses = "  ".join(f"{loss:.3f}" for loss in result.losses)
    first = f"{result.task:20} {named:12} {result.false}  {losses:24} {ratios[0]}"
    return f"{first}\n{'at the advised rate':61} {ratios[1]}"


def both_ways(tasks: Sequence[Task], first: int, second: int) -> list[Result]:
    """Return every task with either seed as the profile's."""
    pairs = ((first, second), (second, first))
    return [study(task, tuned, other) for tuned, other in pairs for task in tasks]


def markdown(results: Sequence[Result]) -> str:
    """Return the results as a section of the page on verdict quality."""
    lines = [
        "| task | named at measurement | divisor | loss narrow | 8 times wider, same rate | at the advised rate |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        finding = result.wide
        named = "| - | -" if finding is None else f"| {finding.measurements} | {finding.divisor:.2f}"
        new = "" if result.task in FOUND_ON else " (no part in the rule)"
        losses = " | ".join(f"{loss:.3f}" for loss in result.losses)
        lines.append(f"| {result.task}{new} {named} | {losses} |")
    named, false = sum(result.named for result in results), sum(result.false for result in results)
    count = len(results)
    lines.append(
        f"\nNamed by the fifth measurement: {named} of {count}. Named although nothing was wrong: {false} of "
        f"{3 * count} (another seed of the narrow run, and the wide run at the advised rate with two seeds)."
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=(2, 3), help="of the profile and of the rest, and back")
    parser.add_argument("--tasks", nargs="+", choices=[task.name for task in TASKS], metavar="NAME")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [task for task in TASKS if arguments.tasks is None or task.name in arguments.tasks]
    first, second = arguments.seeds
    for tuned, other in ((first, second), (second, first)):
        print(f"profile: seed {tuned}; other runs: seed {other}\n")
        print("task                 named        false  loss narrow, wide, advised  ratio at 1, 2, 4, ...")
        results = [study(task, tuned, other) for task in chosen]
        print("\n".join(map(row, results)))
        for group in (FOUND_ON, tuple(task.name for task in TASKS if task.name not in FOUND_ON)):
            members = [result for result in results if result.task in group]
            if members:
                named, false = sum(result.named for result in members), sum(result.false for result in members)
                print(f"named by measurement {BY}: {named} of {len(members)}; false: {false} of {3 * len(members)}")
        print()


if __name__ == "__main__":
    main()
