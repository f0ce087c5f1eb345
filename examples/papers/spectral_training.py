"""Fig. 2, 4, 5, 6 of A Spectral Condition for Feature Learning: perceptrons of every width, trained to the same loss.

3072-d-d-1, ReLU, no biases, 200 images of airplanes and automobiles with targets +1 and -1, full-batch gradient
descent on the mean squared error, under muP and under the neural tangent parametrization (paper, appendix A).
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import arguments, images
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD

from spectral_monitor import Measurement, SpectralProbe
from spectral_monitor.scaling import MUP, NTP

LR, IMAGES, MOST = 0.1, 200, 10_000
PARAMETRIZATIONS = {"muP": MUP, "NTP": NTP}
LAYERS = {1: "0", 2: "2", 3: "4"}
"""The paper's number of each matrix and its name here."""

KEYS = [
    *("weight_norm", "drift_ratio", "drift_fro_ratio", "feature_rms", "feature_drift", "alignment"),
    *("activation_ratio", "sample_share"),
]
CHECKED = [
    ("activation_1", "activation_ratio", 2),  # of what layer 2 is given to what layer 1 puts out
    ("activation_2", "activation_ratio", 3),
    ("sample_share", "sample_share", 2),
]
"""Name in the table, quantity and layer of what Assumptions 2 and 3 are about, in a single step."""

FULL = {"trials": {**dict.fromkeys((16, 32, 64, 128, 256, 512, 1024), 10), 2048: 3, 4096: 2}, "until": 0.01}
QUICK = {"trials": dict.fromkeys((64, 128, 256, 512, 1024), 2), "until": 0.1}
"""Width -> trials: under NTP a single one of width 4096 takes longer than ten of width 1024."""

Row = dict[str, Any]


def rows_of(doc: str) -> tuple[list[Row], Path]:
    """A row for each trained network, and the folder for the figure, as the command line asks.

    The four scripts show the same trainings: ``--runs`` takes them from the table that ``spectral_fig2.py`` wrote.
    """
    args = arguments(doc, runs="")
    torch.set_num_threads(1)  # matrices as small as these gain little from more, and lose much on a shared machine
    if args.runs:
        with Path(args.runs).open(newline="") as file:
            return [{key: _read(value) for key, value in row.items()} for row in csv.DictReader(file)], args.out
    return list(sweep(args.data, **(QUICK if args.quick else FULL))), args.out


def _read(text: str) -> Any:
    try:
        return float(text) if "." in text or "e" in text or text == "nan" else int(text)
    except ValueError:
        return text


def sweep(data: Path | None, trials: Mapping[int, int], until: float) -> Iterator[Row]:
    """Networks of all widths under both parametrizations; those of one trial see the same images."""
    pixels, labels, what = images(data)
    print(f"{what}: {IMAGES} images, training to a loss below {until}")
    pair = torch.nonzero(labels < 2).flatten()
    for trial in range(max(trials.values())):
        for name in PARAMETRIZATIONS:
            for width in (width for width, count in trials.items() if trial < count):
                torch.manual_seed(trial)  # the same images at every width, and weights that no other network changes
                chosen = pair[torch.randperm(len(pair))[:IMAGES]]
                x, y = pixels[chosen], 1.0 - 2.0 * labels[chosen, None]
                began = time.perf_counter()
                row = {"parametrization": name, "width": width, "trial": trial, **train(name, width, x, y, until)}
                took = time.perf_counter() - began
                print(f"  {name} {width:>4} wide, trial {trial}: {row['steps']} steps, {took:.1f} s", flush=True)
                yield row


def train(parametrization: str, width: int, x: Tensor, y: Tensor, until: float) -> Row:
    """One training, whose first and last step are measured: all that the figures show."""
    network = perceptron(x.shape[1], width)
    PARAMETRIZATIONS[parametrization].init_(network, scale=math.sqrt(2))
    optimizer = SGD(PARAMETRIZATIONS[parametrization].param_groups(network, lr=LR))
    probe = SpectralProbe(
        network, optimizer, every_n_steps=1, quantities=KEYS, drift_every=1, max_rows=None, tol=1e-3, mode="observe"
    )

    def step() -> tuple[Measurement, float]:
        with probe.step():
            loss = mse_loss(network(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return probe.latest, loss.item()

    first, _ = step()
    steps = descend(network, optimizer, x, y, until, MOST - 2)
    last, loss = step()
    return {
        "steps": steps + 2,
        "loss": loss,
        "feature_drift": last.value("feature_drift", LAYERS[2]),
        "drift_ratio": last.value("drift_ratio", LAYERS[2]),
        "final_layer_alignment": last.summary["final_layer_alignment"],
        "drift_fro_ratio": last.value("drift_fro_ratio", LAYERS[2]),
        **{f"weight_{layer}": not_cancelled(first, last, "weight_norm", "drift_ratio", layer) for layer in LAYERS},
        **{f"feature_{layer}": not_cancelled(first, last, "feature_rms", "feature_drift", layer) for layer in LAYERS},
        **{
            f"{name}_{when}": measurement.value(key, LAYERS[layer])
            for when, measurement in (("start", first), ("end", last))
            for name, key, layer in CHECKED
        },
    }


def perceptron(inputs: int, width: int) -> nn.Sequential:
    """Return a perceptron of three matrices, not initialised."""
    fans = pairwise((inputs, width, width, 1))
    layers = [part for m, n in fans for part in (nn.utils.skip_init(nn.Linear, m, n, bias=False), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


@torch.no_grad()
def descend(network: nn.Sequential, optimizer: SGD, x: Tensor, y: Tensor, until: float, most: int) -> int:
    """Full-batch gradient descent, as the optimizer does it, until the loss is below ``until``; the steps it took.

    Updates of the first matrix are sums of inputs. So its outputs are trained in its place, by ``x x^T`` times their
    gradients, which is the same descent without 3072 columns in every step; the matrix is brought up at the end.
    """
    rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    W1, W2, W3 = network.parameters()
    gram, h1, moved = x @ x.T, x @ W1.T, torch.zeros(len(x), len(W1), dtype=x.dtype)
    step = 0
    while True:
        x1 = h1.relu()
        h2 = x1 @ W2.T
        x2 = h2.relu()
        error = x2 @ W3.T - y
        if step == most or error.square().mean() < until:
            break
        b3 = 2 / len(x) * error
        b2 = b3 @ W3 * (h2 > 0)
        b1 = b2 @ W2 * (h1 > 0)
        W3 -= rate[id(W3)] * b3.T @ x2
        W2 -= rate[id(W2)] * b2.T @ x1
        h1 -= rate[id(W1)] * gram @ b1
        moved += b1
        step += 1
    W1 -= rate[id(W1)] * moved.T @ x
    return step


def not_cancelled(first: Measurement, last: Measurement, size: str, drift: str, layer: int) -> float:
    """``|A| / (|A_0| + |A - A_0|)``: 1 if the change of A since the start takes nothing of A away (Eq. 26, 27)."""
    start, end = (measurement.value(size, LAYERS[layer]) for measurement in (first, last))
    return end / (start * (1 + last.value(drift, LAYERS[layer])))
