"""Table 1 and Fig. 2 of Feature Learning in Infinite-Width Neural Networks, by classifying parametrizations.

The table is of a network of three hidden layers, mean field's of one. The picture on the left is the paper's
caricature, for one hidden layer: the two facets that are nontrivial, unfolded at the edge from muP to NTP. Above the
edge the readout is updated maximally and begins smaller, below it begins maximally and is updated less. On the right
the standard parametrization: learning rate lr n^-c, readout of size n^-b.

    python examples/papers/infinite_width_table1.py [--out figures]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import matplotlib.pyplot as plt
from common import arguments, save
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from spectral_monitor.scaling import ABC, abc, mean_field, mup, ntp, standard

HALF = Fraction(1, 2)
TABLE = {
    "SP, lr 1/n": standard(3),
    "NTP": ntp(3),
    "mean field": mean_field(),
    "muP": mup(3),
    "SP, lr 1": standard(3, c=0),
}
"""The paper's columns, and what people do."""

COLORS = {"feature learning": "#c44e52", "kernel": "#4c72b0", "trivial": "#c8c8c8", "unstable": "#f4f0e8"}


def table() -> list[dict[str, Any]]:
    """A row for each parametrization, with the paper's rows as columns."""
    return [
        {
            "parametrization": name,
            "a": " ".join(map(str, p.a)),
            "b": " ".join(map(str, p.b)),
            "c": str(p.c),
            "r": str(found.r),
            "2 a_(L+1) + c": str(2 * p.a[-1] + p.c),
            "a_(L+1) + b_(L+1) + r": str(p.a[-1] + p.b[-1] + found.r),
            "nontrivial": found.stable and not found.trivial,
            "stable": found.stable,
            "feature learning": found.regime == "feature learning",
            "kernel": found.regime == "kernel",
        }
        for name, p in TABLE.items()
        for found in [p.classify()]
    ]


def on_the_facets(r: Fraction, y: Fraction) -> ABC:
    """Of one hidden layer, features change by n^-r. ``y >= 0``: the readout is updated maximally and begins n^-y
    smaller than it might; ``y < 0``: it begins maximally and is updated n^y less.
    """
    begins, updated = 1 - r + max(y, 0), 1 + max(-y, 0)  # a_2 + b_2 and 2 a_2 + c, with c = 0
    a1 = (r - min(begins, updated)) / 2
    return abc((a1, updated / 2), (-a1, begins - updated / 2), 0)


def near_standard(c: Fraction, b: Fraction) -> ABC:
    """Standard parametrization of two hidden layers, but for the size of the readout."""
    return abc((0, 0, 0), (0, HALF, b), c)


def regimes(of: Callable[[Fraction, Fraction], ABC], xs: Sequence[Fraction], ys: Sequence[Fraction]) -> list[list[str]]:
    """A row for each y."""
    return [[of(x, y).classify().regime for x in xs] for y in ys]


def grid(low: int, high: int, parts: int = 32) -> list[Fraction]:
    """From half of ``low`` to half of ``high``."""
    return [Fraction(k, parts) for k in range(low * parts // 2, high * parts // 2 + 1)]


def plane(axes: Axes, of: Callable[[Fraction, Fraction], ABC], xs: Sequence[Fraction], ys: Sequence[Fraction]) -> None:
    """A cell for each parametrization in the colour of its regime."""
    names = list(COLORS)
    cells = [[names.index(regime) for regime in row] for row in regimes(of, xs, ys)]
    at = [[float(value) for value in values] for values in (xs, ys)]
    axes.pcolormesh(*at, cells, cmap=ListedColormap(list(COLORS.values())), vmin=-0.5, vmax=3.5, rasterized=True)


def mark(axes: Axes, x: float, y: float, name: str, offset: tuple[int, int]) -> None:
    axes.plot(x, y, "o", color="black", ms=6, zorder=3)
    axes.annotate(name, (x, y), xytext=offset, textcoords="offset points", fontweight="bold", fontsize=9)


def figure() -> Figure:
    drawn, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    plane(left, on_the_facets, grid(-1, 4), grid(-2, 3))
    left.plot([0, 0.5], [0, 0], color="black", lw=1.2)
    mark(left, 0, 0, "muP,\nmean field", (-64, -8))
    mark(left, 0.5, 0, "NTP", (8, -10))
    mark(left, 1.5, 1, "SP, lr 1/n", (4, -14))
    left.annotate("outputs begin too large", (1.2, -0.5), fontsize=8, ha="center")
    left.annotate("features\nblow up", (-0.27, 0.75), fontsize=8, ha="center")
    left.set(xlabel="r: features change by $n^{-r}$", title="nontrivial facets, one hidden layer")
    left.set_ylabel("readout: updated less  ←   →  begins smaller", fontsize=9)
    plane(right, near_standard, grid(0, 4), grid(0, 4))
    right.annotate("outputs blow up", (0.5, 1.25), fontsize=8, ha="center")
    mark(right, 1, 0.5, "SP, lr 1/n", (8, -3))
    mark(right, 0, 0.5, "SP, lr 1", (8, -3))
    mark(right, 0.5, 0.5, "SP, lr 1/√n", (8, -3))
    right.set(xlabel="c: learning rate $\\eta\\,n^{-c}$", ylabel="b: readout of size $n^{-b}$")
    right.set_title("around the standard parametrization, two hidden layers")
    handles = [Patch(color=color, label=name) for name, color in COLORS.items()]
    drawn.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return drawn


def main() -> None:
    args = arguments(__doc__)
    rows = table()
    for key in rows[0]:
        print(f"{key:<22}" + "".join(f"{_shown(row[key]):<18}" for row in rows))
    save(args.out, "infinite_width_table1", figure(), rows)


def _shown(value: Any) -> str:
    return {True: "yes", False: "-"}[value] if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    main()
