"""First-order MAML on Omniglot, 5-way 1-shot, at finite and infinite width and with kernels (Section 9.2, Algorithm 4).

Linear networks of one hidden layer learn in the feature learning limit; kernels cannot. Learning rates and standard
deviations of each width are those of the authors' scripts. Those of kernels are chosen on tasks of the training
characters. Stopped runs go on where they were.

    python examples/papers/infinite_width_maml.py [--quick] [--data FOLDER] [--out figures] [--steps N] [--lr X]

Without ``--lr`` each width has its own; 0.4 is good for few steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from common import arguments, save
from jobs import progress, rows_of
from maml_kernels import ADAPT_LR, CHOICE_TASKS, CLIP, GRIDS, META_LR, TASKS, TEST_STEPS, kernel_row
from matplotlib.figure import Figure
from omniglot import WAYS, Characters, characters
from torch import Tensor

from spectral_monitor.limits import LinearNetwork, finite_width, infinite_width

INFINITE = 0
"""Stands for the limit among widths."""

# Width: su, sv, learning rate, alpha.
SETTINGS = {
    2: (0.5, 0.5, 0.05, 2.0),
    8: (0.5, 2**-2, 0.1, 1.0),
    32: (1.0, 2**-3, 0.4, 0.5),
    128: (1.0, 2**-3, 0.1, 1.0),
    512: (1.0, 2**-5, 0.1, 1.0),
    2048: (1.0, 2**-5, 0.1, 1.0),
    8192: (1.0, 2**-5, 0.1, 1.0),
    INFINITE: (1.0, 2**-5, 0.1, 1.0),
}
FULL = {"widths": (INFINITE, 2, 8, 32, 128, 512, 2048, 8192), "kernel_steps": 100, "tests": 2000, "seeds": 3}
QUICK = {"widths": (2, INFINITE), "kernel_steps": 5, "tests": 500, "seeds": 1}
QUICK_STEPS, QUICK_LR, QUICK_CHOICE = 1000, 0.4, 100
"""The limit learns faster at 0.4, and ends a little lower."""

Row = dict[str, Any]


def adapted(net: LinearNetwork, x: Tensor, test: Tensor, y: Tensor, alpha: float, steps: int) -> Any:
    """Outputs at test images after steps of gradient descent on each task, and the parts of the adapted networks.

    U stays shared: that of a task is ``U + a x``, with ``a`` (T, n, 5) and the task's images x.

    Args:
        net: before adaptation.
        x, test: (T, 5, d) images.
        y: (5,) labels.
        alpha: multiplier of the bias.
        steps: of gradient descent.

    Returns:
        Outputs (T, 5, k), hidden features (T, 5, n) and the readouts (T, k, n).
    """
    own, cross = x @ x.mT, test @ x.mT  # (T, 5, 5)
    hidden, hidden_test = x @ net.U.T + net.b, test @ net.U.T + net.b  # (T, 5, n)
    V = net.V.expand(len(x), *net.V.shape)
    target = torch.nn.functional.one_hot(y, WAYS)
    moved = torch.zeros_like(hidden)  # what <x_i, x> multiplies in the change of hidden features
    for _ in range(steps):
        # Biases move by alpha^2 times the same sum, as an input that is alpha everywhere would.
        h = hidden + (own + alpha**2) @ moved
        chi = ((h @ V.mT).softmax(2) - target) / WAYS
        moved, V = moved - ADAPT_LR * chi @ V, V - ADAPT_LR * chi.mT @ h
    h = hidden_test + (cross + alpha**2) @ moved
    return h @ V.mT, h, V


def meta_step(net: LinearNetwork, x: Tensor, test: Tensor, y: Tensor, lr: float, alpha: float) -> LinearNetwork:
    """First-order MAML: the sum over tasks of gradients at the adapted networks, clipped, applied to the network."""
    f, h, V = adapted(net, x, test, y, alpha, steps=1)
    chi = (f.softmax(2) - torch.nn.functional.one_hot(y, WAYS)) / WAYS  # (T, 5, k)
    back = (chi @ V).flatten(0, 1)  # (5 T, n)
    dU, dV, db = back.T @ test.flatten(0, 1), (chi.mT @ h).sum(0), alpha * back.sum(0)
    length = math.sqrt(sum(part.square().sum().item() for part in (dU, dV, db)))
    rate = lr * min(1.0, CLIP / length if length > 0 else 1.0)
    return replace(net, U=net.U - rate * dU, V=net.V - rate * dV, b=net.b - rate * alpha * db)


def accuracy(net: LinearNetwork, test: Characters, alpha: float, count: int, seed: int = 1) -> float:
    """Of test tasks after 20 steps of adaptation, in percent."""
    generator, right = torch.Generator().manual_seed(seed), 0.0
    for _ in range(count // 50):
        x, other, y = test.tasks(50, generator, rotated=False)
        f, _, _ = adapted(net, x, other, y, alpha, TEST_STEPS)
        right += (f.argmax(2) == y).double().mean().item()
    return 100 * right / (count // 50)


def start(width: int, d: int, seed: int) -> LinearNetwork:
    su, sv, _, _ = SETTINGS[width]
    if width == INFINITE:
        return infinite_width(d, WAYS, su=su, sv=sv)
    return finite_width(width, d, WAYS, su=su, sv=sv, generator=torch.Generator().manual_seed(seed))


def network_row(
    out: Path, train: Characters, test: Characters, width: int, seed: int, steps: int, lr: float, tests: int
) -> Row:
    """Accuracy before and after meta-training; the state is saved every 500 steps."""
    alpha, saved = SETTINGS[width][3], out / f"infinite_width_maml-{width}-{seed}-{steps}-{lr:g}.pt"
    net, done = start(width, train.images.shape[2], seed), 0
    before = accuracy(net, test, alpha, tests)
    generator = torch.Generator().manual_seed(seed)
    if saved.exists():
        state = torch.load(saved)
        net, done = LinearNetwork(*state["net"]), state["done"]
        generator.set_state(state["generator"])
    for step in progress(range(done, steps), f"width {width or 'infinite'}"):
        net = meta_step(net, *train.tasks(TASKS, generator, rotated=True), lr, alpha)
        if step % 500 == 499:
            torch.save({"net": (net.U, net.V, net.b), "done": step + 1, "generator": generator.get_state()}, saved)
    saved.unlink(missing_ok=True)
    return {"before": before, "accuracy": accuracy(net, test, alpha, tests)}


def summary(rows: Sequence[Row], key: str = "accuracy") -> dict[str, tuple[float, float]]:
    """Name -> mean over seeds, and half of the 95 % interval over the images of all their tasks.

    Seeds of a name are tested on the same tasks, so that more of them do not make the interval narrower.
    """
    found = {}
    for name in dict.fromkeys(row["name"] for row in rows):
        some = [row for row in rows if row["name"] == name]
        mean = sum(row[key] for row in some) / len(some)
        found[name] = mean, 1.96 * math.sqrt(mean * (100 - mean) / (WAYS * some[0]["tests"]))
    return found


def figure(rows: Sequence[Row]) -> Figure:
    drawn, axis = plt.subplots(figsize=(5.6, 3.8), layout="constrained")
    found = summary(rows)
    widths = [int(name) for name in found if name.isdigit()]
    means, halves = zip(*(found[str(n)] for n in widths), strict=True)
    axis.errorbar(widths, means, halves, fmt="o", ms=4, capsize=3, color="#4c72b0", label="width n")
    colours = {"infinite": "0.3", "linear": "#937860", "nngp": "#dd8452", "ntk": "#c44e52"}
    titles = {"infinite": "infinite width", "linear": "linear kernel", "nngp": "ReLU GP", "ntk": "ReLU NTK"}
    for name, colour in colours.items():
        mean, half = found[name]
        axis.axhline(mean, ls="--", lw=1.5, color=colour, label=f"{titles[name]}: {mean:.1f}")
        axis.axhspan(mean - half, mean + half, color=colour, alpha=0.15, lw=0)
    axis.set(xscale="log", xlabel="width n", ylabel="accuracy, %")
    axis.set_xticks(widths, [str(n) for n in widths])
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=8)
    return drawn


def sweep(
    out: Path,
    data: Path | None,
    widths: Sequence[int],
    kernel_steps: int,
    tests: int,
    seeds: int,
    steps: int,
    lr: float,
    choice_tasks: int,
) -> list[Row]:
    """A row for each kernel and network; a learning rate of 0 stands for that of the width."""
    train, test = characters(data)
    print(f"{train.what} to train on, {len(test.images)} to test on")
    path, what = out / "infinite_width_maml.jsonl", {"data": train.what, "tests": tests}
    kernels = rows_of(
        path,
        [
            {"name": kernel, "seed": seed, "steps": kernel_steps, "lr": META_LR, "choice_tasks": choice_tasks, **what}
            for kernel in GRIDS
            for seed in range(seeds)
        ],
        lambda name, seed, steps, lr, choice_tasks, data, tests: kernel_row(
            train, test, name, seed, steps, tests, choice_tasks
        ),
        "kernels",
    )
    keys = [
        {
            "name": str(width) if width != INFINITE else "infinite",
            "seed": seed,
            "steps": steps,
            "lr": lr or SETTINGS[width][2],
            **what,
        }
        for width in widths
        for seed in range(seeds)
    ]
    networks = rows_of(
        path,
        keys,
        lambda name, seed, steps, lr, data, tests: network_row(
            out, train, test, INFINITE if name == "infinite" else int(name), seed, steps, lr, tests
        ),
        "networks",
    )
    return kernels + [{"choice_tasks": "", **row, "settings": ""} for row in networks]


def report(rows: Sequence[Row]) -> None:
    before = summary(rows, "before")
    for name, (mean, half) in summary(rows).items():
        some = [row for row in rows if row["name"] == name]
        seeds = ", ".join(f"{row['accuracy']:.1f}" for row in some)
        print(
            f"{name:>8}: {before[name][0]:.1f} % before, {mean:.1f} +- {half:.1f} % after {some[0]['steps']} steps "
            f"({seeds}) {some[0]['settings']}"
        )


def main() -> None:
    args = arguments(__doc__, steps=0, lr=0.0, seeds=0, kernel_steps=0, widest=8192)
    size: dict[str, Any] = dict(QUICK if args.quick else FULL)
    size |= {name: given for name in ("seeds", "kernel_steps") if (given := getattr(args, name))}
    size["widths"] = [width for width in size["widths"] if width <= args.widest]
    steps = args.steps or (QUICK_STEPS if args.quick else 10_000)
    rows = sweep(
        args.out,
        args.data,
        **size,
        steps=steps,
        lr=args.lr or (QUICK_LR if args.quick else 0.0),
        choice_tasks=QUICK_CHOICE if args.quick else CHOICE_TASKS,
    )
    report(rows)
    save(args.out, "infinite_width_maml", figure(rows), rows)


if __name__ == "__main__":
    main()
