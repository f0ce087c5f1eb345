"""Fig. 6 of A Spectral Condition for Feature Learning: examples do not undo each other's updates (Assumption 3).

What an example's own part of a full-batch step does to its features in layer 2, to what the whole step does, before and
after training; the paper finds about 1/sqrt B.

    python examples/papers/spectral_fig6.py [--quick] [--runs figures/spectral_fig2.csv] [--out figures]
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
from common import save
from matplotlib.figure import Figure
from spectral_panels import COLORS, curve, level, slope_of, tell, width_axis
from spectral_training import IMAGES, PARAMETRIZATIONS, Row, rows_of

TIMES = {"start": "before training", "end": "after training"}
EXPECTED, WITHIN = IMAGES**-0.5, 0.15


def figure(rows: Sequence[Row]) -> Figure:
    drawn, both = plt.subplots(1, 2, figsize=(9.4, 3.6), sharey=True, layout="constrained")
    for axes, (when, title) in zip(both, TIMES.items(), strict=True):
        for name in PARAMETRIZATIONS:
            curve(axes, rows, f"sample_share_{when}", name, COLORS[name], parametrization=name)
        level(axes, EXPECTED, r"$1/\sqrt{B}$")
        axes.set(title=title, yscale="log", ylim=(0.01, 1))
        width_axis(axes, [row["width"] for row in rows])
    both[0].set_ylabel(r"$\|\frac{1}{B}\Delta W_2^{(i)}h_1'(x_i)\|\,/\,\|\Delta W_2h_1'(x_i)\|$")
    drawn.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return drawn


def main() -> None:
    rows, out = rows_of(__doc__)
    columns = [f"sample_share_{when}" for when in TIMES]
    for name in PARAMETRIZATIONS:
        for key in columns:
            some = [row[key] for row in rows if row["parametrization"] == name]
            what = f"{name} {key} (mean {sum(some) / len(some) / EXPECTED:.1f}/sqrt B)"
            tell(what, slope_of(rows, key, parametrization=name), 0.0, WITHIN)
    shown = ["parametrization", "width", "trial", *columns]
    save(out, "spectral_fig6", figure(rows), [{key: row[key] for key in shown} for row in rows])


if __name__ == "__main__":
    main()
