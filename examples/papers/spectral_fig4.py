"""Fig. 4 of A Spectral Condition for Feature Learning: training takes nothing away from what was there (Assumption 1).

``|W| / (|W_0| + |W - W_0|)`` of every matrix after training, and the same of features; 1 where nothing is lost.

    python examples/papers/spectral_fig4.py [--quick] [--runs figures/spectral_fig2.csv] [--out figures]
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
from common import save
from matplotlib.figure import Figure
from spectral_panels import COLORS, STYLES, curve, slope_of, tell, width_axis
from spectral_training import LAYERS, PARAMETRIZATIONS, Row, rows_of

PANELS = {
    "weight": ("weights", r"$\|W_\ell\|_*\,/\,(\|W_\ell^0\|_*+\|W_\ell-W_\ell^0\|_*)$"),
    "feature": ("features", r"$\|h_\ell\|\,/\,(\|h_\ell^0\|+\|h_\ell-h_\ell^0\|)$"),
}
HIDDEN = (1, 2)
"""Layers whose features the condition is about; the output starts near 0 under muP and is trained away from it."""

WITHIN = 0.08


def figure(rows: Sequence[Row]) -> Figure:
    drawn, both = plt.subplots(1, 2, figsize=(9.4, 3.6), layout="constrained")
    for axes, (what, (title, formula)) in zip(both, PANELS.items(), strict=True):
        for name in PARAMETRIZATIONS:
            for layer in LAYERS if what == "weight" else HIDDEN:
                label = f"{name}, layer {layer}"
                curve(axes, rows, f"{what}_{layer}", label, COLORS[name], STYLES[layer - 1], parametrization=name)
        axes.set(title=title, ylabel=formula, ylim=(0, 1.05))
        width_axis(axes, [row["width"] for row in rows])
    drawn.legend(
        *both[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=6,
        frameon=False,
        fontsize=9,
        handlelength=3,
    )
    return drawn


def main() -> None:
    rows, out = rows_of(__doc__)
    columns = [f"weight_{layer}" for layer in LAYERS] + [f"feature_{layer}" for layer in HIDDEN]
    for name in PARAMETRIZATIONS:
        for key in columns:
            least = min(row[key] for row in rows if row["parametrization"] == name)
            tell(f"{name} {key} (least {least:.2f})", slope_of(rows, key, parametrization=name), 0.0, WITHIN)
    shown = ["parametrization", "width", "trial", *columns]
    save(out, "spectral_fig4", figure(rows), [{key: row[key] for key in shown} for row in rows])


if __name__ == "__main__":
    main()
