"""Vision models made of patches, and small multilayer perceptrons."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, normalize, selu
from torch.optim import SGD, AdamW, NAdam

from benchmarks.rates.tuned import digits
from benchmarks.recipes.heldout.data import Supervised, decayed, small_images, smoothed, still, wide
from benchmarks.recipes.heldout.text import Attention
from benchmarks.recipes.optimizers import Lion
from benchmarks.recipes.recipe import Recipe
from benchmarks.recipes.run import Run, cosine, warmup_cosine


def truncated(model: nn.Module, std: float = 0.02) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.token_mix = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channel_mix = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.token_mix(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mix(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, width: float) -> None:
        super().__init__()
        d = wide(64, width)
        self.patch = nn.Conv2d(3, d, 4, 4)
        self.blocks = nn.Sequential(*(MixerBlock(16, d) for _ in range(4)))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patch(x).flatten(2).transpose(1, 2))).mean(1))


def mixer(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    model, steps = Mixer(width), 220
    task = Supervised(model, small_images(), 40, seed)
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    return Run(model, [optimizer], task, task.evaluate, steps, warmup_cosine(steps), clip=1.0)


class DropPath(nn.Module):
    """Leave a residual branch out for some samples."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        return x * (torch.rand(len(x), 1, 1) >= self.p) / (1 - self.p)


