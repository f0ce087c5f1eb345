"""Development recipes that predict the next character: transformers of several families and an LSTM."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.optim import SGD, AdamW, Muon

from benchmarks.char_transformer import Block
from benchmarks.recipes.development.common import characters, decayed, language, wide
from benchmarks.recipes.optimizers import Lion
from benchmarks.recipes.run import Run, warmup_cosine

CONTEXT = 64


class GPT(nn.Module):
    """Pre-norm blocks; with a tied head and GPT-2's initialization, or with PyTorch's own and a head of its own."""

    def __init__(self, vocab: int, width: int, depth: int = 4, *, tied: bool = False) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, width // 16) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tok.weight
            self.initialize(depth)

    def initialize(self, depth: int) -> None:
        for name, p in self.named_parameters():
            if p.ndim > 1:
                nn.init.normal_(
                    p, std=0.02 / math.sqrt(2 * depth) if name.endswith(("proj.weight", "out.weight")) else 0.02
                )
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tok(x) + self.pos(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(h)))


def rotated(x: Tensor) -> Tensor:
    """Rotate queries or keys by their positions."""
    T, d = x.shape[-2:]
    angles = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)
    a, b = x.chunk(2, dim=-1)
    sin, cos = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class LlamaBlock(nn.Module):
    """RMSNorm, rotary attention with grouped queries, SwiGLU."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size = width // heads
        shared = groups * self.size
        self.input_layernorm = nn.RMSNorm(width)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, shared, bias=False)
        self.v_proj = nn.Linear(width, shared, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(width)
        self.gate_proj = nn.Linear(width, 8 * width // 3, bias=False)
        self.up_proj = nn.Linear(width, 8 * width // 3, bias=False)
        self.down_proj = nn.Linear(8 * width // 3, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.input_layernorm(x)
        q, k, v = (
            layer(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(attended.transpose(1, 2).flatten(2))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(silu(self.gate_proj(h)) * self.up_proj(h))


class Llama(nn.Module):
    def __init__(self, vocab: int, width: int, depth: int = 4) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, width)
        self.layers = nn.Sequential(*(LlamaBlock(width, width // 16, width // 32) for _ in range(depth)))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(self.layers(self.embed_tokens(x))))


class LSTMModel(nn.Module):
    """PyTorch's word language model, on characters."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.encoder = nn.Embedding(vocab, width)
        self.rnn = nn.LSTM(width, width, 2, dropout=0.2, batch_first=True)
        self.decoder = nn.Linear(width, vocab)
        self.drop = nn.Dropout(0.2)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.drop(self.rnn(self.drop(self.encoder(x)))[0]))


def gpt2(seed: int, width: float = 1.0, depth: int = 4) -> Run:
    torch.manual_seed(seed)
    model = GPT(characters()[1], wide(64, width, 16), depth, tied=True)
    optimizer = AdamW(decayed(model.parameters(), 0.1), lr=4e-3, betas=(0.9, 0.95))
    return language(model, optimizer, seed, 200, clip=1.0, schedule=warmup_cosine(200, floor=0.1))


def gpt_untied(seed: int, width: float = 1.0, depth: int = 3) -> Run:
    torch.manual_seed(seed)
    model = GPT(characters()[1], wide(64, width, 16), depth)
    optimizer = AdamW(model.parameters(), lr=8e-3, weight_decay=0.01)
    return language(model, optimizer, seed, 200, schedule=warmup_cosine(200))


def llama(seed: int, width: float = 1.0) -> Run:
    torch.manual_seed(seed)
    model = Llama(characters()[1], wide(64, width, 32), depth=3)
    optimizer = AdamW(decayed(model.parameters(), 0.1), lr=4e-3, betas=(0.9, 0.95), eps=1e-8)
    return language(model, optimizer, seed, 200, clip=1.0, schedule=warmup_cosine(200, floor=0.1))


def lstm(seed: int, width: float = 1.0) -> Run:
    torch.manual_seed(seed)
    model = LSTMModel(characters()[1], wide(96, width))
    return language(model, SGD(model.parameters(), lr=20.0), seed, 200, context=35, batch=20, clip=0.25)


def gpt_muon(seed: int, width: float = 1.0) -> Run:
    torch.manual_seed(seed)
    model = GPT(characters()[1], wide(64, width, 16), depth=3)
    hidden = [p for p in model.blocks.parameters() if p.ndim == 2]
    chosen = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = [
        Muon(hidden, lr=0.04, momentum=0.95, weight_decay=0.01),
        AdamW(rest, lr=8e-3, betas=(0.9, 0.95), weight_decay=0.01),
    ]
    return language(model, optimizers, seed, 200, schedule=warmup_cosine(200, warmup=0.05))


def gpt_lion(seed: int, width: float = 1.0) -> Run:
    torch.manual_seed(seed)
    model = GPT(characters()[1], wide(64, width, 16), depth=3)
    optimizer = Lion(decayed(model.parameters(), 1.0), lr=2e-3, betas=(0.95, 0.98))
    return language(model, optimizer, seed, 200, clip=1.0, schedule=warmup_cosine(200))
