"""The pictures of docs/cost.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from benchmarks.cost.cases import FULL, LIGHT, REPLAY, STANDARD, UNMEASURED
from benchmarks.cost.peers import PEERS

COLORS = {LIGHT: "#0072b2", REPLAY: "#009e73", STANDARD: "#d55e00", FULL: "#cc79a7"}
GREY = "#8a8a8a"
AXES = {"size": "parameters", "depth": "blocks", "width": "width", "batch": "sequences in a batch"}


def plain_name(name: str) -> str:
    """Without the marks of Markdown."""
    return name.replace("`", "")


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def _clean(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def intervals(results: Mapping[str, Any], path: Path) -> None:
    """Draw the share of training time against every_n_steps."""
    figure, axes = plt.subplots(figsize=(7, 3.6))
    steps = [2**k for k in range(10)]
    for name, color in COLORS.items():
        row = results["headline"]["rows"].get(name)
        if row is not None and row["mean"] > 1:
            axes.plot(steps, [100 * (row["mean"] - 1) / n for n in steps], color=color, label=plain_name(name))
    one = results.get("interval")
    if one is not None:
        share, low, high = (100 * (one[key] - 1) for key in ("ratio", "low", "high"))
        errors = [[share - low], [high - share]]
        axes.errorbar(
            [one["every"]], [share], yerr=errors, fmt="o", color="black", capsize=3, label="standard, whole intervals"
        )
    axes.axvline(100, color=GREY, linewidth=1, linestyle=":")
    axes.annotate("the default", (100, 1), (106, 0.97), xycoords=("data", "axes fraction"), color=GREY, va="top")
    axes.set(xscale="log", yscale="log", xlabel="every_n_steps", ylabel="longer training, %")
    axes.set_xticks([1, 2, 5, 10, 20, 50, 100, 200, 500], ["1", "2", "5", "10", "20", "50", "100", "200", "500"])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda x, _: f"{x:g}")
    _clean(axes)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    _save(figure, path)


def peers(results: Mapping[str, Any], path: Path) -> None:
    """Seconds that a step becomes longer by."""
    rows = {name: row for name, row in results["headline"]["rows"].items() if name != UNMEASURED}
    order = sorted(rows, key=lambda name: rows[name]["ratio"])
    figure, axes = plt.subplots(figsize=(7, 0.36 * len(order) + 0.9))
    for k, name in enumerate(order):
        ratio, low, high = (rows[name][key] for key in ("ratio", "low", "high"))
        axes.barh(k, ratio - 1, left=1, color=GREY if name in PEERS else COLORS.get(name, "#56b4e9"), height=0.6)
        axes.plot([low, high], [k, k], color="black", linewidth=1)
        axes.annotate(f" {ratio:.2f}", (max(high, ratio), k), va="center")
    axes.set_yticks(range(len(order)), [plain_name(name) for name in order])
    most = max(row["high"] for row in rows.values())
    axes.set(xscale="log", xlim=(0.9, 1.6 * most), xlabel="measured step / plain step")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.xaxis.set_minor_formatter(
        lambda x, _: f"{x:g}" if math.isclose(x, round(x)) and x in (2, 3, 5, 20, 50) else ""
    )
    _clean(axes)
    axes.grid(False, axis="y")
    _save(figure, path)


def growth(results: Mapping[str, Any], path: Path) -> None:
    """Ratios against size, depth, width and batch."""
    chosen = {name: points for name, points in results["series"].items() if len(points) > 1}
    figure, all_axes = plt.subplots(1, len(chosen), figsize=(3.1 * len(chosen), 2.9), sharey=True, squeeze=False)
    for axes, (name, points) in zip(all_axes[0], chosen.items(), strict=True):
        measured_points = [point for point in points if "rows" in point]
        sizes = [point["parameters"] if name == "size" else point["size"][name] for point in measured_points]
        for kind in (LIGHT, STANDARD):
            rows = [point["rows"][kind] for point in measured_points]
            axes.plot(sizes, [row["ratio"] for row in rows], "o-", color=COLORS[kind], label=plain_name(kind), ms=4)
            low, high = ([row[key] for row in rows] for key in ("low", "high"))
            axes.fill_between(sizes, low, high, color=COLORS[kind], alpha=0.15, linewidth=0)
        axes.axhline(1, color=GREY, linewidth=1)
        axes.set(xscale="log", xlabel=AXES[name])
        axes.minorticks_off()
        axes.set_xticks(sizes, [f"{x / 1e6:.2g} M" if name == "size" else str(x) for x in sizes])
        _clean(axes)
    all_axes[0][0].set_ylabel("measured / plain step")
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.legend(*all_axes[0][0].get_legend_handles_labels(), frameon=False, loc="upper center", ncols=2)
    _save(figure, path)


def draw(results: Mapping[str, Any], folder: Path) -> None:
    """All pictures."""
    intervals(results, folder / "interval.png")
    peers(results, folder / "peers.png")
    growth(results, folder / "growth.png")