class ViTBlock(nn.Module):
    def __init__(self, width: int, heads: int, ratio: int, drop: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.fc1, self.fc2 = nn.Linear(width, ratio * width), nn.Linear(ratio * width, width)
        self.drop_path = DropPath(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.fc2(gelu(self.fc1(self.norm2(x)))))


class ViT(nn.Module):
    """Patches and learned positions, read out at a class token or as the mean."""

    def __init__(
        self, d: int, depth: int, patch: int, token: bool = True, drop: float = 0.0, classes: int = 10
    ) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, d, patch, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, d)) if token else None
        self.pos_embed = nn.Parameter(torch.zeros(1, (16 // patch) ** 2 + token, d))
        self.blocks = nn.Sequential(*(ViTBlock(d, 4, 4, drop * i / depth) for i in range(depth)))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, classes)
        truncated(self)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        if self.cls_token is not None:
            nn.init.trunc_normal_(self.cls_token, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch_embed(x).flatten(2).transpose(1, 2)
        if self.cls_token is not None:
            h = torch.cat((self.cls_token.expand(len(h), -1, -1), h), 1)
        h = self.norm(self.blocks(h + self.pos_embed))
        return self.head(h.mean(1) if self.cls_token is None else h[:, 0])


def deit(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    model, steps = ViT(wide(48, width), depth=3, patch=2, drop=0.1), 200
    task = Supervised(model, small_images(), 16, seed, smoothed(0.1))
    optimizer = AdamW(decayed(model, 0.05, ["pos_embed", "cls_token"]), lr=2e-3)
    return Run(model, [optimizer], task, task.evaluate, steps, warmup_cosine(steps, 0.1, 0.01))


def lion_vit(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    model, steps = ViT(wide(64, width), depth=3, patch=4, token=False), 220
    task = Supervised(model, small_images(), 48, seed)
    optimizer = Lion(decayed(model, 1.0), lr=4e-4, betas=(0.9, 0.99))
    return Run(model, [optimizer], task, task.evaluate, steps, warmup_cosine(steps), clip=1.0)


class Perceptron(nn.Module):
    """A multilayer perceptron with tanh."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        for layer in self.layers:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).tanh()
        return self.layers[-1](x)


def tanh_perceptron(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    d = wide(96, width)
    model, steps = Perceptron(64, d, d, d, 10), 300
    task = Supervised(model, digits(), 64, seed, held_out=400)
    optimizer = NAdam(model.parameters(), lr=2e-3, momentum_decay=4e-3)
    return Run(model, [optimizer], task, task.evaluate, steps)


class SelfNormalizing(nn.Module):
    """A deep perceptron with SELU and normal weights of variance 1 over fan-in."""

    def __init__(self, d: int, depth: int = 6) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(*pair) for pair in pairwise([768, *[d] * depth]))
        self.out = nn.Linear(d, 10)
        for layer in (*self.inner, self.out):
            nn.init.normal_(layer.weight, std=1 / math.sqrt(layer.in_features))
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = x.flatten(1)
        for layer in self.inner:
            h = selu(layer(h))
        return self.out(h)


def self_normalizing(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    model, steps = SelfNormalizing(wide(64, width)), 250
    task = Supervised(model, small_images(), 128, seed)
    optimizer = SGD(model.parameters(), lr=0.04, momentum=0.9)
    return Run(model, [optimizer], task, task.evaluate, steps, cosine(steps))


class Siamese(nn.Module):
    """Two views through one encoder, compared at a learned temperature."""

    def __init__(self, width: float) -> None:
        super().__init__()
        channels = [3, *(wide(c, width) for c in (24, 48, 64))]
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.convs = nn.ModuleList(nn.Conv2d(*pair, 3, 2, 1, bias=False) for pair in pairwise(channels))
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in channels[1:])
        self.fc = nn.Linear(channels[-1], channels[-1])
        self.projection = nn.Linear(channels[-1], 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x)).relu()
        first, second = normalize(self.projection(self.fc(x.mean((2, 3))).relu()), dim=1).chunk(2)
        return self.logit_scale.clamp(max=math.log(100)).exp() * first @ second.T


class Contrastive(Supervised):
    """InfoNCE between two noisy crops of each image."""

    @staticmethod
    def views(x: Tensor, generator: torch.Generator) -> Tensor:
        corners = torch.randint(5, (2, 2), generator=generator).tolist()
        crops = [x[:, :, a : a + 12, b : b + 12] for a, b in corners]
        return torch.cat([crop + 0.5 * torch.randn(crop.shape, generator=generator) for crop in crops])

    @staticmethod
    def agreement(logits: Tensor) -> Tensor:
        y = torch.arange(len(logits))
        return (cross_entropy(logits, y) + cross_entropy(logits.T, y)) / 2

    def __call__(self) -> Tensor:
        return self.agreement(self.model(self.views(self.batch()[0], self.generator)))

    def evaluate(self) -> float:
        generator = torch.Generator().manual_seed(0)
        with still(self.model):
            batches = [self.views(x, generator) for x in self.held_out_x.split(128)]
            return sum(self.agreement(self.model(x)).item() for x in batches) / len(batches)


def contrastive(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    model, steps = Siamese(width), 220
    task = Contrastive(model, small_images(), 96, seed)
    optimizer = AdamW(decayed(model, 0.2), lr=4e-3, betas=(0.9, 0.98), eps=1e-6)
    roles = {"projection": "operator"}
    return Run(model, [optimizer], task, task.evaluate, steps, warmup_cosine(steps), roles=roles)


RECIPES = (
    Recipe("MLP-Mixer, AdamW", mixer, "held out", "MLP-Mixer: AdamW 1e-3, weight decay 0.1, clipping at 1, warm-up"),
    Recipe("DeiT, AdamW", deit, "held out", "DeiT: AdamW, 0.05, label smoothing 0.1, stochastic depth 0.1"),
    Recipe(
        "ViT, Lion", lion_vit, "held out", "Lion for ViT: betas 0.9 and 0.99, weight decay 1, a fifth of AdamW's rate"
    ),
    Recipe("tanh MLP, NAdam", tanh_perceptron, "held out", "Keras-like: Glorot, NAdam 2e-3, no schedule"),
    Recipe("SELU MLP, SGD", self_normalizing, "held out", "self-normalizing networks: LeCun normal, SGD 0.9"),
    Recipe(
        "contrastive encoder, AdamW", contrastive, "held out", "CLIP: betas 0.9 and 0.98, eps 1e-6, 0.2, temperature"
    ),
)
