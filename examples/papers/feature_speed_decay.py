"""The Feature Speed Formula, Table 1: how fast the loss falls at the start, by depth.

``-dLoss/dt = sum_l eta_l |g_l|^2``, the sum of all contributions, of perceptrons that are trained by gradient descent:
under MF+muP it falls like 1/sqrt L, under FSC and NTK it does not depend on the depth L. One sample; divided by the
square of the output's error, which differs between draws.

    python examples/papers/feature_speed_decay.py [--quick] [--draws 40] [--out figures]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import torch
from common import arguments, mean_and_deviation, save, slope
from networks import parametrized_step

from spectral_monitor.fitting.power_law import fit_slope
from spectral_monitor.scaling import FSC, MF_MUP, NTK

SCALINGS = {"MF+muP": MF_MUP, "NTK": NTK, "FSC": FSC}
MARKERS = {"MF+muP": {"ms": 5}, "NTK": {"ms": 10, "mfc": "none", "elinewidth": 3}, "FSC": {"ms": 5}}
"""NTK and FSC contribute alike, so that their values lie upon each other."""

ETA = 1e-2
D = 4
WIDTH = 20
"""Of the network, per matrix: the product of L Gaussian matrices varies by L / m, so it does alike at all depths."""


def theory(name: str, L: int) -> float:
    """The expectation for large widths, of an input of norm 1: hidden matrices contribute 1/(4 L D), the first and the
    last twice that; MF+muP has 1/sqrt L of it.
    """
    return (L + 2) / (4 * L * D) * (L**-0.5 if name == "MF+muP" else 1.0)


def decays(name: str, L: int, draws: int) -> list[float]:
    """-dLoss/dt of each draw, per square of the output's error."""
    found = []
    for seed in range(draws):
        torch.manual_seed(seed)
        measured, _, loss = parametrized_step(SCALINGS[name], d=D, m=WIDTH * L, L=L, eta=ETA)
        found.append(-measured.summary["loss_change_predicted"] / ETA / (2 * loss))
    return found


def measure(depths: Sequence[int], draws: int) -> list[dict[str, Any]]:
    """A row for each parametrization and depth; the slope, its 95 % interval and that of theory stand in each."""
    rows = []
    for name in SCALINGS:
        values = [decays(name, L, draws) for L in depths]
        fit = fit_slope(depths, list(zip(*values, strict=True)))
        expected = slope(depths, [theory(name, L) for L in depths])
        for L, some in zip(depths, values, strict=True):
            mean, deviation = mean_and_deviation(some)
            row = {"scaling": name, "L": L, "m": WIDTH * L, "decay": mean, "deviation": deviation}
            row |= {"theory": theory(name, L), "slope": fit.slope, "low": fit.low, "high": fit.high}
            rows.append(row | {"theory_slope": expected})
    return rows


def figure(rows: Sequence[dict[str, Any]], draws: int) -> Any:
    drawn, axes = plt.subplots(figsize=(5.2, 4.4), layout="constrained")
    for i, name in enumerate(SCALINGS):
        line = [row for row in rows if row["scaling"] == name]
        depths, means = [row["L"] for row in line], [row["decay"] for row in line]
        error = [row["deviation"] / math.sqrt(draws) for row in line]
        fit = f"{name}: slope {line[0]['slope']:.2f} [{line[0]['low']:.2f}, {line[0]['high']:.2f}]"
        fit += f", theory {line[0]['theory_slope']:.2f}"
        axes.errorbar(depths, means, error, fmt=f"C{i}o", capsize=2.5, label=fit, **MARKERS[name])
        axes.plot(depths, [row["theory"] for row in line], f"C{i}-", lw=1.3)
    axes.plot([], [], "0.4", lw=1.3, label="lines: theory at large width, nothing fitted")
    axes.set(xscale="log", yscale="log", xlabel="depth L", ylabel="−dLoss/dt, for an error of 1 (loss / time)")
    axes.set(xticks=depths, xticklabels=depths, title=f"decay of the loss at the start, width {WIDTH} L")
    axes.set_yticks([0.01, 0.02, 0.05, 0.1], ["0.01", "0.02", "0.05", "0.1"])
    axes.minorticks_off()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False, fontsize=9)
    return drawn


def main() -> None:
    args = arguments(__doc__, draws=40)
    depths, draws = ((4, 8, 16, 24), 8) if args.quick else ((5, 10, 20, 40), args.draws)
    rows = measure(depths, draws)
    for row in {row["scaling"]: row for row in rows}.values():
        interval = f"95 % interval {row['low']:.2f} .. {row['high']:.2f}"
        print(f"{row['scaling']:<7} slope against L: {row['slope']:.3f}, {interval}; theory {row['theory_slope']:.3f}")
    save(args.out, "feature_speed_decay", figure(rows, draws), rows)


if __name__ == "__main__":
    main()
