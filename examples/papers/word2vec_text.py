"""Word2Vec on a text file: vocabulary, subsampling, windows and negatives as in the authors' scripts."""

from __future__ import annotations

import re
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from analogies import accuracy, ranks
from jobs import progress, rows_of
from torch import Tensor

LEAST, SUBSAMPLED, WINDOW, NEGATIVES = 5, 1e-4, 8, 25
LR, DECAY = 0.05, 0.001
CHUNK = 256
"""Samples whose gradients are summed: one at a time, as in the authors' scripts, would be the same to first order."""

AMONG = 500
LARGEST = 4 << 30
"""Bytes of weights above which a width is refused."""


class Text:
    """A text as words of a vocabulary, the most frequent first.

    Raises:
        SystemExit: there is no such file, or it has fewer than three words that occur often enough.
    """

    def __init__(self, path: str, most: int) -> None:
        if not Path(path).is_file():
            raise SystemExit(f"no text at {path!r}: give --text the path of a text file, such as text8")
        found = re.findall(r"[a-z']+", Path(path).read_text(errors="replace").lower())
        counts = [(word, count) for word, count in Counter(found).most_common(most) if count >= LEAST]
        if len(counts) < 4:
            raise SystemExit(f"{path!r} has {len(counts)} words that occur {LEAST} times: 4 are needed")
        self.words = [word for word, _ in counts]
        self.place = {word: i for i, word in enumerate(self.words)}
        self.tokens = torch.tensor([self.place[word] for word in found if word in self.place])
        frequency = torch.tensor([count for _, count in counts]) / len(self.tokens)
        self.kept = (SUBSAMPLED / frequency).sqrt().clamp(max=1)

    def samples(self, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Contexts (B, 2 WINDOW), which of them are there, and centres (B,): one epoch, in the text's order."""
        generator = torch.Generator().manual_seed(seed)
        tokens = self.tokens[torch.rand(len(self.tokens), generator=generator) < self.kept[self.tokens]]
        offsets = torch.cat([torch.arange(-WINDOW, 0), torch.arange(1, WINDOW + 1)])
        for centres in torch.arange(len(tokens)).split(CHUNK):
            reach = torch.randint(1, WINDOW + 1, (len(centres), 1), generator=generator)
            places = centres[:, None] + offsets
            there = (offsets.abs() <= reach) & (places >= 0) & (places < len(tokens))
            some = there.any(1)
            yield tokens[places.clamp(0, len(tokens) - 1)][some], there[some], tokens[centres[some]]


def step(U: Tensor, V: Tensor, context: Tensor, there: Tensor, centre: Tensor, generator: torch.Generator) -> None:
    """A step of continuous bag of words, in place: U and V are (words, n), embeddings and their counterparts."""
    weight = there / there.sum(1, keepdim=True)  # (B, C)
    hidden = (U[context] * weight[..., None]).sum(1)  # (B, n)
    other = torch.randint(len(U) - 1, (len(centre), NEGATIVES), generator=generator)
    other += other >= centre[:, None]  # uniform over the other words
    target = torch.cat([centre[:, None], other], 1)  # (B, 1 + NEGATIVES)
    g = -torch.einsum("bn,btn->bt", hidden, V[target]).sigmoid()
    g[:, 0] += 1
    back = torch.einsum("bt,btn->bn", g, V[target])
    U.mul_(1 - LR * DECAY)
    V_old = g[..., None] * hidden[:, None]
    V.mul_(1 - LR * DECAY)
    U.index_add_(0, context.flatten(), (LR * weight[..., None] * back[:, None]).flatten(0, 1))
    V.index_add_(0, target.flatten(), LR * V_old.flatten(0, 1))


def start(words: int, width: int, seed: int, infinite: int) -> tuple[Tensor, Tensor]:
    n = 2 * words if width == infinite else width
    if 8 * words * n > LARGEST:
        raise SystemExit(
            f"width {'infinite' if width == infinite else width} of {words} words takes {8 * words * n / 2**30:.0f} GB:"
            " keep fewer with --vocabulary"
        )
    if width == infinite:
        both = torch.eye(2 * words)
        return both[:words].clone(), both[words:].clone()
    generator = torch.Generator().manual_seed(seed)
    U, V = (torch.randn(words, n, generator=generator) / n**0.5 for _ in range(2))
    return U, V


def asked_of(text: Text, path: str) -> Tensor:
    """(count, 4) questions of a file in the format of questions-words.txt, those whose words are known.

    Raises:
        SystemExit: there is no such file, or none of its questions is of known words.
    """
    if not Path(path).is_file():
        raise SystemExit(f"no questions at {path!r}: give --questions a file of four words a line")
    lines = (line.lower().split() for line in Path(path).read_text().splitlines() if not line.startswith(":"))
    found = [[text.place[w] for w in line] for line in lines if len(line) == 4 and all(w in text.place for w in line)]
    if not found:
        raise SystemExit(f"none of the questions in {path!r} is of words that the text has often enough")
    return torch.tensor(found)


def text_rows(args: Namespace, infinite: int) -> list[dict[str, Any]]:
    """Accuracy and mean reciprocal rank among the 500 most frequent words (or the answer's, if it is rarer)."""
    text = Text(args.text, args.vocabulary)
    asked = asked_of(text, args.questions) if args.questions else None
    if asked is None:
        raise SystemExit("--text needs --questions: a file of analogies, four words a line")
    print(f"{len(text.tokens)} words, vocabulary {len(text.words)}, {len(asked)} questions")
    among = max(AMONG, int(asked.max()) + 1)

    def work(width: int, seed: int, text_words: int, epochs: int) -> dict[str, Any]:
        U, V = start(text_words, width, seed, infinite)
        generator = torch.Generator().manual_seed(seed)
        for epoch in range(epochs):
            for sample in progress(text.samples(epochs * seed + epoch), f"width {width or 'infinite'}, epoch {epoch}"):
                step(U, V, *sample, generator)
        U = torch.nn.functional.normalize(U)  # the authors compare directions
        reciprocal = (1 / ranks(U, asked, among).double()).mean().item()
        return {"accuracy": accuracy(U, asked), "reciprocal_rank": reciprocal}

    widths = (64, infinite) if args.quick else (16, 64, 256, infinite)
    keys = [
        {"width": width, "seed": seed, "text_words": len(text.words), "epochs": args.epochs}
        for width in widths
        for seed in range(args.seeds)
    ]
    rows = rows_of(args.out / "infinite_width_word2vec_text.jsonl", keys, work, "networks")
    found = []
    for width in widths:
        values = [r["reciprocal_rank"] for r in rows if r["width"] == width]
        exact = [r["accuracy"] for r in rows if r["width"] == width]
        mean = sum(values) / len(values)
        name = "infinite" if width == infinite else str(width)
        found.append({"width": name, "mean": mean, "low": min(values), "high": max(values), "seeds": len(values)})
        print(f"width {name}: reciprocal rank {mean:.4f}, exact answers {sum(exact) / len(exact):.4f}")
    return found
