"""Rank and alignment of updates under other optimizers than SGD, by batch size, learning rate and time in training.

A Spectral Condition for Feature Learning, Fig. 1, shows one gradient. Here are the updates that Adam, sign descent,
RMSProp and Muon make of gradients, at the first step and later, of layer 2 of a perceptron 3072-128-128-10.

    python examples/papers/update_rank.py [--quick] [--data FOLDER] [--out figures]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from common import arguments, images, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer, RMSprop

from spectral_monitor import SpectralProbe
from spectral_monitor.scaling import SP

WIDTH, LAYER = 128, "2"
KEYS = ["update_stable_rank", "update_alignment"]
FULL = {"sizes": (1, 4, 16, 64, 256), "trials": 3, "steps": (1, 10, 40)}
QUICK = {"sizes": (1, 16, 256), "trials": 2, "steps": (1, 10)}
RATES = (0.25, 1.0, 4.0)
"""Times the rate of an optimizer in :data:`OPTIMIZERS`, at a batch of :data:`MIDDLE`; other batches have 1 alone."""
MIDDLE = 256

Row = dict[str, Any]


class EachMatrix(Optimizer):
    """``W - lr f(g)`` for a function of a single gradient."""

    def __init__(self, params: Any, lr: float, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(params, {"lr": lr})
        self.function = function

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * self.function(p.grad)


def orthogonal(gradient: Tensor) -> Tensor:
    """Return what Muon makes of a gradient: singular values near 1, by five steps of its Newton-Schulz iteration."""
    x = gradient / (torch.linalg.matrix_norm(gradient) + 1e-7)
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x if wide else x.T


OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], float, str]] = {
    "SGD": (SGD, 0.01, "#4c72b0"),
    "Adam": (Adam, 3e-4, "#c44e52"),
    "RMSProp": (RMSprop, 1e-4, "#dd8452"),
    "sign descent": (lambda params, lr: EachMatrix(params, lr, torch.sign), 1e-4, "#8172b3"),
    "Muon": (lambda params, lr: EachMatrix(params, lr, orthogonal), 0.02, "#55a868"),
}
"""Name -> how it is made, a learning rate that trains well, color. Muon is without momentum, and for all matrices."""


def perceptron(inputs: int) -> nn.Sequential:
    fans = pairwise((inputs, WIDTH, WIDTH, 10))
    network = nn.Sequential(*[part for m, n in fans for part in (nn.Linear(m, n, bias=False), nn.ReLU())][:-1])
    SP.init_(network, scale=math.sqrt(2))
    return network


def train(
    name: str, rate: float, batch: int, trial: int, steps: Sequence[int], pixels: Tensor, labels: Tensor
) -> Iterator[Row]:
    """Yield a row for each of ``steps``, counted from 1; every step has new images."""
    torch.manual_seed(trial)
    network = perceptron(pixels.shape[1])
    make, lr, _ = OPTIMIZERS[name]
    optimizer = make(network.parameters(), lr=rate * lr)
    probe = SpectralProbe(
        network, optimizer, every_n_steps=1, quantities=KEYS, include=[LAYER], max_rows=None, tol=1e-3, mode="observe"
    )
    for step in range(1, steps[-1] + 1):
        chosen = torch.randint(len(pixels), (batch,))
        with probe.step() if step in steps else nullcontext():
            optimizer.zero_grad()
            loss = cross_entropy(network(pixels[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
        if step in steps:
            values = {key: probe.latest.value(key, LAYER) for key in KEYS}
            row = {"optimizer": name, "rate": rate, "batch": batch, "trial": trial, "step": step}
            yield {**row, **values, "loss": loss.item()}


def sweep(data: Path | None, sizes: Sequence[int], trials: int, steps: Sequence[int]) -> Iterator[Row]:
    pixels, labels, what = images(data)
    print(f"{what}: batches of up to {sizes[-1]}")
    for name in OPTIMIZERS:
        for batch in sizes:
            for rate in RATES if batch == MIDDLE else (1.0,):
                for trial in range(trials):
                    yield from train(name, rate, batch, trial, steps, pixels, labels)


def means(rows: Sequence[Row], key: str, over: str, **only: Any) -> tuple[list[float], np.ndarray]:
    """Values of ``over``, and the mean of a quantity over trials at each."""
    rows = [row for row in rows if all(row[name] == value for name, value in only.items())]
    places = sorted({row[over] for row in rows})
    return places, np.array([np.mean([row[key] for row in rows if row[over] == place]) for place in places])


def panel(axes: Axes, rows: Sequence[Row], key: str, over: str, title: str, **only: Any) -> None:
    for name, (_, _, color) in OPTIMIZERS.items():
        axes.plot(*means(rows, key, over, optimizer=name, **only), color=color, marker="o", ms=3.5, lw=1.8, label=name)
    axes.set(xscale="log", yscale="log", title=title, xlabel={"batch": "batch size", "rate": "learning rate"}[over])
    places = sorted({row[over] for row in rows})
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)


def figure(rows: Sequence[Row]) -> Figure:
    last = max(row["step"] for row in rows)
    drawn, grid = plt.subplots(2, 3, figsize=(12, 6.4), sharey="row", layout="constrained")
    for axes, key in zip(grid, KEYS, strict=True):
        panel(axes[0], rows, key, "batch", "first step", step=1, rate=1.0)
        panel(axes[1], rows, key, "batch", f"step {last}", step=last, rate=1.0)
        panel(axes[2], rows, key, "rate", f"step {last}, batches of {MIDDLE}", step=last, batch=MIDDLE)
        axes[2].set_xlabel("learning rate, over one that trains well")
        full, word = (WIDTH, "full rank") if key == KEYS[0] else (WIDTH**-0.5, "a random direction")
        for one in axes:
            one.axhline(full, color="0.5", ls="--", lw=0.9)
        axes[0].annotate(
            word,
            (1, full),
            xytext=(0, -10 if key == KEYS[0] else 4),
            textcoords="offset points",
            fontsize=8,
            color="0.4",
        )
        axes[0].set_ylabel({KEYS[0]: "stable rank of the update", KEYS[1]: "alignment with inputs"}[key])
    drawn.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return drawn


def main() -> None:
    args = arguments(__doc__)
    torch.set_num_threads(1)
    rows = list(sweep(args.data, **(QUICK if args.quick else FULL)))
    last = max(row["step"] for row in rows)
    for name in OPTIMIZERS:
        for key in KEYS:
            at = {step: means(rows, key, "batch", optimizer=name, rate=1.0, step=step) for step in (1, last)}
            by_rate = means(rows, key, "rate", optimizer=name, batch=MIDDLE, step=last)[1]
            told = "; ".join(f"step {step}: {values[0]:.2f} .. {values[-1]:.2f}" for step, (_, values) in at.items())
            spread = " / ".join(f"{value:.2f}" for value in by_rate)
            print(f"{name}, {key}, smallest to largest batch, {told}; by learning rate: {spread}")
    save(args.out, "update_rank", figure(rows), rows)


if __name__ == "__main__":
    main()
