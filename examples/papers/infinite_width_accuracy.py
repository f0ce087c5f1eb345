"""Verifying the largest learning rates of muP and SP: accuracy against the learning rate, for several widths.

The figure of section 1 of Feature Learning in Infinite-Width Neural Networks: perceptrons with two hidden layers of
ReLU, trained with the square loss on CIFAR-10. The right edge of a curve is the largest learning rate that trains. The
paper: in standard parametrization it falls as 1/n, under muP it stays.

    python examples/papers/infinite_width_accuracy.py [--quick] [--data FOLDER] [--out figures]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from common import arguments, images, save
from jobs import rows_of
from matplotlib.figure import Figure
from torch import Tensor, nn

from spectral_monitor.fitting.power_law import Fit, fit_slope
from spectral_monitor.scaling import MUP, SP

Row = dict[str, Any]

COMPONENTS, BATCH, EPOCHS = 128, 128, 3
SCALE = 3**-0.5
"""Standard deviations of PyTorch's own start. With larger ones outputs begin far from the labels."""
CLASSES, CHANCE = 10, 0.1
BELOW, ABOVE = 6, 2
"""How many rates are tried: halves of the first guess, and doubles of the last that trained."""
BITS = 3
"""Bisections of the factor of 2 in which the edge lies."""
PARAMETRIZATIONS = {"standard": (SP, -1.0), "muP": (MUP, 0.0)}
GUESS = {"standard": lambda n: 256 / n, "muP": lambda n: 4.0}
"""A rate that is near the edge: nothing but where the search begins."""
FULL = {"widths": (64, 128, 256, 512, 1024, 2048, 4096), "seeds": 3}
QUICK = {"widths": (64, 128, 256), "seeds": 2}


def task(data: Path | None) -> tuple[Tensor, Tensor]:
    """(n, 128) principal components of the images, of mean square 1, and labels 0 .. 9."""
    pixels, labels, what = images(data)
    centred = pixels - pixels.mean(0)
    values, vectors = torch.linalg.eigh(centred.T @ centred)
    x = centred @ vectors[:, -COMPONENTS:]
    kept = float(values[-COMPONENTS:].sum() / values.sum())
    print(f"{len(x)} of {what}, {COMPONENTS} principal components with {kept:.0%} of their variance")
    return x / x.square().mean().sqrt(), labels


def network(name: str, width: int) -> tuple[nn.Sequential, list[dict[str, Any]]]:
    """The perceptron, and its parameter groups for the learning rate 1.

    The paper's inputs are of norm 1 and its first matrix in standard parametrization of variance 1. Here inputs have
    norm sqrt d and the matrix variance 1/d, which is the same network; its learning rate then is 1/d.
    """
    net = nn.Sequential(
        nn.Linear(COMPONENTS, width, bias=False),
        nn.ReLU(),
        nn.Linear(width, width, bias=False),
        nn.ReLU(),
        nn.Linear(width, CLASSES, bias=False),
    )
    parametrization = PARAMETRIZATIONS[name][0]
    parametrization.init_(net, scale=SCALE)
    rate = {id(p): g["lr"] for g in parametrization.param_groups(net, lr=1.0, optimizer="sgd") for p in g["params"]}
    groups = [{"params": [p], "lr": rate[id(p)]} for p in net.parameters()]
    if name == "standard":
        groups[0]["lr"] /= COMPONENTS
    return net, groups


def accuracy(name: str, width: int, seed: int, lr: float, x: Tensor, labels: Tensor) -> float:
    """On the images trained on, after all epochs; that of guessing where the loss is no number any more."""
    torch.manual_seed(seed)
    net, groups = network(name, width)
    optimizer = torch.optim.SGD([group | {"lr": lr * group["lr"]} for group in groups])
    y = nn.functional.one_hot(labels, CLASSES).to(x)
    first = math.inf
    for _ in range(EPOCHS):
        for some in torch.randperm(len(x)).split(BATCH):
            loss = (net(x[some]) - y[some]).square().sum(1).mean() / 2
            first = min(first, 1e3 * loss.item())
            if not loss.item() < first:
                return CHANCE
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return float((net(x).argmax(1) == labels).float().mean())


def curve(name: str, width: int, seed: int, x: Tensor, labels: Tensor) -> Row:
    """Rates and accuracies, and the edge: the largest rate that gets half as far above guessing as the best does."""
    begun = round(math.log2(GUESS[name](width)))
    found: dict[float, float] = {}

    def at(power: float) -> float:
        if power not in found:
            found[power] = accuracy(name, width, seed, 2.0**power, x, labels)
        return found[power]

    for power in range(begun - BELOW, begun + 1):
        at(power)

    def trains(power: float) -> bool:
        return at(power) - CHANCE > (max(found.values()) - CHANCE) / 2

    last = float(begun)
    while trains(last) or trains(last + 1):
        last += 1
    while not trains(last):
        last -= 1
    for beyond in range(ABOVE):
        at(last + 1 + beyond)
    low, high = last, last + 1
    for _ in range(BITS):
        middle = (low + high) / 2
        low, high = (middle, high) if trains(middle) else (low, middle)
    powers = sorted(found)
    return {
        "rates": [2.0**power for power in powers],
        "accuracies": [found[power] for power in powers],
        "edge": 2 ** ((low + high) / 2),
        "best": max(found.values()),
    }


