"""Figure 4 of Feature Learning in Infinite-Width Neural Networks: losses of wide perceptrons and their limits.

Perceptrons of one and two hidden layers with one input; phi = z, z^2 and, which the paper does not have, tanh. In the
middle column the transposed matrix of the backward pass is drawn independently, as Theorem 6.3 has it. For tanh at this
learning rate one sees what the same matrix does in both directions.

    python examples/papers/infinite_width_fig4.py [--quick] [--out figures]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from common import arguments, save
from jobs import rows_of
from matplotlib.figure import Figure
from torch import Tensor

from spectral_monitor.limits import LinearPopulations, Populations, WeightedNeurons

# Inputs and targets, drawn once.
XS, YS = (1.0, -1.0, 1.0, 1.0, -1.0, 1.0), (1.0, -1.0, -1.0, 1.0, 1.0, -1.0)


def _identity(z: Tensor) -> Tensor:
    return z


PHIS = {
    "identity": (_identity, torch.ones_like),
    "square": (torch.square, lambda z: 2 * z),
    "tanh": (torch.tanh, lambda z: 1 - torch.tanh(z).square()),
}
COLUMNS = {"1": "one hidden layer", "2 decoupled": "two, transpose independent", "2": "two hidden layers"}
LR = {
    ("identity", "1"): 0.5,
    ("identity", "2"): 0.5,
    ("square", "1"): 0.1,
    ("square", "2"): 0.005,
    ("tanh", "1"): 0.5,
    ("tanh", "2"): 3.0,
}
STEPS = {"square": 5}
PARTICLES = 400_000
FULL = {"widths": (1024, 4096), "seeds": 100}
QUICK = {"widths": (256, 1024), "seeds": 24}

Row = dict[str, Any]


def setting(phi: str, column: str) -> tuple[float, int]:
    """Learning rate and number of steps."""
    return LR[phi, column[0]], STEPS.get(phi, len(XS))


def limit(phi: str, column: str, particles: int = PARTICLES) -> list[float]:
    """Losses of the limit: exact where phi is the identity, by quadrature with one hidden layer, else by particles."""
    lr, steps = setting(phi, column)
    act, decoupled = PHIS[phi][0], column == "2 decoupled"
    if column == "1":
        nodes: Any = WeightedNeurons(1, 1, act, lr=lr)
    elif phi == "identity":
        nodes = LinearPopulations(1, lr=lr, examples=steps, decoupled=decoupled)
    else:
        nodes = Populations(1, 2, act, lr=lr, n=particles, decoupled=decoupled)
    losses = []
    for x, y in zip(XS[:steps], YS, strict=False):
        f = nodes.step(torch.tensor([[x]]), lambda f, y=y: f - y).item()
        losses.append((f - y) ** 2 / 2)
    return losses


def finite(phi: str, column: str, width: int, seed: int) -> Row:
    """Losses of a network, in maximal updates: ``f = V phi(W phi(U x))``, one example a step, square loss.

    The matrix W is kept as its start and the vectors of its updates, which cost nothing.
    """
    (act, slope), (lr, steps), n = PHIS[phi], setting(phi, column), width
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    U, V = normal(n), normal(n) / n
    deep = column != "1"
    W = normal(n, n) / math.sqrt(n) if deep else torch.empty(0)
    back = normal(n, n) / math.sqrt(n) if column == "2 decoupled" else W  # its transpose carries gradients
    left, right = torch.zeros(n, 0), torch.zeros(n, 0)  # W is its start - left right^T
    losses = []
    for x, y in zip(XS[:steps], YS, strict=False):
        h1 = U * x
        x1 = act(h1)
        h2 = W @ x1 - left @ (right.T @ x1) if deep else h1
        x2 = act(h2) if deep else x1
        f = float(V @ x2)
        losses.append((f - y) ** 2 / 2)
        chi = f - y
        delta = slope(h2) * chi * V  # of the layer below the readout, of order 1/n
        if deep:
            below = slope(h1) * (back.T @ delta - right @ (left.T @ delta))
            left, right = torch.cat([left, lr * delta[:, None]], 1), torch.cat([right, x1[:, None]], 1)
        else:
            below = delta
        V = V - lr / n * chi * x2
        U = U - lr * n * below * x
    return {"losses": losses}


def sweep(path: Any, widths: Sequence[int], seeds: int) -> list[Row]:
    keys = [
        {"phi": phi, "column": column, "width": width, "seed": seed}
        for phi in PHIS
        for column in COLUMNS
        for width in widths
        for seed in range(seeds)
    ]
    return rows_of(path, keys, finite, "networks")


def summary(rows: Sequence[Row]) -> list[Row]:
    """For each case and step: the limit, and mean and standard error of every width."""
    found = []
    widths = sorted({row["width"] for row in rows})
    for phi in PHIS:
        for column in COLUMNS:
            wanted = limit(phi, column)
            for width in widths:
                runs = np.array(
                    [r["losses"] for r in rows if (r["phi"], r["column"], r["width"]) == (phi, column, width)]
                )
                error = runs.std(0, ddof=1) / math.sqrt(len(runs))
                for step, value in enumerate(wanted):
                    found.append(
                        {
                            "phi": phi,
                            "column": column,
                            "width": width,
                            "step": step,
                            "limit": value,
                            "mean": runs[:, step].mean(),
                            "error": error[step],
                            "deviation": runs[:, step].std(ddof=1),
                        }
                    )
    return found


def figure(table: Sequence[Row]) -> Figure:
    drawn, axes = plt.subplots(len(PHIS), len(COLUMNS), figsize=(11, 8), layout="constrained")
    widths = sorted({row["width"] for row in table})
    for line, phi in zip(axes, PHIS, strict=True):
        for axis, (column, title) in zip(line, COLUMNS.items(), strict=True):
            for width, colour in zip(widths, ("#dd8452", "#4c72b0"), strict=True):
                some = [r for r in table if (r["phi"], r["column"], r["width"]) == (phi, column, width)]
                steps, mean, band = (np.array([r[key] for r in some]) for key in ("step", "mean", "deviation"))
                axis.plot(steps, mean, "o-", ms=3, lw=1.4, color=colour, label=f"width {width}")
                axis.fill_between(steps, mean - band, mean + band, color=colour, alpha=0.2, lw=0)
            axis.plot(steps, [r["limit"] for r in some], "--", color="0.3", lw=1.6, label="infinite width")
            axis.set(title=f"{phi}, {title}, lr {setting(phi, column)[0]:g}", xlabel="step", ylabel="loss")
            axis.title.set_fontsize(9)
    axes[0, 0].legend(frameon=False, fontsize=8)
    return drawn


def report(table: Sequence[Row]) -> bool:
    """Print the widest networks beside the limit; whether the means are within three standard errors + 4/n of it."""
    right = True
    widest = max(row["width"] for row in table)
    for phi in PHIS:
        for column in COLUMNS:
            some = [r for r in table if (r["phi"], r["column"], r["width"]) == (phi, column, widest)]
            # Finite widths have a bias of order 1/n besides; of what the loss is made of, 4 / n is enough.
            fine = all(abs(r["mean"] - r["limit"]) < 3 * r["error"] + 4 / widest * (1 + r["limit"]) for r in some)
            right &= fine
            cells = "  ".join(f"{r['limit']:.4g} ({r['mean']:.4g} +- {r['error']:.2g})" for r in some)
            print(f"{phi}, {COLUMNS[column]}: limit (width {widest})  {cells}{'' if fine else '  OFF'}")
    return right


def main() -> None:
    args = arguments(__doc__)
    rows = sweep(args.out / "infinite_width_fig4.jsonl", **(QUICK if args.quick else FULL))
    table = summary(rows)
    report(table)
    save(args.out, "infinite_width_fig4", figure(table), table)


if __name__ == "__main__":
    main()
