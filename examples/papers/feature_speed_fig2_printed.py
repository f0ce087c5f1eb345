"""Fig. 2 of The Feature Speed Formula as printed: 200 samples with entries from N(0, 1), and two outputs.

The sensitivity of the last features, ``rms(dh) / |loss after - loss before|``, after one step of gradient descent with
eta = 0.01, d = 4: (a) of perceptrons of width 400, (b) of residual networks of width 50, from L = 2 on. The paper says
neither what the labels are nor which rates the networks of (b) have at small depths. So there are three settings:
labels 1 with the rates of its tables, labels 1 with rates that make all contributions equal (Eq. 8), and labels from
N(0, 1) with the rates of its tables.

    python examples/papers/feature_speed_fig2_printed.py [--quick] [--draws 10] [--out figures]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from common import arguments, save
from feature_speed_fig2 import BRANCHES, PERCEPTRONS
from networks import moved, parametrized_step
from torch import Tensor

from spectral_monitor.fitting.power_law import Fit, fit_slope
from spectral_monitor.scaling import fsc_resnet

Row = dict[str, Any]

D, OUTPUTS, SAMPLES = 4, 2, 200
WIDTHS = {"a": 400, "b": 50}
DEPTHS = {"a": (5, 10, 20, 40), "b": (2, 3, 4, 6, 10, 20, 50, 100)}
QUICK = {"a": (5, 10, 20, 40), "b": (2, 3, 6, 10, 20)}
STYLES = {"labels 1": "-", "labels 1, equal contributions": "--", "labels N(0, 1)": ":"}


def samples(d: int, labels: str) -> tuple[Tensor, Tensor]:
    """Inputs (200, d) with entries from N(0, 1), and labels (200, 2)."""
    x = torch.randn(SAMPLES, d, dtype=torch.float64)
    shape = (SAMPLES, OUTPUTS)
    return x, (torch.ones if labels == "1" else torch.randn)(shape, dtype=torch.float64)


def sensitivity(panel: str, name: str, setting: str, L: int, seed: int) -> float:
    """Of one draw."""
    beta = BRANCHES[name](L) if panel == "b" else None
    parametrization = PERCEPTRONS[name] if beta is None else fsc_resnet(beta)
    labels = "1" if setting.startswith("labels 1") else "N(0, 1)"
    torch.manual_seed(seed)
    measured, last, _ = parametrized_step(
        parametrization,
        d=D,
        m=WIDTHS[panel],
        L=L,
        beta=beta,
        k=OUTPUTS,
        samples=partial(samples, labels=labels),
        equal=setting.endswith("equal contributions"),
    )
    return moved(measured, last) / -measured.summary["loss_change"]


def measure(depths: dict[str, Sequence[int]], draws: int) -> list[Row]:
    """A row for each draw, depth, scaling and setting."""
    return [
        {"panel": panel, "scaling": name, "setting": setting, "L": L, "draw": seed, "m": WIDTHS[panel]}
        | {"sensitivity": sensitivity(panel, name, setting, L, seed)}
        for panel, names in (("a", PERCEPTRONS), ("b", BRANCHES))
        for name in names
        for setting in STYLES
        for L in depths[panel]
        for seed in range(draws)
    ]


def table(rows: Sequence[Row], name: str, setting: str) -> tuple[list[int], np.ndarray]:
    """Depths, and sensitivities (draws, depths)."""
    some = [row for row in rows if (row["scaling"], row["setting"]) == (name, setting)]
    depths = sorted({row["L"] for row in some})
    return depths, np.array([[row["sensitivity"] for row in some if row["L"] == L] for L in depths]).T


def slope(rows: Sequence[Row], name: str, setting: str, low: int = 0) -> Fit:
    """Against the depth, from ``low`` on: the mean over draws."""
    depths, values = table(rows, name, setting)
    kept = [i for i, L in enumerate(depths) if low <= L]
    return fit_slope([depths[i] for i in kept], values[:, kept].tolist())


def figure(rows: Sequence[Row]) -> Any:
    drawn, panels = plt.subplots(1, 2, figsize=(9.8, 4.6), layout="constrained")
    for axes, (panel, names) in zip(panels, (("a", PERCEPTRONS), ("b", BRANCHES)), strict=True):
        for i, name in enumerate(names):
            for setting, style in STYLES.items():
                depths, values = table(rows, name, setting)
                low, middle, high = np.percentile(values, [25, 50, 75], axis=0)
                label = (name if panel == "a" else f"β = {name.replace('sqrt L', '√L')}") if style == "-" else None
                axes.plot(depths, middle, f"C{i}o{style}", lw=1.7, ms=3.5, label=label)
                axes.fill_between(depths, low, high, color=f"C{i}", alpha=0.13, lw=0)
        for setting, style in STYLES.items():
            axes.plot([], [], style, color="0.3", label=setting)
        axes.set(xscale="log", yscale="log", xlabel="depth L", ylabel="sensitivity, rms(dh) / |ΔLoss|")
        axes.set(xticks=depths, xticklabels=depths)
        axes.minorticks_off()
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False, fontsize=8.5)
    ticks = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
    panels[0].set(title=f"(a) perceptrons, width {WIDTHS['a']}", yticks=ticks, yticklabels=ticks)
    ticks = (0.5, 1, 2, 5, 10)
    panels[1].set(title=f"(b) residual networks, width {WIDTHS['b']}", yticks=ticks, yticklabels=ticks)
    return drawn


def main() -> None:
    args = arguments(__doc__, draws=10)
    rows = measure(QUICK, 5) if args.quick else measure(DEPTHS, args.draws)
    for panel, names in (("a", PERCEPTRONS), ("b", BRANCHES)):
        for name in names:
            for setting in STYLES:
                depths, values = table(rows, name, setting)
                low, middle, high = np.percentile(values, [25, 50, 75], axis=0)
                print(f"{name}, {setting}:")
                for L, *found in zip(depths, middle, low, high, strict=True):
                    print("  L = {:<4} {:.3f} [{:.3f}, {:.3f}]".format(L, *found))
                fit = slope(rows, name, setting, low=0 if panel == "a" else 10)
                if not fit.reason:
                    print(f"  slope {fit.slope:.2f} [{fit.low:.2f}, {fit.high:.2f}]")
    save(args.out, "feature_speed_fig2_printed", figure(rows), rows)


if __name__ == "__main__":
    main()
