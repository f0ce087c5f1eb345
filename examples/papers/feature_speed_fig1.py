"""Fig. 1 of The Feature Speed Formula: the angle between what features do and what the loss wants of them.

Residual networks with branches of scale beta, beta = 1 being a perceptron, one step of gradient descent:
(a) the angle at every layer, (b) at the output for several depths, (c) at the output for branches of scale c / sqrt L.

    python examples/papers/feature_speed_fig1.py [--quick] [--panels abc] [--out figures]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from common import arguments, mean_and_deviation, save, slope
from networks import equal_contributions

BRANCHES: dict[str, Callable[[int], float]] = {
    "1/L": lambda L: 1 / L,
    "0.5/sqrt L": lambda L: 0.5 / math.sqrt(L),
    "1/sqrt L": lambda L: 1 / math.sqrt(L),
    "2/sqrt L": lambda L: 2 / math.sqrt(L),
    "1": lambda L: 1.0,
}
"""The scale of the branches at depth L."""

NODES = (10, 25, 50, 100, 150, 198)
REFERENCE = {
    "1/L": (0.012, 0.020, 0.029, 0.041, 0.052, 0.057),
    "0.5/sqrt L": (0.085, 0.141, 0.202, 0.284, 0.353, 0.389),
    "1/sqrt L": (0.178, 0.303, 0.410, 0.584, 0.656, 0.707),
    "2/sqrt L": (0.345, 0.532, 0.744, 0.945, 1.021, 1.055),
    "1": (1.200, 1.288, 1.350, 1.444, 1.430, 1.486),
}
"""Radians at these layers (counted from 0) for d = 10, m = 200, k = 1, L = 200, means over five draws of another
implementation of the paper's protocol, whose figure gives no numbers."""

OUTPUT_AT_C = {0.5: 0.389, 1.0: 0.707, 2.0: 1.055}
"""The same at the output by c = beta sqrt L."""


def angles(draws: int, nodes: Sequence[int], **network: Any) -> dict[int, tuple[float, float]]:
    """Node -> mean and standard deviation of its angle over draws."""
    found = []
    for seed in range(draws):
        torch.manual_seed(seed)
        found.append(equal_contributions(nodes=nodes, **network))
    return {node: mean_and_deviation([angle[node] for angle in found]) for node in nodes}


def by_layer(draws: int = 5, L: int = 200, m: int = 200, nodes: Sequence[int] = range(1, 199)) -> list[dict[str, Any]]:
    return [
        {"panel": "a", "beta": name, "L": L, "m": m, "layer": node, "angle": mean, "deviation": deviation}
        for name, beta in BRANCHES.items()
        for node, (mean, deviation) in angles(draws, nodes, beta=beta(L), L=L, m=m).items()
    ]


def by_depth(depths: Sequence[int], draws: int = 5, m: int = 200) -> list[dict[str, Any]]:
    return [
        {"panel": "b", "beta": name, "L": L, "m": m, "layer": node, "angle": mean, "deviation": deviation}
        for name, beta in BRANCHES.items()
        for L in depths
        for node, (mean, deviation) in angles(draws, [L - 2], beta=beta(L), L=L, m=m).items()
    ]


def by_scale(depths: Sequence[int], betas: Sequence[float], draws: int = 5, m: int = 500) -> list[dict[str, Any]]:
    return [
        {"panel": "c", "beta": beta, "L": L, "m": m, "layer": node, "angle": mean, "deviation": deviation}
        for L in depths
        for beta in betas
        for node, (mean, deviation) in angles(draws, [L - 2], beta=beta, L=L, m=m).items()
    ]


def of_cosine(rows: Sequence[dict[str, Any]]) -> float:
    """Slope of the cosine against c on log-log axes, where c is large and the network still a residual one."""
    large = [row for row in rows if row["beta"] * math.sqrt(row["L"]) > 2 and row["beta"] < 0.5]
    return slope([row["beta"] * math.sqrt(row["L"]) for row in large], [math.cos(row["angle"]) for row in large])


