"""Fig. 2 of The Feature Speed Formula: how much the last features change for a given decrease of the loss.

The sensitivity is ``rms(dh) / |loss after - loss before|`` of one step of gradient descent, all matrices trained, at
what the readout is given: (a) perceptrons of width 400 under three parametrizations, whose sensitivity grows with the
depth (MF+muP), is small (NTK), or of order 1 (FSC); (b) residual networks of width 50.

    python examples/papers/feature_speed_fig2.py [--quick] [--draws 20] [--out figures]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from common import arguments, save, slope
from networks import moved, parametrized_step

from spectral_monitor.scaling import FSC, MF_MUP, NTK, fsc_resnet

PERCEPTRONS = {"MF+muP": MF_MUP, "NTK": NTK, "FSC": FSC}
BRANCHES = {"1/sqrt L": lambda L: L**-0.5, "1/L": lambda L: 1 / L}
DEPTHS = {"a": (5, 10, 20, 40), "b": (20, 50, 100)}
REFERENCE = {
    "MF+muP": (1.49, 2.30, 3.93, 5.5),
    "NTK": (0.10, 0.17, 0.24, 0.34),
    "FSC": (0.63, 0.72, 0.78, 0.88),
    "1/sqrt L": (1.33, 1.31, 1.28),
    "1/L": (1.06, 1.03, 1.04),
}
"""At these depths, by another implementation of the paper's protocol with one sample, whose figure gives no numbers."""


def sensitivities(panel: str, name: str, L: int, draws: int, m: int, d: int = 4) -> dict[str, Any]:
    """Median and quartiles over draws."""
    beta = BRANCHES[name](L) if panel == "b" else None
    parametrization = PERCEPTRONS[name] if beta is None else fsc_resnet(beta)
    found = []
    for seed in range(draws):
        torch.manual_seed(seed)
        measured, last, _ = parametrized_step(parametrization, d=d, m=m, L=L, beta=beta)
        found.append([moved(measured, last) / -measured.summary["loss_change"], measured.value("sensitivity", last)])
    low, median, high = np.percentile(found, [25, 50, 75], axis=0)
    row = {"panel": panel, "scaling": name, "L": L, "m": m, "sensitivity": median[0], "low": low[0], "high": high[0]}
    return row | {"of_the_decrease_up_to_there": median[1]}


def perceptrons(draws: int = 20, m: int = 400, depths: Sequence[int] = DEPTHS["a"]) -> list[dict[str, Any]]:
    return [sensitivities("a", name, L, draws, m) for name in PERCEPTRONS for L in depths]


def residual(draws: int = 20, m: int = 50, depths: Sequence[int] = DEPTHS["b"]) -> list[dict[str, Any]]:
    return [sensitivities("b", name, L, draws, m) for name in BRANCHES for L in depths]


def by_name(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [row for row in rows if row["scaling"] == name] for name in dict.fromkeys(r["scaling"] for r in rows)}


def figure(rows: Sequence[dict[str, Any]]) -> Any:
    drawn, panels = plt.subplots(1, 2, figsize=(9.4, 4.2), layout="constrained")
    titles = {"a": "(a) perceptrons, width {}", "b": "(b) residual networks, width {}"}
    for axes, (panel, title) in zip(panels, titles.items(), strict=True):
        some = by_name([row for row in rows if row["panel"] == panel])
        for i, (name, line) in enumerate(some.items()):
            depths = [row["L"] for row in line]
            label = name if panel == "a" else f"β = {name.replace('sqrt L', '√L')}"
            axes.plot(depths, [row["sensitivity"] for row in line], f"C{i}o-", lw=1.8, ms=4, label=label)
            axes.fill_between(
                depths, [r["low"] for r in line], [r["high"] for r in line], color=f"C{i}", alpha=0.18, lw=0
            )
            axes.plot(DEPTHS[panel], REFERENCE[name], ls="none", marker="D", mfc="none", mec=f"C{i}", ms=8)
        axes.plot([], [], ls="none", marker="D", mfc="none", mec="0.3", ms=8, label="reference")
        axes.set(xlabel="depth L", ylabel="sensitivity, rms(dh) / |ΔLoss|", title=title.format(line[0]["m"]))
        axes.set(xscale="log", xticks=DEPTHS[panel], xticklabels=DEPTHS[panel])
        axes.minorticks_off()
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4, frameon=False, fontsize=9)
    depths = np.array(DEPTHS["a"])
    for start in (REFERENCE["MF+muP"][0], math.sqrt(depths[0] / 400)):
        root = start * np.sqrt(depths / depths[0])
        panels[0].plot(depths, root, color="0.5", ls=":", lw=1.2, zorder=0)
        panels[0].annotate("∝ √L", (depths[-1], root[-1]), xytext=(6, -4), textcoords="offset points", color="0.4")
    panels[0].set(yscale="log", yticks=(0.1, 0.2, 0.5, 1, 2, 5), yticklabels=("0.1", "0.2", "0.5", "1", "2", "5"))
    panels[0].minorticks_off()
    panels[1].set_ylim(0, 2)
    return drawn


def main() -> None:
    args = arguments(__doc__, draws=20)
    draws = 5 if args.quick else args.draws
    rows = perceptrons(draws) + residual(draws)
    for name, line in by_name(rows).items():
        for row, reference in zip(line, REFERENCE[name], strict=True):
            spread = f"quartiles {row['low']:.2f} .. {row['high']:.2f}"
            print(f"{name:<9} L = {row['L']:<4} {row['sensitivity']:.2f} ({spread}), reference {reference}")
        print(f"{name:<9} slope against L: {slope([r['L'] for r in line], [r['sensitivity'] for r in line]):.2f}")
    save(args.out, "feature_speed_fig2", figure(rows), rows)


if __name__ == "__main__":
    main()
