"""Language models on characters."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu
from torch.optim import SGD, AdamW

from benchmarks.recipes.heldout.data import Corpus, Language, decayed, divided, wide
from benchmarks.recipes.optimizers import AdamWScheduleFree, averaged
from benchmarks.recipes.recipe import Recipe
from benchmarks.recipes.run import Run, warmup_cosine


def rotated(x: Tensor) -> Tensor:
    """Rotary positions for (batch, heads, time, channels)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * 10000 ** (-torch.arange(half) / half)
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Attention(nn.Module):
    """Self-attention with one matrix for query, key and value."""

    def __init__(self, width: int, heads: int, causal: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.proj = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        B, T, d = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        h = scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(h.transpose(1, 2).reshape(B, T, d))


class SplitAttention(nn.Module):
    """Attention to the input itself or to a memory, with a matrix each."""

    def __init__(self, width: int, heads: int, causal: bool = False, bias: bool = False, rotary: bool = False) -> None:
        super().__init__()
        self.heads, self.causal, self.rotary = heads, causal, rotary
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=bias) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        source = x if memory is None else memory
        q, k, v = (
            layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, h in ((self.q_proj, x), (self.k_proj, source), (self.v_proj, source))
        )
        if self.rotary:
            q, k = rotated(q), rotated(k)
        h = scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o_proj(h.transpose(1, 2).flatten(2))


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.attn = Attention(width, heads, causal=True, bias=bias)
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width, bias=bias), nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    """A pre-norm decoder with learned positions."""

    def __init__(self, vocab: int, d: int, depth: int, context: int, tied: bool, bias: bool) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(context, d)
        self.h = nn.ModuleList(GPTBlock(d, 4, bias) for _ in range(depth))
        self.ln_f = nn.LayerNorm(d, bias=bias)
        self.lm_head = nn.Linear(d, vocab, bias=False)
        for name, p in self.named_parameters():
            if name.endswith(("proj.weight",)):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * depth))
            elif p.ndim > 1:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.h:
            h = block(h)
        return self.lm_head(self.ln_f(h))


