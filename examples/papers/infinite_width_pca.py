"""Figure 1 of Feature Learning in Infinite-Width Neural Networks: two principal components of word embeddings.

Embeddings of the NTK limit are those of the start, noise for ever. At width 64 and in the feature learning limit words
of one relation come together. The corpus is the synthetic one of infinite_width_word2vec.py.

    python examples/papers/infinite_width_pca.py [--quick] [--out figures]
"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import torch
from analogies import ENTITIES, RELATIONS, synthetic
from common import arguments, save
from infinite_width_word2vec import EPOCHS, INFINITE, embeddings, start, trained
from matplotlib.figure import Figure
from torch import Tensor

NTK_WIDTH = 4096
COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52")
Row = dict[str, Any]


def components(vectors: Tensor) -> Tensor:
    """(words, 2) coordinates on the two first principal components."""
    centred = vectors - vectors.mean(0)
    u, s, _ = torch.linalg.svd(centred, full_matrices=False)
    return u[:, :2] * s[:2]


def separation(points: Tensor) -> float:
    """Share of the variance of (words, 2) points that is between relations: 0 is none, 1 is all."""
    groups = points.view(RELATIONS, ENTITIES, -1)
    centres = groups.mean(1)
    return ((centres - centres.mean(0)).square().sum() * ENTITIES / (points - points.mean(0)).square().sum()).item()


def pictures(epochs: int = EPOCHS) -> dict[str, Tensor]:
    """Coordinates of the words that are an entity in a relation, for each network."""
    corpus, some = synthetic(), RELATIONS * ENTITIES
    networks = {
        "NTK limit (the start)": start(corpus.words, NTK_WIDTH, 0),
        "width 64": trained(corpus, 64, 0, epochs),
        "feature learning limit": trained(corpus, INFINITE, 0, epochs),
    }
    return {name: components(embeddings(network)[:some]) for name, network in networks.items()}


def table(found: dict[str, Tensor]) -> list[Row]:
    return [
        {"network": name, "relation": i // ENTITIES, "entity": i % ENTITIES, "first": x, "second": y}
        for name, points in found.items()
        for i, (x, y) in enumerate(points.tolist())
    ]


def figure(found: dict[str, Tensor]) -> Figure:
    drawn, axes = plt.subplots(1, len(found), figsize=(11, 3.6), layout="constrained")
    for axis, (name, points) in zip(axes, found.items(), strict=True):
        for relation, colour in enumerate(COLORS):
            some = points[relation * ENTITIES : (relation + 1) * ENTITIES]
            axis.scatter(*some.T.tolist(), s=22, color=colour, label=f"relation {relation + 1}")
        axis.set(title=f"{name}, {separation(points):.0%} between", xticks=[], yticks=[])
        axis.title.set_fontsize(10)
    axes[0].legend(frameon=False, fontsize=8)
    return drawn


def main() -> None:
    args = arguments(__doc__)
    found = pictures(2 if args.quick else EPOCHS)
    for name, points in found.items():
        print(f"{name}: {separation(points):.0%} of the variance of two components is between relations")
    save(args.out, "infinite_width_pca", figure(found), table(found))


if __name__ == "__main__":
    main()
