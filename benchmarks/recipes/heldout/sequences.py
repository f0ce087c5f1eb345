"""Encoders, recurrent networks and one-dimensional convolutions on sequences."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu
from torch.optim import Adafactor, Adam

from benchmarks.recipes.heldout.data import Corpus, Supervised, seeded, still, wide
from benchmarks.recipes.heldout.text import SplitAttention
from benchmarks.recipes.recipe import Recipe
from benchmarks.recipes.run import Run, Schedule, cosine


class PostNormLayer(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.self_attn = SplitAttention(width, 4, bias=True)
        self.linear1, self.linear2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.self_attn(x)))
        return self.norm2(x + self.dropout(self.linear2(self.linear1(x).relu())))


class Denoiser(nn.Module):
    """An encoder with sinusoidal positions that says what every character was."""

    def __init__(self, vocab: int, d: int, depth: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.scale = math.sqrt(d)
        self.embedding = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(PostNormLayer(d, dropout) for _ in range(depth))
        self.dropout = nn.Dropout(dropout)
        self.generator = nn.Linear(d, vocab)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.xavier_uniform_(p)
        nn.init.normal_(self.embedding.weight, std=1 / self.scale)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x) * self.scale
        frequencies = 10000 ** (-torch.arange(0, h.shape[-1], 2) / h.shape[-1])
        angles = torch.arange(x.shape[1])[:, None] * frequencies
        h = self.dropout(h + torch.cat((angles.sin(), angles.cos()), -1))
        for layer in self.layers:
            h = layer(h)
        return self.generator(h)


class Denoising:
    """A fifth of the characters are replaced; all are to be restored."""

    def __init__(self, model: nn.Module, corpus: Corpus) -> None:
        self.model, self.corpus = model, corpus
        self.fixed = corpus.held()
        self.spoilt = self.noisy(self.fixed, seeded(0))

    def noisy(self, x: Tensor, generator: torch.Generator) -> Tensor:
        others = torch.randint(self.corpus.vocab, x.shape, generator=generator)
        return torch.where(torch.rand(x.shape, generator=generator) < 0.2, others, x)

    def __call__(self) -> Tensor:
        x = self.corpus.batch()
        logits = self.model(self.noisy(x, self.corpus.generator))
        return cross_entropy(logits.flatten(0, 1), x.flatten(), label_smoothing=0.1)

    def evaluate(self) -> float:
        with still(self.model):
            return cross_entropy(self.model(self.spoilt).flatten(0, 1), self.fixed.flatten()).item()


def inverse_root(warmup: int) -> Schedule:
    return lambda t: min((t + 1) / warmup, math.sqrt(warmup / (t + 1)))


def denoiser(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    corpus, steps = Corpus(16, 32, seed), 250
    task = Denoising(Denoiser(corpus.vocab, wide(64, width)), corpus)
    optimizer = Adam(task.model.parameters(), lr=2e-3, betas=(0.9, 0.98), eps=1e-9)
    return Run(task.model, [optimizer], task, task.evaluate, steps, inverse_root(50))


class GatedLayer(nn.Module):
    """T5's layer, with cross-attention where there is a memory."""

    def __init__(self, width: int, decoder: bool) -> None:
        super().__init__()
        self.attention = SplitAttention(width, 4, causal=decoder, rotary=True)
        self.cross = SplitAttention(width, 4) if decoder else None
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3 if decoder else 2))
        self.wi_0, self.wi_1 = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.wo = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        if self.cross is not None:
            x = x + self.cross(self.norms[2](x), memory)
        h = self.norms[1](x)
        return x + self.wo(gelu(self.wi_0(h)) * self.wi_1(h))