def sweep(path: Path, data: Path | None, widths: Sequence[int], seeds: int) -> list[Row]:
    x, labels = task(data)
    keys = [
        {"parametrization": name, "width": width, "seed": seed, "images": len(x)}
        for width in widths
        for name in PARAMETRIZATIONS
        for seed in range(seeds)
    ]
    return rows_of(
        path,
        keys,
        lambda parametrization, width, seed, images: curve(parametrization, width, seed, x, labels),
        "curves",
    )


def best_rate(row: Row) -> float:
    """The one of those tried that gets furthest."""
    return float(row["rates"][int(np.argmax(row["accuracies"]))])


def edges(rows: Sequence[Row], of: Callable[[Row], float] = lambda row: row["edge"]) -> dict[str, Fit]:
    """Slope of the edge against width, or of another rate; mean over seeds and 95 % interval."""
    widths, seeds = (sorted({row[key] for row in rows}) for key in ("width", "seed"))
    at = {(row["parametrization"], row["seed"], row["width"]): of(row) for row in rows}
    return {
        name: fit_slope(widths, [[at[name, seed, width] for width in widths] for seed in seeds])
        for name in PARAMETRIZATIONS
    }


def figure(rows: Sequence[Row]) -> Figure:
    """As in the paper: a row for each parametrization; on the left the rate itself, on the right n times the rate."""
    drawn, every = plt.subplots(2, 2, figsize=(9, 6.4), layout="constrained", sharey=True)
    widths = sorted({row["width"] for row in rows})
    fits = edges(rows)
    for axes, name in zip(every, PARAMETRIZATIONS, strict=True):
        for width, color in zip(widths, plt.get_cmap("viridis")(np.linspace(0, 0.85, len(widths))), strict=True):
            for row in rows:
                if (row["parametrization"], row["width"]) != (name, width):
                    continue
                for axis, factor in zip(axes, (1, width), strict=True):
                    label = f"n = {width}" if row["seed"] == 0 else None
                    rates = factor * np.array(row["rates"])
                    axis.plot(rates, row["accuracies"], color=color, lw=1.3, label=label)
        fit = fits[name]
        axes[0].set_title(f"{name}: edge ∝ n^({fit.slope:.2f} [{fit.low:.2f}, {fit.high:.2f}])", fontsize=10)
        axes[1].set_title(f"{name}, rate times width", fontsize=10)
        axes[0].set(ylabel="accuracy", xlabel="learning rate")
        axes[1].set(xlabel="learning rate · n")
        for axis in axes:
            axis.set_xscale("log", base=2)
            for side in ("top", "right"):
                axis.spines[side].set_visible(False)
    every[0, 0].legend(frameon=False, fontsize=8)
    return drawn


def report(rows: Sequence[Row]) -> None:
    for name, fit in edges(rows).items():
        best = edges(rows, best_rate)[name]
        print(f"{name}: slope of the best rate {best.slope:.2f} [{best.low:.2f}, {best.high:.2f}]")
        for width in sorted({row["width"] for row in rows}):
            some = [row for row in rows if (row["parametrization"], row["width"]) == (name, width)]
            edge, accuracy = (np.mean([row[key] for row in some]) for key in ("edge", "best"))
            rate = np.mean([best_rate(row) for row in some])
            print(f"{name}, width {width}: edge {edge:.4g}, best rate {rate:.4g}, its accuracy {accuracy:.3f}")
        expected = PARAMETRIZATIONS[name][1]
        print(f"{name}: slope {fit.slope:.2f} [{fit.low:.2f}, {fit.high:.2f}], in wide networks {expected:g}")


def main() -> None:
    args = arguments(__doc__)
    torch.set_num_threads(1)
    rows = sweep(args.out / "infinite_width_accuracy.jsonl", args.data, **(QUICK if args.quick else FULL))
    report(rows)
    table = [
        {key: row[key] for key in ("parametrization", "width", "seed", "edge")} | {"rate": rate, "accuracy": accuracy}
        for row in rows
        for rate, accuracy in zip(row["rates"], row["accuracies"], strict=True)
    ]
    save(args.out, "infinite_width_accuracy", figure(rows), table)


if __name__ == "__main__":
    main()
