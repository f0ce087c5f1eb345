"""Fig. 3 of A Spectral Condition for Feature Learning: why updates are of low rank.

Stable ranks of what layer 2 is given, H', and of the gradients of what it puts out, G; of the steps of Fig. 1.

    python examples/papers/spectral_fig3.py [--quick] [--data FOLDER] [--out figures]
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
from common import save
from matplotlib.figure import Figure
from spectral_gradients import ACTIVATIONS, WIDTH, Row, mean_by_batch, panel, rows_of

PANELS = {
    "input_stable_rank": ("inputs, forward", r"srank($H_1'$)"),
    "backward_stable_rank": ("gradients of outputs, backward", r"srank($G_2$)"),
}


def figure(rows: Sequence[Row]) -> Figure:
    drawn, both = plt.subplots(1, 2, figsize=(9.4, 3.6), sharey=True, layout="constrained")
    for axes, (key, (title, label)) in zip(both, PANELS.items(), strict=True):
        panel(axes, rows, key, title, label)
        axes.axhline(WIDTH, color="0.5", ls="--", lw=0.9)
        axes.annotate("width", (1.2, WIDTH), xytext=(0, -10), textcoords="offset points", fontsize=8, color="0.4")
        axes.set(yscale="log", ylim=(0.8, 450))
    drawn.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return drawn


def main() -> None:
    rows, out = rows_of(__doc__)
    for name in ACTIVATIONS:
        for key, (title, _) in PANELS.items():
            sizes, mean, _ = mean_by_batch(rows, key, name)
            highest = max(row[key] for row in rows if row["activation"] == name)
            far = highest < WIDTH / 10
            print(
                f"{name}, {title}: stable rank {mean[0]:.2f} .. {mean[-1]:.2f} at B = {sizes[0]} .. {sizes[-1]}, "
                f"at most {highest:.1f}; a tenth of the width or less: {'yes' if far else 'NO'}"
            )
    save(out, "spectral_fig3", figure(rows), rows)


if __name__ == "__main__":
    main()
