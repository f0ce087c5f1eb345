"""What the figures share: real images, a table of values beside every picture, one look."""

from __future__ import annotations

import argparse
import csv
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from torch import Tensor

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

HERE = Path(__file__).parent
PLACES = (Path("data"), HERE.parents[2] / "shared" / "data")
"""Where cifar10_small.npz is looked for if --data does not say."""


def arguments(doc: str, **defaults: Any) -> argparse.Namespace:
    """``--quick``, ``--data``, ``--out`` and one option for each default, whose type it takes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller networks: under two minutes")
    parser.add_argument("--data", type=Path, help="folder with cifar10_small.npz; else scikit-learn's digits are taken")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for PNG and CSV (default: figures)")
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value}")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    return args


def images(data: Path | None) -> tuple[Tensor, Tensor, str]:
    """(n, pixels) images of mean 0 and variance 1 per pixel, labels 0 .. 9, and what they are.

    CIFAR-10 if ``cifar10_small.npz`` is at hand; else the digits that come with scikit-learn, made as large (32 x 32,
    three channels), so that networks are of the papers' shapes.
    """
    for folder in (data,) if data else PLACES:
        if (folder / "cifar10_small.npz").exists():
            arrays = np.load(folder / "cifar10_small.npz")
            pixels = torch.tensor(arrays["train_images"]).float().flatten(1)
            return standardized(pixels), torch.tensor(arrays["train_labels"]).long(), "CIFAR-10"
    if data:
        raise SystemExit(f"no cifar10_small.npz in {data}")
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    small = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8)
    large = torch.nn.functional.interpolate(small, size=(32, 32), mode="bilinear").expand(-1, 3, -1, -1)
    return standardized(large.flatten(1)), torch.tensor(labels), "scikit-learn's digits, enlarged"


def standardized(pixels: Tensor) -> Tensor:
    return (pixels - pixels.mean(0)) / pixels.std(0).clamp(min=1e-3 * float(pixels.std()))


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """On log-log axes, by least squares."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def save(out: Path, name: str, figure: Figure, rows: Sequence[dict[str, Any]]) -> None:
    """Write ``name.png`` and ``name.csv`` and say where they are."""
    figure.savefig(out / f"{name}.png", dpi=130, bbox_inches="tight")
    plt.close(figure)
    with (out / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {out / name}.png and .csv")