class EncoderDecoder(nn.Module):
    def __init__(self, vocab: int, d: int, depth: int = 2) -> None:
        super().__init__()
        self.shared = nn.Embedding(vocab, d)
        self.encoder = nn.ModuleList(GatedLayer(d, False) for _ in range(depth))
        self.decoder = nn.ModuleList(GatedLayer(d, True) for _ in range(depth))
        self.norm_e, self.norm_d = nn.RMSNorm(d), nn.RMSNorm(d)
        self.lm_head = nn.Linear(d, vocab, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, h = self.shared(source), self.shared(target)
        for layer in self.encoder:
            memory = layer(memory)
        memory = self.norm_e(memory)
        for layer in self.decoder:
            h = layer(h, memory)
        return self.lm_head(self.norm_d(h))


class Continuation:
    """The second half of a window, given the first."""

    def __init__(self, model: nn.Module, corpus: Corpus) -> None:
        self.model, self.corpus = model, corpus
        self.fixed = corpus.held()

    def of(self, x: Tensor) -> Tensor:
        half = x.shape[1] // 2
        logits = self.model(x[:, :half], x[:, half - 1 : -1])
        return cross_entropy(logits.flatten(0, 1), x[:, half:].flatten())

    def __call__(self) -> Tensor:
        return self.of(self.corpus.batch())

    def evaluate(self) -> float:
        with still(self.model):
            return self.of(self.fixed).item()


def encoder_decoder(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    corpus, steps = Corpus(24, 40, seed), 200
    task = Continuation(EncoderDecoder(corpus.vocab, wide(48, width, 16)), corpus)
    optimizer = Adafactor(task.model.parameters(), lr=0.04)
    return Run(task.model, [optimizer], task, task.evaluate, steps, inverse_root(20))


class SequenceClassifier(nn.Module):
    """A gated recurrent unit, both ways, over embedded characters."""

    def __init__(self, vocab: int, d: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, 32)
        self.gru = nn.GRU(32, d, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(2 * d, 2)
        for name, p in self.gru.named_parameters():
            if "weight_hh" in name:
                for gate in p.data.chunk(3):
                    nn.init.orthogonal_(gate)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.dropout(self.gru(self.embedding(x))[0].mean(1)))


@cache
def reversed_text(length: int) -> tuple[Tensor, Tensor]:
    """Windows of the text as written (0) or backwards (1)."""
    corpus = Corpus(4512, length, 0)
    x, y = corpus.batch(), torch.arange(4512) % 2
    return torch.where(y[:, None] == 1, x.flip(1), x), y


def gru(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    vocab, steps = Corpus(1, 12, 0).vocab, 250
    model = SequenceClassifier(vocab, wide(48, width))
    task = Supervised(model, reversed_text(12), 48, seed)
    optimizer = Adam(model.parameters(), lr=4e-3)
    return Run(model, [optimizer], task, task.evaluate, steps, clip=1.0)


@cache
def keywords(count: int = 4000, length: int = 96, bands: int = 20, classes: int = 8) -> tuple[Tensor, Tensor]:
    """Band energies of two gliding tones at random onsets in noise; the pair of glides is the word."""
    generator = seeded(7)
    y = torch.randint(classes, (count,), generator=generator)
    time, band = torch.arange(length), torch.arange(bands)
    begin = torch.rand(classes, 2, generator=generator) * bands
    glide = (torch.rand(classes, 2, generator=generator) - 0.5) * 0.6
    onset = torch.randint(length // 2, (count, 1, 1), generator=generator)
    local = (time[None, :, None] - onset).float()
    pitch = begin[y][:, None] + glide[y][:, None] * local + torch.randn(count, 1, 2, generator=generator)
    loud = torch.exp(-(((local - 16) / 12) ** 2))
    energy = (loud[..., None] * torch.exp(-((pitch[..., None] - band) ** 2) / 2)).sum(2)
    x = (energy + 0.6 * torch.randn(energy.shape, generator=generator)).transpose(1, 2)
    return (x - x.mean()) / x.std(), y


class Separable(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(width, width, 7, padding=3, groups=width, bias=False)
        self.pointwise = nn.Conv1d(width, width, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm1d(width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.pointwise(self.bn1(self.depthwise(x)).relu())).relu()


class KeywordNet(nn.Module):
    """A stem and depthwise separable convolutions over time."""

    def __init__(self, width: float) -> None:
        super().__init__()
        d = wide(64, width)
        self.stem = nn.Sequential(nn.Conv1d(20, d, 9, 2, 4, bias=False), nn.BatchNorm1d(d), nn.ReLU())
        self.blocks = nn.Sequential(*(Separable(d) for _ in range(4)))
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(d, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.dropout(self.blocks(self.stem(x)).mean(2)))


def keyword_spotting(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    model, steps = KeywordNet(width), 200
    task = Supervised(model, keywords(), 64, seed)
    optimizer = Adam(model.parameters(), lr=8e-3, weight_decay=1e-5)
    return Run(model, [optimizer], task, task.evaluate, steps, cosine(steps))


RECIPES = (
    Recipe("post-norm encoder, Adam", denoiser, "held out", "Attention is all you need: 0.9, 0.98, 1e-9, inverse root"),
    Recipe("encoder-decoder, Adafactor", encoder_decoder, "held out", "T5: Adafactor, no decay, inverse root"),
    Recipe("GRU, Adam", gru, "held out", "Keras-like: Adam, clipping at 1, orthogonal recurrent weights"),
    Recipe(
        "keyword spotting, Adam", keyword_spotting, "held out", "DS-CNN for speech commands: Adam, 1e-5, dropout 0.2"
    ),
)
