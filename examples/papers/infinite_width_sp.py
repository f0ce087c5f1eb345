"""Section 4 of Feature Learning in Infinite-Width Neural Networks: the standard parametrization cannot learn features.

A linear network of two hidden layers, one image and its target, SGD with learning rate eta n^-c. For c < 1 outputs blow
up as the width n grows; for c = 1 they do not, and features stand still.

    python examples/papers/infinite_width_sp.py [--quick] [--data FOLDER] [--out figures]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from common import arguments, images, save
from matplotlib.figure import Figure
from spectral_panels import slope_of, tell, width_axis
from torch import Tensor, nn
from torch.optim import SGD

from spectral_monitor import SpectralProbe
from spectral_monitor.parametrization.catalogue import from_abc
from spectral_monitor.scaling import ABC, standard

LR, STEPS = 0.1, 5
TARGET = 6.0
"""Far from the output at the start, which is a draw from N(0, 1): the loss's derivative is alike in all trials."""

CS = (Fraction(0), Fraction(1, 2), Fraction(1))
COLORS = {"0": "#c44e52", "1/2": "#dd8452", "1": "#4c72b0"}
CHANGES = {"change_3": "output", "change_2": "second hidden layer", "change_1": "first hidden layer"}
WITHIN = 0.15
FULL = {"widths": (64, 128, 256, 512, 1024, 2048), "trials": 20}
QUICK = {"widths": (64, 128, 256, 512, 1024), "trials": 10}

Row = dict[str, Any]


def sweep(data: Path | None, widths: Sequence[int], trials: int) -> Iterator[Row]:
    """A row for each network; those of one trial see the same image, of norm 1."""
    pixels, _, what = images(data)
    print(f"{what}, one image in each trial")
    for c in CS:
        for trial in range(trials):
            torch.manual_seed(trial)
            (image,) = torch.randint(len(pixels), (1,)).tolist()
            x = nn.functional.normalize(pixels[image : image + 1])
            for width in widths:
                yield {"c": str(c), "width": width, "trial": trial, **train(c, width, x)}


def train(c: Fraction, width: int, x: Tensor) -> Row:
    """Changes of every layer's outputs by the first step (RMS over entries), the output's size at each step, and the
    relative change of features over all steps.
    """
    parametrization = from_abc(standard(2, c))
    fans = pairwise((x.shape[1], width, width, 1))
    network = nn.Sequential(*[nn.utils.skip_init(nn.Linear, m, n, bias=False) for m, n in fans])
    parametrization.init_(network)
    optimizer = SGD(parametrization.param_groups(network, lr=LR))
    keys = ["feature_rms", "feature_change", "feature_drift"]
    probe = SpectralProbe(network, optimizer, every_n_steps=1, quantities=keys, drift_every=1, mode="observe")
    for _ in range(STEPS):
        with probe.step():
            loss = (network(x) - TARGET).square().mean() / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    first, last = probe.measurements[0], probe.measurements[-1]
    row = {}
    for number, name in enumerate(("0", "1", "2"), start=1):
        # Of a single row the mean of |dh| / |h| times the size of h is the size of dh.
        row[f"change_{number}"] = first.value("feature_change", name) * first.value("feature_rms", name)
        row[f"drift_{number}"] = last.value("feature_drift", name)
    sizes = {f"output_{t}": found.value("feature_rms", "2") for t, found in enumerate(probe.measurements)}
    return {**row, **sizes}


def first_step(p: ABC) -> dict[str, Fraction]:
    """Return the exponents of n in the changes of the first step (paper, sections 4 and 5.3).

    All gradients come through the readout, which is as it was drawn, whatever its learning rate.
    """
    readout = p.a[-1] + p.b[-1]
    own = [readout + p.c - 1 + 2 * a + (place == 0) for place, a in enumerate(p.a[:-1])]
    output = max(1 - 2 * p.a[-1] - p.c, 1 - readout - min(own))
    return {"change_1": -own[0], "change_2": -min(own), "change_3": output}


def figure(rows: Sequence[Row]) -> Figure:
    drawn, every = plt.subplots(1, 4, figsize=(15, 3.7), layout="constrained")
    widths = sorted({row["width"] for row in rows})
    for axes, (key, title) in zip(every, CHANGES.items(), strict=False):
        for c in map(str, CS):
            values = [[row[key] for row in rows if (row["c"], row["width"]) == (c, width)] for width in widths]
            mean, deviation = np.log(values).mean(1), np.log(values).std(1, ddof=1)
            fit = slope_of(rows, key, c=c)
            axes.plot(
                widths, np.exp(mean), "o-", ms=3.5, lw=1.8, color=COLORS[c], label=f"c = {c}, slope {fit.slope:.2f}"
            )
            low, high = np.exp(mean - deviation), np.exp(mean + deviation)
            axes.fill_between(widths, low, high, color=COLORS[c], alpha=0.2, lw=0)
            predicted = float(first_step(standard(2, Fraction(c)))[key])
            axes.plot(widths, np.exp(mean[-1]) * (np.array(widths) / widths[-1]) ** predicted, ":", color="black", lw=1)
        axes.set(yscale="log", title=f"{title}, first step", ylabel="change, RMS")
        width_axis(axes, widths)
        axes.set_xlabel("width n")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False, fontsize=8)
    _outputs(every[3], rows, [widths[0], widths[len(widths) // 2], widths[-1]])
    return drawn


def _outputs(axes: Any, rows: Sequence[Row], widths: Sequence[int]) -> None:
    """Sizes of outputs over the steps, geometric means over trials, for c = 1/2 and 1."""
    for c, style in (("1/2", "-"), ("1", "--")):
        for width, shade in zip(widths, (0.4, 0.7, 1.0), strict=True):
            some = [row for row in rows if (row["c"], row["width"]) == (c, width)]
            means = [np.exp(np.mean(np.log([row[f"output_{t}"] for row in some]))) for t in range(STEPS)]
            label = f"c = {c}, n = {width}"
            axes.plot(range(STEPS), means, style, color=COLORS[c], alpha=shade, lw=1.8, label=label)
    axes.set(yscale="log", title="output", xlabel="step", ylabel="size", xticks=range(STEPS))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False, fontsize=8)


def report(rows: Sequence[Row]) -> bool:
    """Print every slope beside what is expected; whether all are."""
    right = []
    for c in CS:
        p = standard(2, c)
        print(f"c = {c}: {p.classify()}")
        for key, exponent in first_step(p).items():
            what = f"  {CHANGES[key]}, first step"
            right.append(tell(what, slope_of(rows, key, c=str(c)), float(exponent), WITHIN))
    kernel = standard(2).classify()
    for place, r in enumerate(kernel.r_layers, start=1):
        what = f"c = 1: {CHANGES[f'change_{place}']}, {STEPS} steps, -r_{place}"
        right.append(tell(what, slope_of(rows, f"drift_{place}", c="1"), -float(r), WITHIN))
    return all(right)


def main() -> None:
    args = arguments(__doc__)
    torch.set_num_threads(1)
    rows = list(sweep(args.data, **(QUICK if args.quick else FULL)))
    report(rows)
    save(args.out, "infinite_width_sp", figure(rows), rows)


if __name__ == "__main__":
    main()
