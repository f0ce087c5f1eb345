"""Fig. 1 of A Spectral Condition for Feature Learning: updates stay of low rank and aligned when batches are large.

Left the stable rank of layer 2's update, right its alignment with the inputs it was made of.

    python examples/papers/spectral_fig1.py [--quick] [--data FOLDER] [--out figures]
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
from common import save
from matplotlib.figure import Figure
from spectral_gradients import ACTIVATIONS, WIDTH, Row, mean_by_batch, panel, rows_of

HIGHEST = 10
"""What the paper says the stable rank stays below."""


def figure(rows: Sequence[Row]) -> Figure:
    drawn, (left, right) = plt.subplots(1, 2, figsize=(9.4, 3.6), layout="constrained")
    panel(left, rows, "update_stable_rank", "stable rank of the update", r"srank($\Delta W_2$)")
    left.axhline(WIDTH, color="0.5", ls="--", lw=0.9)
    left.annotate("full rank", (1.2, WIDTH), xytext=(0, -10), textcoords="offset points", fontsize=8, color="0.4")
    left.set(yscale="log", ylim=(0.8, 450))
    formula = r"$\|\Delta W_2 h_1'\|\,/\,\|\Delta W_2\|_*\|h_1'\|$"
    panel(right, rows, "update_alignment", "alignment of the update with inputs", formula)
    right.set(yscale="log", ylim=(0.03, 1.2))
    right.annotate("width", (WIDTH, 0.035), xytext=(4, 0), textcoords="offset points", fontsize=8, color="0.4")
    drawn.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return drawn


def main() -> None:
    rows, out = rows_of(__doc__)
    for name in ACTIVATIONS:
        sizes, ranks, _ = mean_by_batch(rows, "update_stable_rank", name)
        _, aligned, _ = mean_by_batch(rows, "update_alignment", name)
        worst = max(row["update_stable_rank"] for row in rows if row["activation"] == name)
        low = "yes" if worst < HIGHEST else "NO"
        print(
            f"{name}, B = {sizes[0]} .. {sizes[-1]}: stable rank at most {worst:.1f} (paper: below {HIGHEST}): {low};"
        )
        print(
            f"  means of it {ranks[0]:.2f} .. {ranks[-1]:.2f}, of the alignment {aligned[0]:.2f} .. {aligned[-1]:.2f}"
        )
    save(out, "spectral_fig1", figure(rows), rows)


if __name__ == "__main__":
    main()
