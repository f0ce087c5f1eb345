"""Development recipes that classify images: perceptrons, conv nets, residual nets, a vision transformer."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, max_pool2d
from torch.optim import SGD, Adam, AdamW

from benchmarks.char_transformer import Block
from benchmarks.recipes.development.common import (
    classification,
    decayed,
    digit_split,
    flipped,
    image_split,
    noisy,
    private,
    wide,
)
from benchmarks.recipes.optimizers import AdamWScheduleFree, averaged, sharpness_aware
from benchmarks.recipes.run import Run, cosine, warmup_cosine


class Perceptron(nn.Module):
    """A multilayer perceptron on flattened inputs."""

    def __init__(self, *sizes: int, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        h = x.flatten(1)
        for layer in self.layers[:-1]:
            h = self.activation(layer(h))
        return self.layers[-1](h)


class PlainConv(nn.Module):
    """Convolutions without normalization, as in AlexNet, and two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(*pair, 3, padding=1) for pair in pairwise((3, width, 2 * width, 4 * width))
        )
        self.fc = nn.Linear(16 * width, 8 * width)
        self.head = nn.Linear(8 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = max_pool2d(conv(x).relu(), 2)
        return self.head(self.fc(x.flatten(1)).relu())


class Residual(nn.Module):
    """A residual block of two convolutions with batch norm."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (h + self.shortcut(x)).relu()


class ResNet(nn.Module):
    """Three stages of one residual block each."""

    def __init__(self, width: int, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.layer1 = Residual(width, width, 1)
        self.layer2 = Residual(width, 2 * width, 2)
        self.layer3 = Residual(2 * width, 4 * width, 2)
        self.fc = nn.Linear(4 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer3(self.layer2(self.layer1(self.bn(self.stem(x)).relu())))
        return self.fc(h.mean((2, 3)))


class Norm2d(nn.LayerNorm):
    """A layer norm over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.pwconv1 = nn.Linear(width, 4 * width)
        self.pwconv2 = nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.dwconv(x).movedim(1, -1))
        return x + (self.gamma * self.pwconv2(gelu(self.pwconv1(h)))).movedim(-1, 1)


class ConvNeXt(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 2, 2)
        self.stem_norm = Norm2d(width)
        self.stage1 = nn.Sequential(*(ConvNeXtBlock(width) for _ in range(2)))
        self.down_norm = Norm2d(width)
        self.down = nn.Conv2d(width, 2 * width, 2, 2)
        self.stage2 = nn.Sequential(*(ConvNeXtBlock(2 * width) for _ in range(2)))
        self.norm = nn.LayerNorm(2 * width)
        self.head = nn.Linear(2 * width, 10)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stage1(self.stem_norm(self.stem(x)))
        h = self.stage2(self.down(self.down_norm(h)))
        return self.head(self.norm(h.mean((2, 3))))


class Encoder(Block):
    """A transformer block that looks both ways."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(attended.transpose(1, 2).reshape(B, T, d))
        return x + self.out(gelu(self.fc(self.norm2(x))))


class ViT(nn.Module):
    """Patches of 4 pixels, learned positions, the mean of all tokens."""

    def __init__(self, width: int, depth: int = 4, classes: int = 10, size: int = 16) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.pos = nn.Parameter(torch.empty(1, (size // 4) ** 2, width))
        self.blocks = nn.Sequential(*(Encoder(width, width // 16) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.pos, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2) + self.pos
        return self.head(self.norm(self.blocks(tokens)).mean(1))


def mlp_adam(seed: int, width: float = 1.0) -> Run:
    torch.manual_seed(seed)
    h = wide(128, width)
    model = Perceptron(64, h, h, h, 10)
    return classification(model, Adam(model.parameters(), lr=2e-3), digit_split(), seed, 250, augment=noisy)


def mlp_sgd(seed: int, width: float = 1.0) -> Run:
    torch.manual_seed(seed)
    h = wide(128, width)
    model = Perceptron(768, h, h, 10)
    return classification(
        model, SGD(model.parameters(), lr=0.05, momentum=0.9), image_split(16), seed, 250, schedule=cosine(250)
    )


def mlp_tanh(seed: int, width: float = 1.0) -> Run:
    torch.manual_seed(seed)
    h = wide(64, width)
    model = Perceptron(64, h, h, h, 10, activation=nn.Tanh)
    for layer in model.layers:
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    return classification(model, SGD(model.parameters(), lr=0.4), digit_split(), seed, 250, augment=noisy)


def mlp_sam(seed: int, width: float = 1.0) -> Run:
    torch.manual_seed(seed)
    h = wide(128, width)
    model = Perceptron(768, h, h, 10)
    source = private(seed)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    update = sharpness_aware(source)
    return classification(
        model, optimizer, image_split(16), seed, 200, generator=source, update=update, schedule=cosine(200)
    )


def mlp_schedule_free(seed: int, width: float = 1.0) -> Run:
    torch.manual_seed(seed)
    h = wide(128, width)
    model = Perceptron(768, h, h, 10)
    optimizer = AdamWScheduleFree(decayed(model.parameters(), 0.01), lr=2.5e-3, warmup_steps=10)
    run = classification(model, optimizer, image_split(16), seed, 200)
    run.evaluate = averaged(optimizer, run.evaluate)
    return run


def plain_conv(seed: int, width: float = 1.0) -> Run:
    torch.manual_seed(seed)
    model = PlainConv(wide(24, width))
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    return classification(model, optimizer, image_split(16), seed, 250, augment=flipped, schedule=cosine(250))


def resnet(seed: int, width: float = 1.0) -> Run:
    torch.manual_seed(seed)
    model = ResNet(wide(16, width))
    optimizer = SGD(decayed(model.parameters(), 5e-4), lr=0.2, momentum=0.9, nesterov=True)
    return classification(model, optimizer, image_split(16), seed, 200, augment=flipped, schedule=warmup_cosine(200))


def convnext(seed: int, width: float = 1.0) -> Run:
    torch.manual_seed(seed)
    model = ConvNeXt(wide(32, width))
    optimizer = AdamW(decayed(model.parameters(), 0.05), lr=4e-3)
    return classification(
        model,
        optimizer,
        image_split(16),
        seed,
        200,
        augment=flipped,
        smoothing=0.1,
        schedule=warmup_cosine(200),
    )


def vit(seed: int, width: float = 1.0, depth: int = 4) -> Run:
    torch.manual_seed(seed)
    model = ViT(wide(64, width, 16), depth)
    optimizer = AdamW(decayed(model.parameters(), 0.05), lr=2e-3)
    return classification(
        model, optimizer, image_split(16), seed, 200, augment=flipped, clip=1.0, schedule=warmup_cosine(200)
    )
