"""Fig. 2 of A Spectral Condition for Feature Learning: what training changes, by width, under muP and NTP.

(A) features of layer 2, (B) its weights in spectral norm, (C) alignment of the readout after training, (D) weights of
layer 2 in Frobenius norm. The table that is written is of all trainings: with it, ``--runs figures/spectral_fig2.csv``,
Fig. 4, 5 and 6 need no training of their own.

    python examples/papers/spectral_fig2.py [--quick] [--data FOLDER] [--out figures]
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from common import save
from matplotlib.figure import Figure
from spectral_panels import COLORS, by_trial, curve, slope_of, tell, triangle, width_axis
from spectral_training import PARAMETRIZATIONS, Row, rows_of

PANELS = {
    "feature_drift": ("A", "features", r"$\|h_2-h_2^0\|\,/\,\|h_2^0\|$"),
    "drift_ratio": ("B", "weights, spectral norm", r"$\|W_2-W_2^0\|_*\,/\,\|W_2^0\|_*$"),
    "final_layer_alignment": ("C", "alignment of the readout", r"$\|W_3h_2'\|\,/\,\|W_3\|_*\|h_2'\|$"),
    "drift_fro_ratio": ("D", "weights, Frobenius norm", r"$\|W_2-W_2^0\|_F\,/\,\|W_2^0\|_F$"),
}
EXPECTED = {
    **{("muP", key): (0.0, 0.08) for key in ("feature_drift", "drift_ratio", "final_layer_alignment")},
    **{("NTP", key): (-0.5, 0.12) for key in ("feature_drift", "drift_ratio", "final_layer_alignment")},
    ("muP", "drift_fro_ratio"): (-0.5, 0.08),
    ("NTP", "drift_fro_ratio"): (-1.0, 0.1),
}
"""Parametrization and quantity -> the slope that the paper predicts, and how near this one is to come."""

SLANTS = {-0.5: "-1/2", -1.0: "-1"}


def figure(rows: Sequence[Row]) -> Figure:
    drawn, every = plt.subplots(1, 4, figsize=(15, 3.5), layout="constrained")
    for axes, (key, (letter, title, formula)) in zip(every, PANELS.items(), strict=True):
        for name in PARAMETRIZATIONS:
            fit = slope_of(rows, key, parametrization=name)
            curve(axes, rows, key, f"{name}, slope {fit.slope:.2f}", COLORS[name], parametrization=name)
            if slant := SLANTS.get(EXPECTED[name, key][0]):
                widths, values = by_trial(rows, key, parametrization=name)
                triangle(axes, widths[-3], 0.75 * np.nanmean(values, 0)[-3], slant)
        axes.set(yscale="log", title=f"({letter}) {title}", ylabel=formula)
        width_axis(axes, [row["width"] for row in rows])
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False, fontsize=9)
    return drawn


def main() -> None:
    rows, out = rows_of(__doc__)
    for (name, key), (expected, within) in EXPECTED.items():
        tell(f"({PANELS[key][0]}) {name} {key}", slope_of(rows, key, parametrization=name), expected, within)
    save(out, "spectral_fig2", figure(rows), rows)


if __name__ == "__main__":
    main()
