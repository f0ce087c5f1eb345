"""Networks that nobody would design: random pieces in a random order, of which every seed makes one."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor, nn
from torch.nn import functional

ACTIVATIONS = (torch.relu, torch.tanh, functional.gelu, functional.silu)
WIDTHS = (2, 3, 5, 8, 76)  # the last one is too wide for norms from a Gram matrix
SAMPLES, CLASSES, TOKENS, LENGTH = 5, 4, 11, 6


class Activated(nn.Module):
    def __init__(self, layer: nn.Module, draw: random.Random) -> None:
        super().__init__()
        self.layer, self.activation = layer, draw.choice(ACTIVATIONS)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.layer(x))


class Residual(nn.Module):
    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Branches(nn.Module):
    """Two ways from the same inputs, put side by side along dimension ``dim``."""

    def __init__(self, one: nn.Module, other: nn.Module, dim: int) -> None:
        super().__init__()
        self.one, self.other, self.dim = one, other, dim

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.other(x)], self.dim)


class Repeated(nn.Module):
    """The same layer again and again."""

    def __init__(self, layer: nn.Module, times: int) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


class Attention(nn.Module):
    """Over the last dimension but one, with queries, keys and values in one matrix or in three."""

    def __init__(self, width: int, fused: bool) -> None:
        super().__init__()
        self.heads = 2 if width % 2 == 0 else 1
        if fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1) if hasattr(self, "qkv") else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for part in parts)
        mixed = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
        return self.proj(mixed.transpose(-3, -2).flatten(-2))


class Network(nn.Module):
    """A random network; ``str()`` shows it.

    Args:
        seed: of everything that is drawn: pieces, weights.
        kind: ``"rows"``, ``"images"`` or ``"tokens"``.
    """

    def __init__(self, seed: int, kind: str) -> None:
        super().__init__()
        self.draw, self.kind, self.halved = random.Random(f"{kind} {seed}"), kind, 0
        torch.manual_seed(seed)
        draw, self.returns_loss = self.draw, self.draw.random() < 0.5
        width = draw.choice(WIDTHS[1:]) if kind != "images" else draw.choice((2, 4))
        self.inputs, self.tied = width, kind == "tokens" and draw.random() < 0.4
        if kind == "tokens":
            self.token = nn.Embedding(TOKENS, width)
            self.position = nn.Embedding(LENGTH, width) if draw.random() < 0.5 else None
        body, now = [], width
        for _ in range(draw.randint(1, 4)):
            piece, now = (self.image_piece if kind == "images" else self.piece)(now)
            body.append(piece)
        if self.tied and now != width:
            body.append(nn.Linear(now, width))
        self.body = nn.Sequential(*body)
        self.head = nn.Linear(width if self.tied else now, TOKENS if kind == "tokens" else CLASSES, bias=not self.tied)
        if self.tied:
            self.head.weight = self.token.weight
        operators = [m for m in self.body.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
        if operators and draw.random() < 0.3:
            draw.choice(operators).weight.requires_grad_(False)

    def piece(self, width: int) -> tuple[nn.Module, int]:
        """Return a piece for rows of features, and how many features it gives."""
        draw, new = self.draw, self.draw.choice(WIDTHS)
        kinds = ["linear", "linear", "residual", "branches", "repeated", "layer norm", "rms norm", "dropout"]
        if self.kind == "tokens":
            kinds += ["attention"] * 4
        kind = draw.choice(kinds)
        if kind == "linear":
            return Activated(nn.Linear(width, new, bias=draw.random() < 0.7), draw), new
        if kind == "residual":
            return Residual(nn.Sequential(Activated(nn.Linear(width, new), draw), nn.Linear(new, width))), width
        if kind == "branches":
            return Branches(Activated(nn.Linear(width, new), draw), nn.Linear(width, 3), -1), new + 3
        if kind == "repeated":
            return Repeated(nn.Linear(width, width), draw.randint(2, 3)), width
        if kind == "attention":
            return Residual(nn.Sequential(nn.LayerNorm(width), Attention(width, draw.random() < 0.5))), width
        if kind == "dropout":
            return nn.Dropout(0.2), width
        return (nn.LayerNorm if kind == "layer norm" else nn.RMSNorm)(width), width

    def image_piece(self, width: int) -> tuple[nn.Module, int]:
        """Return a piece for images, and how many channels it gives."""
        draw, new = self.draw, self.draw.choice((2, 4, 6))
        kinds = ["conv", "conv", "up", "residual", "branches", "batch norm", "group norm"]
        kind = draw.choice([*kinds, "patches"] if self.halved < 2 else kinds)
        sides = draw.choice([(1, 1), (2, 2), (3, 3), (3, 1)])
        if kind == "conv":
            stride = draw.choice([1, 2]) if self.halved < 2 else 1
            self.halved += stride > 1
            rest = {"stride": stride, "dilation": draw.choice([1, 2]), "groups": draw.choice([1, 2])}
            mode = draw.choice(["zeros", "circular"])
            layer = nn.Conv2d(width, new, sides, padding=2, padding_mode=mode, bias=draw.random() < 0.5, **rest)
            return Activated(layer, draw), new
        if kind == "patches":
            groups, self.halved = draw.choice([1, 2]), self.halved + 1
            return Activated(nn.Conv2d(width, new, 2, stride=2, groups=groups), draw), new
        if kind == "up":
            return nn.ConvTranspose2d(width, new, sides, stride=draw.choice([1, 2]), groups=draw.choice([1, 2])), new
        same = nn.Conv2d(width, width, 3, padding=1)
        if kind == "residual":
            return Residual(nn.Sequential(nn.BatchNorm2d(width), Activated(same, draw))), width
        if kind == "branches":
            return Branches(same, nn.Conv2d(width, 2, 1), 1), width + 2
        return nn.BatchNorm2d(width) if kind == "batch norm" else nn.GroupNorm(1, width), width

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.kind == "tokens":
            x = self.token(x) if self.position is None else self.token(x) + self.position(torch.arange(LENGTH))
        h = self.body(x)
        logits = self.head(h.mean((2, 3)) if self.kind == "images" else h)
        return self.loss_of(logits, y) if self.returns_loss else logits

    @staticmethod
    def loss_of(logits: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, -2), y.flatten())

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return output if self.returns_loss else self.loss_of(output, y)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if self.kind == "tokens":
            text = torch.randint(0, TOKENS, (SAMPLES, LENGTH + 1), generator=generator)
            return text[:, :-1], text[:, 1:]
        shape = (SAMPLES, self.inputs, 8, 7) if self.kind == "images" else (SAMPLES, self.inputs)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)

    def fused(self) -> dict[str, int]:
        """Layers with three matrices in one."""
        return {name: 3 for name, _ in self.named_modules() if name.endswith("qkv")}
