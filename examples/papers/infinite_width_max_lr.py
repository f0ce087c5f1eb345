"""The largest stable learning rate against width: it falls as 1/n in standard parametrization, and stays under muP.

Perceptrons with two hidden layers of tanh on ten principal components of images, gradient descent on the whole set. A
rate is stable if the loss is below where it began after all steps; the edge is found by bisection.

    python examples/papers/infinite_width_max_lr.py [--quick] [--data FOLDER] [--out figures]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from common import arguments, images, save
from jobs import rows_of
from matplotlib.figure import Figure
from torch import Tensor, nn

from spectral_monitor.fitting.power_law import fit_slope
from spectral_monitor.scaling import MUP, SP

COMPONENTS, EXAMPLES, STEPS = 10, 100, 20
BITS = 6
"""Bisections of an interval that spans a factor of 4."""
PARAMETRIZATIONS = {"standard": (SP, -1.0, "#c44e52"), "muP": (MUP, 0.0, "#4c72b0")}
WITHIN = 0.15
FULL = {"widths": (64, 128, 256, 512, 1024), "seeds": 5}
QUICK = {"widths": (128, 256, 512, 1024), "seeds": 2}

Row = dict[str, Any]


def task(data: Path | None) -> tuple[Tensor, Tensor]:
    """(n, 10) principal components of variance 1, and one-hot labels."""
    pixels, labels, what = images(data)
    pixels, labels = pixels[:EXAMPLES], labels[:EXAMPLES]
    print(f"{len(pixels)} of {what}, {COMPONENTS} principal components")
    u, _, _ = torch.linalg.svd(pixels - pixels.mean(0), full_matrices=False)
    x = u[:, :COMPONENTS] * math.sqrt(len(u))
    return x, nn.functional.one_hot(labels, 10).float()


def is_stable(name: str, width: int, seed: int, lr: float, x: Tensor, y: Tensor) -> bool:
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(COMPONENTS, width, bias=False),
        nn.Tanh(),
        nn.Linear(width, width, bias=False),
        nn.Tanh(),
        nn.Linear(width, 10, bias=False),
    )
    parametrization = PARAMETRIZATIONS[name][0]
    parametrization.init_(net)
    optimizer = torch.optim.SGD(parametrization.param_groups(net, lr=lr, optimizer="sgd"))
    first = math.inf
    for step in range(STEPS + 1):
        loss = (net(x) - y).square().sum(1).mean() / 2
        if not math.isfinite(loss.item()) or loss.item() > 100 * first:
            return False
        first = loss.item() if step == 0 else first
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item() < first


def edge(name: str, width: int, seed: int, x: Tensor, y: Tensor) -> float:
    """The largest stable rate, to 1 %: first by factors of 4, then by bisection."""
    lr = 1.0
    step = 4.0 if is_stable(name, width, seed, lr, x, y) else 0.25
    while is_stable(name, width, seed, lr * step, x, y) == (step > 1):
        lr *= step
    low, high = sorted((lr, lr * step))
    for _ in range(BITS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_stable(name, width, seed, middle, x, y) else (low, middle)
    return math.sqrt(low * high)


def sweep(path: Path, data: Path | None, widths: Sequence[int], seeds: int) -> list[Row]:
    x, y = task(data)
    keys = [
        {"parametrization": name, "width": width, "seed": seed, "data": float(x.abs().sum())}
        for name in PARAMETRIZATIONS
        for width in widths
        for seed in range(seeds)
    ]
    return rows_of(
        path,
        keys,
        lambda parametrization, width, seed, data: {"edge": edge(parametrization, width, seed, x, y)},
        "edges",
    )


def slopes(rows: Sequence[Row]) -> dict[str, Any]:
    """Slope of the edge for each parametrization, mean over seeds and 95 % interval."""
    widths = sorted({row["width"] for row in rows})
    seeds = sorted({row["seed"] for row in rows})
    at = {(row["parametrization"], row["seed"], row["width"]): row["edge"] for row in rows}
    return {
        name: fit_slope(widths, [[at[name, seed, width] for width in widths] for seed in seeds])
        for name in PARAMETRIZATIONS
    }


def figure(rows: Sequence[Row]) -> Figure:
    drawn, axis = plt.subplots(figsize=(5.2, 3.8), layout="constrained")
    widths, fits = sorted({row["width"] for row in rows}), slopes(rows)
    for name, (_, expected, colour) in PARAMETRIZATIONS.items():
        logs = np.log([[r["edge"] for r in rows if (r["parametrization"], r["width"]) == (name, n)] for n in widths])
        mean, deviation = logs.mean(1), logs.std(1, ddof=1)
        axis.plot(widths, np.exp(mean), "o-", color=colour, ms=4, label=f"{name}, slope {fits[name].slope:.2f}")
        axis.fill_between(widths, np.exp(mean - deviation), np.exp(mean + deviation), color=colour, alpha=0.2, lw=0)
        axis.plot(widths, np.exp(mean[0]) * (np.array(widths) / widths[0]) ** expected, ":", color="black", lw=1)
    axis.set(xscale="log", yscale="log", xlabel="width n", ylabel="largest stable learning rate")
    axis.set_xticks(widths, [str(n) for n in widths])
    axis.minorticks_off()
    axis.legend(frameon=False)
    return drawn


def report(rows: Sequence[Row]) -> bool:
    right = True
    for name, fit in slopes(rows).items():
        expected = PARAMETRIZATIONS[name][1]
        fine = abs(fit.slope - expected) < WITHIN
        right &= fine
        print(
            f"{name}: slope {fit.slope:.2f} [{fit.low:.2f}, {fit.high:.2f}], expected {expected:g}"
            + ("" if fine else "  OFF")
        )
    return right


def main() -> None:
    args = arguments(__doc__)
    rows = sweep(args.out / "infinite_width_max_lr.jsonl", args.data, **(QUICK if args.quick else FULL))
    report(rows)
    save(args.out, "infinite_width_max_lr", figure(rows), rows)


if __name__ == "__main__":
    main()