def gpt(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    corpus, steps = Corpus(16, 49, seed), 250
    model = GPT(corpus.vocab, wide(64, width), depth=3, context=48, tied=False, bias=True)
    task = Language(model, corpus)
    optimizer = AdamW(decayed(model, 0.1, ["wte*", "wpe*"]), lr=4e-3, betas=(0.9, 0.95))
    return Run(model, [optimizer], task, task.evaluate, steps, warmup_cosine(steps, 0.1, 0.1), clip=1.0)


def nano_gpt(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    corpus, steps = Corpus(24, 33, seed), 250
    model = GPT(corpus.vocab, wide(72, width), depth=2, context=32, tied=True, bias=False)
    task = Language(model, corpus)
    optimizer = AdamW(decayed(model, 0.1), lr=4e-3, betas=(0.9, 0.99))
    return Run(model, [optimizer], task, task.evaluate, steps, warmup_cosine(steps, 0.05, 0.1), clip=1.0)


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        hidden = wide(width * 8 / 3, 1.0)
        self.input_norm, self.post_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.self_attn = SplitAttention(width, heads, causal=True, rotary=True)
        self.gate_proj, self.up_proj = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_norm(x))
        h = self.post_norm(x)
        return x + self.down_proj(silu(self.gate_proj(h)) * self.up_proj(h))


class Llama(nn.Module):
    """Root-mean-square norms, rotary positions and gated units; the head is the embedding."""

    def __init__(self, vocab: int, d: int, depth: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(LlamaBlock(d, 4) for _ in range(depth))
        self.norm = nn.RMSNorm(d)
        self.lm_head = nn.Linear(d, vocab, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed_tokens(x)
        for layer in self.layers:
            h = layer(h)
        return self.lm_head(self.norm(h))


def llama(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    corpus, steps = Corpus(16, 41, seed), 220
    model = Llama(corpus.vocab, wide(64, width, 16), depth=3)
    task = Language(model, corpus)
    optimizer = AdamW(decayed(model, 0.1), lr=4e-3, betas=(0.9, 0.95), eps=1e-5)
    return Run(model, [optimizer], task, task.evaluate, steps, warmup_cosine(steps, 0.1, 0.1), clip=1.0)


class Experts(nn.Module):
    """The best two of four experts, with a loss that keeps their loads alike."""

    def __init__(self, width: int, count: int = 4, top: int = 2) -> None:
        super().__init__()
        self.top = top
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(count)
        )
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        shares = self.router(rows).softmax(-1)
        weights, chosen = shares.topk(self.top, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        loads = torch.stack([(chosen == i).float().sum() for i in range(len(self.experts))]) / chosen.numel()
        self.balance = len(self.experts) * (loads * shares.mean(0)).sum()
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            row, rank = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, row, expert(rows[row]) * weights[row, rank, None])
        return out.view_as(x)


class MixtureBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = SplitAttention(width, 4, causal=True, rotary=True)
        self.moe = Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.moe(self.norm2(x))


class Mixture(nn.Module):
    def __init__(self, vocab: int, d: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(MixtureBlock(d) for _ in range(depth))
        self.norm = nn.RMSNorm(d)
        self.unembed = nn.Linear(d, vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)

    @property
    def extra(self) -> Tensor:
        return 0.01 * sum(block.moe.balance for block in self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.unembed(self.norm(h))


def mixture(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    corpus, steps = Corpus(16, 33, seed), 200
    model = Mixture(corpus.vocab, wide(48, width, 16), depth=2)
    task = Language(model, corpus)
    optimizer = AdamW(decayed(model, 0.1, ["*router*", "embed*"]), lr=4e-3, betas=(0.9, 0.95))
    return Run(model, [optimizer], task, task.evaluate, steps, warmup_cosine(steps, 0.1, 0.1), clip=1.0)


class Dilated(nn.Module):
    """Causal gated convolutions with growing dilation."""

    def __init__(self, vocab: int, d: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.filters = nn.ModuleList(nn.Conv1d(d, 2 * d, 2, padding=2**i, dilation=2**i) for i in range(4))
        self.mixes = nn.ModuleList(nn.Conv1d(d, d, 1) for _ in range(4))
        self.decoder = nn.Linear(d, vocab)
        nn.init.normal_(self.embed.weight, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).transpose(1, 2)
        for filters, mix in zip(self.filters, self.mixes, strict=True):
            a, b = filters(h)[..., : x.shape[1]].chunk(2, 1)
            h = h + mix(a.tanh() * b.sigmoid())
        return self.decoder(h.relu().transpose(1, 2))


def dilated(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    corpus, steps = Corpus(24, 49, seed), 200
    model = Dilated(corpus.vocab, wide(64, width))
    task = Language(model, corpus)
    optimizer = AdamWScheduleFree(model.parameters(), lr=1e-2, weight_decay=0.01, warmup_steps=20)
    return Run(model, [optimizer], task, averaged(optimizer, task.evaluate), steps)


class Recurrent(nn.Module):
    """A long short-term memory that starts every window from zero."""

    def __init__(self, vocab: int, d: int) -> None:
        super().__init__()
        self.encoder = nn.Embedding(vocab, d)
        self.rnn = nn.LSTM(d, d, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.decoder = nn.Linear(d, vocab)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.drop(self.rnn(self.drop(self.encoder(x)))[0]))


def lstm(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    corpus, steps = Corpus(20, 36, seed), 220
    task = Language(Recurrent(corpus.vocab, wide(96, width)), corpus)
    optimizer = SGD(task.model.parameters(), lr=20.0)
    return Run(task.model, [optimizer], task, task.evaluate, steps, divided(steps, 4), clip=0.25)


RECIPES = (
    Recipe(
        "GPT, AdamW", gpt, "held out", "GPT-2: std 0.02, scaled residual projections, AdamW 0.9, 0.95, 0.1, clipping"
    ),
    Recipe("nanoGPT tied, AdamW", nano_gpt, "held out", "nanoGPT's Shakespeare: no biases, tied, AdamW 0.9, 0.99, 0.1"),
    Recipe("LLaMA tied, AdamW", llama, "held out", "LLaMA: AdamW 0.9, 0.95, eps 1e-5, 0.1, cosine to a tenth"),
    Recipe("mixture of experts, AdamW", mixture, "held out", "Mixtral: two of four experts, balance loss 0.01"),
    Recipe("dilated conv text, schedule-free", dilated, "held out", "schedule-free AdamW 2.5e-3, warm-up, no decay"),
    Recipe("LSTM, SGD", lstm, "held out", "PyTorch's word language model: SGD, clipping at 0.25, rate divided by 4"),
)
