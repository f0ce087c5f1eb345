"""Vision transformers: timm's own where it is installed, and one that follows it line by line.

What is followed: the names and order of ``timm.models.vision_transformer.VisionTransformer`` (``cls_token``,
``pos_embed``, ``patch_embed.proj`` with stride = kernel, ``blocks`` with a fused ``attn.qkv``, ``norm``, ``head``).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

WIDTHS = {"tiny": (192, 3), "small": (384, 6)}
IMAGE, PATCH, CLASSES = 32, 8, 10


class PatchEmbed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.proj = nn.Conv2d(3, width, kernel_size=PATCH, stride=PATCH)
        self.norm = nn.Identity()

    def forward(self, x):
        return self.norm(self.proj(x).flatten(2).transpose(1, 2))


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width, eps=1e-6), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width, eps=1e-6), Mlp(width)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Stands for timm's."""

    def __init__(self, width, heads, depth):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, (IMAGE // PATCH) ** 2 + 1, width) * 0.02)
        self.patch_embed = PatchEmbed(width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def like_timm(size, depth=2):
    return VisionTransformer(*WIDTHS[size], depth)


def of_timm(timm, size, depth=2):
    name = f"vit_{size}_patch16_224"
    return timm.create_model(name, img_size=IMAGE, patch_size=PATCH, depth=depth, num_classes=CLASSES)


def pictures():
    return torch.randn(4, 3, IMAGE, IMAGE), torch.randint(CLASSES, (4,))
