"""Fig. 5 of A Spectral Condition for Feature Learning: activations are not small (Assumption 2).

``|phi(h)| / |h|`` of both hidden layers before and after training; 1/sqrt 2 is what ReLU leaves of centred features.

    python examples/papers/spectral_fig5.py [--quick] [--runs figures/spectral_fig2.csv] [--out figures]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib.pyplot as plt
from common import save
from matplotlib.figure import Figure
from spectral_panels import COLORS, STYLES, curve, level, slope_of, tell, width_axis
from spectral_training import PARAMETRIZATIONS, Row, rows_of

TIMES = {"start": "before training", "end": "after training"}
COLUMNS = [f"activation_{layer}_{when}" for when in TIMES for layer in (1, 2)]
EXPECTED, WITHIN = math.sqrt(0.5), 0.08


def figure(rows: Sequence[Row]) -> Figure:
    drawn, both = plt.subplots(1, 2, figsize=(9.4, 3.6), sharey=True, layout="constrained")
    for axes, (when, title) in zip(both, TIMES.items(), strict=True):
        for name in PARAMETRIZATIONS:
            for layer in (1, 2):
                key, label = f"activation_{layer}_{when}", f"{name}, layer {layer}"
                curve(axes, rows, key, label, COLORS[name], STYLES[layer - 1], parametrization=name)
        level(axes, EXPECTED, r"$1/\sqrt{2}$")
        axes.set(title=title, ylim=(0, 1.05))
        width_axis(axes, [row["width"] for row in rows])
    both[0].set_ylabel(r"$\|h_\ell'\|\,/\,\|h_\ell\|$")
    drawn.legend(
        *both[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, handlelength=3
    )
    return drawn


def main() -> None:
    rows, out = rows_of(__doc__)
    for name in PARAMETRIZATIONS:
        for key in COLUMNS:
            some = [row[key] for row in rows if row["parametrization"] == name]
            what = f"{name} {key} (mean {sum(some) / len(some):.2f})"
            tell(what, slope_of(rows, key, parametrization=name), 0.0, WITHIN)
    shown = ["parametrization", "width", "trial", *COLUMNS]
    save(out, "spectral_fig5", figure(rows), [{key: row[key] for key in shown} for row in rows])


if __name__ == "__main__":
    main()
