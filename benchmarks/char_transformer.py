"""A character transformer of about 10 million parameters, and text to train it on."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(B, T, d))
        return x + self.out(F.gelu(self.fc(self.norm2(x))))


class CharTransformer(pl.LightningModule):
    """Like nanoGPT, ``forward`` returns the loss."""

    def __init__(self, vocab: int = 65, width: int = 384, depth: int = 6, heads: int = 6, context: int = 128) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.tok(x) + self.pos(torch.arange(x.shape[1], device=x.device))
        logits = self.head(self.norm(self.blocks(h)))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self(*batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """All windows of ``context`` characters of a text, with the characters that follow."""

    def __init__(self, text: str, context: int = 128) -> None:
        letters = {c: i for i, c in enumerate(sorted(set(text)))}
        self.vocab = len(letters)
        self.codes = torch.tensor([letters[c] for c in text])
        self.context = context

    def __len__(self) -> int:
        return len(self.codes) - self.context - 1

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.codes[i : i + self.context], self.codes[i + 1 : i + self.context + 1]


def read_text(path: str | None) -> str:
    """A text file; without one, this project's licence."""
    return (Path(path) if path else Path(__file__).parents[1] / "LICENSE").read_text()


def loader(text: str, batch_size: int, context: int) -> tuple[DataLoader[tuple[Tensor, Tensor]], int]:
    """Shuffled windows and the number of different characters."""
    data = Windows(text, context)
    return DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=True), data.vocab
