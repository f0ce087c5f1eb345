"""Linear transfer in the kernel regime: a probe of frozen features, before and after pretraining.

Section 3.1 and Theorem H.17 of Feature Learning in Infinite-Width Neural Networks: features of a wide network in the
kernel regime are those of the start, so that pretraining does nothing for a linear probe on another task. Perceptrons
with two hidden layers of ReLU are pretrained on classes 0 to 4; then a ridge regression on their frozen features learns
classes 5 to 9.

    python examples/papers/infinite_width_probe.py [--quick] [--data FOLDER] [--out figures]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from common import arguments, images, save
from jobs import rows_of
from matplotlib.figure import Figure
from spectral_panels import COLORS, curve, slope_of, width_axis
from torch import Tensor, nn

from spectral_monitor.scaling import MUP, NTP

Row = dict[str, Any]

COMPONENTS, CLASSES = 64, 5
PRETRAINED, PROBED, TESTED = 200, 400, 1000
"""Images of each task, at most; those that the probe is tested on are others than it learns."""
STEPS, LR = 50, 0.5
RIDGE = 0.1
"""Times the mean square of a sample's features at the start."""
PARAMETRIZATIONS = {"muP": MUP, "NTP": NTP}
FULL = {"widths": (64, 128, 256, 512, 1024), "trials": 3}
QUICK = {"widths": (64, 128, 256), "trials": 2}


def tasks(data: Path | None) -> dict[str, tuple[Tensor, Tensor]]:
    """Principal components (n, 64) of mean square 1 and one-hot labels (n, 5) of the three sets of images."""
    pixels, labels, what = images(data)
    centred = pixels - pixels.mean(0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    x = centred @ vectors[:, -COMPONENTS:]
    x = x / x.square().mean().sqrt()
    first, second = (torch.nonzero(chosen).flatten() for chosen in (labels < CLASSES, labels >= CLASSES))
    places = {"pretrain": first[:PRETRAINED], "probe": second[:PROBED], "test": second[PROBED : PROBED + TESTED]}
    print(f"{what}: " + ", ".join(f"{len(some)} images to {name}" for name, some in places.items()))
    return {
        name: (x[some], nn.functional.one_hot(labels[some] % CLASSES, CLASSES).to(x)) for name, some in places.items()
    }


def features(net: nn.Sequential, x: Tensor) -> Tensor:
    """What the readout is given (n, width), divided by the root of the width."""
    with torch.no_grad():
        given = net[:-1](x)
    return (given / math.sqrt(given.shape[1])).double()


def probe(learnt: Tensor, y: Tensor, asked: Tensor, ridge: float) -> Tensor:
    """Predictions (asked, 5) of the ridge regression of labels on features, by their inner products."""
    kernel = learnt @ learnt.T + ridge * torch.eye(len(learnt), dtype=learnt.dtype)
    return asked @ learnt.T @ torch.linalg.solve(kernel, y.double())


def transfer(name: str, width: int, trial: int, given: dict[str, tuple[Tensor, Tensor]]) -> Row:
    """Pretrain a network, and compare the probe of its features with that of the features of the start."""
    torch.manual_seed(trial)
    net = nn.Sequential(
        nn.Linear(COMPONENTS, width, bias=False),
        nn.ReLU(),
        nn.Linear(width, width, bias=False),
        nn.ReLU(),
        nn.Linear(width, CLASSES, bias=False),
    )
    parametrization = PARAMETRIZATIONS[name]
    parametrization.init_(net)
    optimizer = torch.optim.SGD(parametrization.param_groups(net, lr=LR, optimizer="sgd"))
    (x, y), (probed, of_probed), (tested, of_tested) = given.values()
    ridge = RIDGE * float(features(net, probed).square().sum(1).mean())

    def predictions() -> Tensor:
        return probe(features(net, probed), of_probed, features(net, tested), ridge)

    before = predictions()
    losses = []
    for _ in range(STEPS):
        loss = (net(x) - y).square().sum(1).mean() / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    after = predictions()
    right = of_tested.argmax(1)
    accuracies = [float((some.argmax(1) == right).double().mean()) for some in (before, after)]
    return {
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "accuracy_before": accuracies[0],
        "accuracy_after": accuracies[1],
        "predictions_moved": float((after - before).norm() / before.norm()),
        "answers_changed": float((after.argmax(1) != before.argmax(1)).double().mean()),
    }


def sweep(path: Path, data: Path | None, widths: Sequence[int], trials: int) -> list[Row]:
    given = tasks(data)
    keys = [
        {"parametrization": name, "width": width, "trial": trial, "images": len(given["test"][0])}
        for name in PARAMETRIZATIONS
        for width in widths
        for trial in range(trials)
    ]
    return rows_of(
        path,
        keys,
        lambda parametrization, width, trial, images: transfer(parametrization, width, trial, given),
        "probes",
    )


def figure(rows: Sequence[Row]) -> Figure:
    drawn, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for name, color in COLORS.items():
        fit = slope_of(rows, "predictions_moved", parametrization=name)
        curve(left, rows, "predictions_moved", f"{name}, slope {fit.slope:.2f}", color, parametrization=name)
        curve(right, rows, "accuracy_after", f"{name}, pretrained", color, parametrization=name)
        curve(right, rows, "accuracy_before", f"{name}, at the start", color, ":", parametrization=name)
    for axes in (left, right):
        width_axis(axes, [row["width"] for row in rows])
        axes.legend(frameon=False, fontsize=8)
    left.set(yscale="log", ylabel="change of the probe's predictions", title="‖after − before‖ / ‖before‖")
    right.set(ylabel="accuracy on classes 5 to 9", title="accuracy of the probe")
    return drawn


def main() -> None:
    args = arguments(__doc__)
    torch.set_num_threads(1)
    rows = sweep(args.out / "infinite_width_probe.jsonl", args.data, **(QUICK if args.quick else FULL))
    for name in PARAMETRIZATIONS:
        for width in sorted({row["width"] for row in rows}):
            some = [row for row in rows if (row["parametrization"], row["width"]) == (name, width)]
            mean = {key: sum(row[key] for row in some) / len(some) for key in some[0] if key != "parametrization"}
            print(
                f"{name}, width {width}: loss {mean['loss_first']:.2f} to {mean['loss_last']:.2f}, accuracy "
                f"{mean['accuracy_before']:.3f} to {mean['accuracy_after']:.3f}, answers changed "
                f"{mean['answers_changed']:.3f}, predictions moved {mean['predictions_moved']:.4f}"
            )
        for key in ("predictions_moved", "answers_changed"):
            fit = slope_of(rows, key, parametrization=name)
            print(f"{name}: {key}, slope {fit.slope:.2f} [{fit.low:.2f}, {fit.high:.2f}]")
    save(args.out, "infinite_width_probe", figure(rows), rows)


if __name__ == "__main__":
    main()
