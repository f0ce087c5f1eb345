"""What is trained to see what the monitor costs: character transformers of many sizes, and the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.char_transformer import CharTransformer, loader, read_text


@dataclass(frozen=True)
class Size:
    """A transformer and its batch: ``batch`` sequences of ``context`` characters."""

    width: int = 384
    depth: int = 6
    heads: int = 6
    batch: int = 16
    context: int = 128
    vocab: int = 0

    @property
    def parameters(self) -> int:
        """All of them, without making any."""
        with torch.device("meta"):
            return sum(p.numel() for p in self.model(max(self.vocab, 65)).parameters())

    @property
    def bytes_needed(self) -> int:
        """Weights, gradients, Adam's two averages; two monitors' starts, and a step's copy and replay."""
        activations = 4 * self.batch * self.context * self.width * self.depth * 40
        return 4 * self.parameters * (4 + 2 + 3) + activations

    def model(self, vocab: int) -> CharTransformer:
        """The model, of at least so many different characters."""
        return CharTransformer(max(vocab, self.vocab), self.width, self.depth, self.heads, self.context)

    def start(self, text: str | None) -> tuple[pl.LightningModule, Any]:
        """A new model and its data, the same at every call."""
        pl.seed_everything(0, verbose=False)
        data, vocab = loader(read_text(text), self.batch, self.context)
        return self.model(vocab), data

    def describe(self) -> str:
        """For tables."""
        return f"{self.width} wide, {self.depth} deep, {self.batch} x {self.context}"


@dataclass(frozen=True)
class Compiled(Size):
    """The same with its forward compiled."""

    def start(self, text: str | None) -> tuple[pl.LightningModule, Any]:
        """A new model and its data, the same at every call."""
        module, data = super().start(text)
        module.compile()
        return module, data


HEADLINE = Size()
TOKENS = 8
"""Sequences in a batch where the model grows."""

SERIES: dict[str, list[Size]] = {
    "size": [
        Size(128, 5, 4, TOKENS),
        Size(256, 4, 4, TOKENS),
        Size(384, 6, 6, TOKENS),
        Size(512, 10, 8, TOKENS),
        Size(768, 12, 12, TOKENS),
        Size(1024, 24, 16, TOKENS),
    ],
    "depth": [Size(256, depth, 4, TOKENS) for depth in (2, 4, 8, 16)],
    "width": [Size(width, 4, 4, TOKENS) for width in (128, 256, 512, 1024)],
    "batch": [Size(256, 4, 4, batch) for batch in (2, 8, 32, 128)],
}
"""One thing that grows in each."""

QUICK: dict[str, list[Size]] = {
    "size": SERIES["size"][:3],
    "depth": SERIES["depth"][:2],
    "width": SERIES["width"][:3],
    "batch": SERIES["batch"][:3],
}

GPU = {
    "headline": Size(768, 12, 12, 8, 1024, vocab=50304),  # GPT-2 small, 124 M
    "size": [Size(768, 12, 12, 8, 1024, vocab=50304), Size(1024, 24, 16, 4, 1024, vocab=50304)],  # 124 M and 350 M
}
