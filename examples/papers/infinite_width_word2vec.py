"""Word2Vec at finite and infinite width (Section 9.1 of Feature Learning in Infinite-Width Neural Networks).

On a corpus with built-in analogies, which takes seconds, or on a text file of your own with ``--text``. There the
vocabulary is that of words with at least five occurrences, frequent words are subsampled at 1e-4, windows reach up to
8 words to either side and there are 25 negatives, as in the authors' scripts. At infinite width embeddings of V words
have 2 V entries: ``--vocabulary`` keeps the most frequent words.

    python examples/papers/infinite_width_word2vec.py [--quick] [--text FILE] [--questions FILE] [--out figures]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from analogies import Corpus, accuracy, questions, synthetic
from common import arguments, save
from jobs import rows_of
from matplotlib.figure import Figure
from torch import Tensor, nn
from word2vec_text import text_rows

from spectral_monitor.fitting.power_law import t_quantile
from spectral_monitor.limits import LinearNetwork, finite_width, infinite_width

LR, DECAY, EPOCHS, BATCH = 0.05, 0.001, 4, 50
NEGATIVES = 20
"""Expected number of negatives for each centre: the loss weighs each other word by NEGATIVES / (words - 1)."""

INFINITE = 0
"""Stands for the limit among widths."""

FULL = {"widths": (4, 8, 16, 32, 64, 128, 256, 512, INFINITE), "seeds": 5}
QUICK = {"widths": (4, 64, 256, INFINITE), "seeds": 2}

Row = dict[str, Any]


def start(words: int, width: int, seed: int) -> LinearNetwork:
    if width == INFINITE:
        return infinite_width(words, words)
    return finite_width(width, words, words, generator=torch.Generator().manual_seed(seed))


def trained(corpus: Corpus, width: int, seed: int, epochs: int = EPOCHS) -> LinearNetwork:
    """Continuous bag of words with the expected loss over negatives, gradients summed over a batch."""
    network = start(corpus.words, width, seed)
    for context, centre in corpus.batches(epochs, BATCH, seed):
        network = network.step(*step_input(network, corpus.words, context, centre), LR, decay=DECAY)
    return network


def step_input(network: LinearNetwork, words: int, context: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Means of one-hot contexts (B, words), and the loss's derivatives with respect to scores (B, words)."""
    x = nn.functional.one_hot(context, words).float().mean(1)
    s = network(x).sigmoid()
    right = nn.functional.one_hot(centre, words).float()
    return x, (s - 1) * right + s * (1 - right) * NEGATIVES / (words - 1)


def embeddings(network: LinearNetwork) -> Tensor:
    """(words, n) columns of U."""
    return network.U.T


def work(width: int, seed: int) -> Row:
    """Accuracy on analogies before and after training."""
    corpus, asked = synthetic(seed), questions()
    before = accuracy(embeddings(start(corpus.words, width, seed)), asked)
    return {"start": before, "accuracy": accuracy(embeddings(trained(corpus, width, seed)), asked)}


def sweep(path: Path, widths: Sequence[int], seeds: int) -> list[Row]:
    keys = [{"width": width, "seed": seed} for width in widths for seed in range(seeds)]
    return rows_of(path, keys, work, "networks")


def summary(rows: Sequence[Row], key: str = "accuracy") -> list[Row]:
    """Mean over seeds and Student's 95 % interval for each width, the limit and the NTK's last."""
    found = []
    groups = {f"{n}": [r[key] for r in rows if r["width"] == n] for n in _widths(rows) if n != INFINITE}
    groups["infinite"] = [r[key] for r in rows if r["width"] == INFINITE]
    if key == "accuracy":  # features of the NTK limit are those of the start, at a width without chance agreements
        words = synthetic().words
        groups["NTK"] = [1 / (words - 3)]
    for name, values in groups.items():
        half = np.std(values, ddof=1) / len(values) ** 0.5 * t_quantile(len(values) - 1) if len(values) > 1 else 0.0
        mean = float(np.mean(values))
        found.append({"width": name, "mean": mean, "low": mean - half, "high": mean + half, "seeds": len(values)})
    return found


def _widths(rows: Sequence[Row]) -> Iterator[int]:
    yield from sorted({row["width"] for row in rows})


def figure(table: Sequence[Row], ylabel: str = "accuracy on analogies") -> Figure:
    drawn, axis = plt.subplots(figsize=(5.4, 3.8), layout="constrained")
    finite = [row for row in table if row["width"].isdigit()]
    widths = [int(row["width"]) for row in finite]
    mean, low, high = ([row[key] for row in finite] for key in ("mean", "low", "high"))
    axis.plot(widths, mean, "o-", color="#4c72b0", ms=4, label="width n")
    axis.fill_between(widths, low, high, color="#4c72b0", alpha=0.2, lw=0)
    for name, colour in (("infinite", "0.3"), ("NTK", "#c44e52")):
        for row in table:
            if row["width"] == name:
                axis.axhline(row["mean"], ls="--", color=colour, lw=1.5, label=f"{name}: {row['mean']:.3g}")
    axis.set(xscale="log", xlabel="width n", ylabel=ylabel)
    axis.set_xticks(widths, [str(n) for n in widths])
    axis.minorticks_off()
    axis.legend(frameon=False)
    return drawn


def report(rows: Sequence[Row]) -> list[Row]:
    table = summary(rows)
    for row in table:
        print(f"width {row['width']:>8}: {row['mean']:.3f} [{row['low']:.3f}, {row['high']:.3f}]")
    (begin,) = [row["mean"] for row in summary(rows, "start") if row["width"] == "infinite"]
    print(f"start of the limit: {begin:.3f}")
    return table


def main() -> None:
    args = arguments(__doc__, text="", questions="", vocabulary=2000, epochs=1, seeds=1)
    if args.text:
        table = text_rows(args, INFINITE)
        save(args.out, "infinite_width_word2vec_text", figure(table, "mean reciprocal rank of answers"), table)
        return
    rows = sweep(args.out / "infinite_width_word2vec.jsonl", **(QUICK if args.quick else FULL))
    table = report(rows)
    save(args.out, "infinite_width_word2vec", figure(table), table)


if __name__ == "__main__":
    main()