def _panel(axes: Any, rows: Sequence[dict[str, Any]], key: str, x: Callable[[dict[str, Any]], float]) -> None:
    """A curve with a band of one standard deviation for every value of ``key``."""
    names = list(dict.fromkeys(row[key] for row in rows))
    for name, color in zip(names, plt.get_cmap("viridis")(np.linspace(0, 0.85, len(names))), strict=True):
        line = [row for row in rows if row[key] == name]
        places, mean, deviation = (
            np.array([f(row) for row in line]) for f in (x, *map(_value, ("angle", "deviation")))
        )
        axes.plot(places, mean, color=color, lw=1.8, label=f"L = {name}" if key == "L" else _written(name))
        axes.fill_between(places, mean - deviation, mean + deviation, color=color, alpha=0.2, lw=0)
    axes.axhline(math.pi / 2, color="0.6", lw=0.8, ls=":")
    axes.set_ylim(0, 1.7)
    axes.set_yticks([0, math.pi / 8, math.pi / 4, 3 * math.pi / 8, math.pi / 2])
    axes.set_yticklabels(["0", "π/8", "π/4", "3π/8", "π/2"])


def _value(key: str) -> Callable[[dict[str, Any]], float]:
    return lambda row: float(row[key])


def _written(name: str) -> str:
    beta = "β = " + name.replace("sqrt L", "√L")
    return f"{beta} (perceptron)" if name == "1" else beta


def figure(rows: Sequence[dict[str, Any]]) -> Any:
    panels = {name: [row for row in rows if row["panel"] == name] for name in "abc"}
    shown = [name for name, some in panels.items() if some]
    drawn, every = plt.subplots(1, len(shown), figsize=(4.6 * len(shown), 4.3), squeeze=False, layout="constrained")
    mark = {"ls": "none", "marker": "o", "mfc": "white", "mec": "black", "ms": 4.5, "zorder": 3}
    for name, axes in zip(shown, every[0], strict=True):
        some = panels[name]
        if name == "a":
            _panel(axes, some, "beta", _value("layer"))
            for values in REFERENCE.values():
                axes.plot(NODES, values, **mark, label=None if values[0] < 1 else "reference")
            axes.set(xlabel="layer", ylabel="backward-feature angle (rad)", title=f"(a) by layer, L = {some[0]['L']}")
        elif name == "b":
            _panel(axes, some, "beta", _value("L"))
            axes.plot([200] * len(REFERENCE), [values[-1] for values in REFERENCE.values()], **mark, label="reference")
            axes.set(xlabel="depth L", ylabel="angle at the output (rad)", title="(b) at the output, by depth")
        else:
            _panel(axes, some, "L", lambda row: row["beta"] * math.sqrt(row["L"]))
            axes.plot(list(OUTPUT_AT_C), list(OUTPUT_AT_C.values()), **mark, label="reference, L = 200")
            axes.set(xscale="log", xlabel="c = β √L", ylabel="angle at the output (rad)")
            axes.set_title(f"(c) branches of scale c/√L, width {some[0]['m']}")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False, fontsize=8)
    return drawn


def main() -> None:
    args = arguments(__doc__, draws=5, panels="abc")
    rows = []
    if "a" in args.panels:
        rows += by_layer(5, nodes=sorted({*NODES, *range(1, 199, 6)})) if args.quick else by_layer(args.draws)
    if "b" in args.panels:
        rows += by_depth([20, 50, 100] if args.quick else [10, *range(20, 201, 20)], 5 if args.quick else args.draws)
    if "c" in args.panels:
        if args.quick:
            rows += by_scale([30, 100], np.logspace(-2, 0, 9).tolist(), 3, m=200)
        else:
            rows += by_scale([30, 100, 500], np.logspace(-3, 0, 20).tolist(), args.draws)
            found = of_cosine([row for row in rows if row["panel"] == "c"])
            print(f"cosine of the angle at the output against c > 2, beta < 0.5: slope {found:.2f}")
    for row in rows:
        if row["panel"] == "a" and row["layer"] in NODES:
            reference = REFERENCE[row["beta"]][NODES.index(row["layer"])]
            print(f"beta {row['beta']:<10} layer {row['layer']:<4} {row['angle']:.3f} rad, reference {reference:.3f}")
    save(args.out, "feature_speed_fig1" + ("" if args.panels == "abc" else f"_{args.panels}"), figure(rows), rows)


if __name__ == "__main__":
    main()
