"""Fig. 1 and 3 of A Spectral Condition for Feature Learning: one step of layer 2, from batches of every size.

3072-300-300-10, ReLU or tanh, as it is drawn, on images of ten classes (paper, appendix A).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import arguments, images
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from spectral_monitor import SpectralProbe
from spectral_monitor.scaling import SP

WIDTH, LAYER = 300, "2"
ACTIVATIONS = {"ReLU": (nn.ReLU, math.sqrt(2)), "tanh": (nn.Tanh, 1.0)}
"""And what keeps features of one size through the layers."""

COLORS = {"ReLU": "#c44e52", "tanh": "#4c72b0"}
KEYS = ["update_stable_rank", "update_alignment", "input_stable_rank", "backward_stable_rank"]
FULL = {"sizes": tuple(2**k for k in range(13)), "trials": 10}
QUICK = {"sizes": tuple(4**k for k in range(7)), "trials": 4}

Row = dict[str, Any]


def rows_of(doc: str) -> tuple[list[Row], Path]:
    """Return a row for each step, and the folder for the figure, as the command line asks."""
    args = arguments(doc)
    torch.set_num_threads(1)
    return list(sweep(args.data, **(QUICK if args.quick else FULL))), args.out


def sweep(data: Path | None, sizes: Sequence[int], trials: int) -> Iterator[Row]:
    """Yield a row for each step. Every trial has a new network and new images; larger batches hold the smaller ones."""
    pixels, labels, what = images(data)
    sizes = [size for size in sizes if size <= len(pixels)]
    print(f"{what}: batches of up to {sizes[-1]}")
    for name in ACTIVATIONS:
        for trial in range(trials):
            torch.manual_seed(trial)
            order = torch.randperm(len(pixels))
            network = perceptron(name, pixels.shape[1])
            for size in sizes:
                batch = order[:size]
                yield {
                    "activation": name,
                    "batch": size,
                    "trial": trial,
                    **one_step(network, pixels[batch], labels[batch]),
                }


def perceptron(activation: str, inputs: int) -> nn.Sequential:
    function, scale = ACTIVATIONS[activation]
    fans = pairwise((inputs, WIDTH, WIDTH, 10))
    network = nn.Sequential(*[part for m, n in fans for part in (nn.Linear(m, n, bias=False), function())][:-1])
    SP.init_(network, scale=scale)
    return network


def one_step(network: nn.Sequential, x: Tensor, labels: Tensor) -> Row:
    """Return what the probe sees at layer 2; none of it depends on the learning rate, and the step is undone."""
    before = [p.detach().clone() for p in network.parameters()]
    optimizer = SGD(network.parameters(), lr=0.1)
    probe = SpectralProbe(
        network, optimizer, every_n_steps=1, quantities=KEYS, include=[LAYER], max_rows=None, tol=1e-3, mode="observe"
    )
    with probe.step():
        optimizer.zero_grad()
        cross_entropy(network(x), labels).backward()
        optimizer.step()
    with torch.no_grad():
        for p, value in zip(network.parameters(), before, strict=True):
            p.copy_(value)
    row = {key: probe.latest.value(key, LAYER) for key in KEYS}
    if len(x) == 1:
        # The probe gives no stable rank of a single row, for it is 1 whatever the row holds.
        row |= dict.fromkeys(("input_stable_rank", "backward_stable_rank"), 1.0)
    return row


def mean_by_batch(rows: Sequence[Row], key: str, activation: str) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Return batch sizes, and the means and standard deviations over trials."""
    sizes = sorted({row["batch"] for row in rows})
    values = [[row[key] for row in rows if (row["activation"], row["batch"]) == (activation, size)] for size in sizes]
    return sizes, np.mean(values, axis=1), np.std(values, axis=1, ddof=1)


def panel(axes: Axes, rows: Sequence[Row], key: str, title: str, label: str) -> None:
    """Draw means and one standard deviation on either side, for both activations."""
    for name, color in COLORS.items():
        sizes, mean, deviation = mean_by_batch(rows, key, name)
        axes.plot(sizes, mean, color=color, marker="o", ms=3.5, lw=1.8, label=name)
        axes.fill_between(sizes, mean - deviation, mean + deviation, color=color, alpha=0.2, lw=0)
    axes.set_xscale("log")
    axes.axvline(WIDTH, color="0.5", ls="--", lw=0.9)
    axes.set(xlabel="batch size B", title=title, ylabel=label)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
