"""Convolutional networks on small images."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, gelu, max_pool2d, pad
from torch.optim import SGD, Adam, AdamW, Muon, RMSprop

from benchmarks.recipes.heldout.data import Supervised, decayed, divided, small_images, smoothed, wide
from benchmarks.recipes.optimizers import sharpness_aware
from benchmarks.recipes.recipe import Recipe
from benchmarks.recipes.run import Run, Schedule, cosine, warmup_cosine


class VGG(nn.Module):
    """Pairs of 3x3 convolutions with batch norm, then two linear layers."""

    def __init__(self, width: float) -> None:
        super().__init__()
        plan = [wide(c, width) if c else 0 for c in (16, 16, 0, 32, 32, 0, 64, 64, 0)]
        layers: list[nn.Module] = []
        channels = 3
        for c in plan:
            if c:
                layers += [nn.Conv2d(channels, c, 3, padding=1, bias=False), nn.BatchNorm2d(c), nn.ReLU()]
                channels = c
            else:
                layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        hidden = wide(128, width)
        self.classifier = nn.Sequential(
            nn.Linear(4 * channels, hidden), nn.ReLU(), nn.Dropout(0.5), nn.Linear(hidden, 10)
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


def vgg(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    model, steps = VGG(width), 220
    task = Supervised(model, small_images(), 64, seed)
    optimizer = SGD(model.parameters(), lr=0.025, momentum=0.9, weight_decay=5e-4)
    return Run(model, [optimizer], task, task.evaluate, steps, divided(steps, 10))


class WideBlock(nn.Module):
    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(into), nn.BatchNorm2d(out)
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.shortcut = nn.Identity() if into == out else nn.Conv2d(into, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn1(x).relu()
        branch = self.conv2(self.dropout(self.bn2(self.conv1(h)).relu()))
        return branch + (x if isinstance(self.shortcut, nn.Identity) else self.shortcut(h))


class WideResNet(nn.Module):
    """Pre-activation blocks, wide and few."""

    def __init__(self, width: float) -> None:
        super().__init__()
        a, b = wide(24, width), wide(48, width)
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(WideBlock(16, a, 2), WideBlock(a, a, 1), WideBlock(a, b, 2), WideBlock(b, b, 1))
        self.bn = nn.BatchNorm2d(b)
        self.fc = nn.Linear(b, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.bn(self.blocks(self.conv1(x))).relu().mean((2, 3)))


def one_cycle(steps: int, rise: float = 0.3) -> Schedule:
    """Half a cosine up from 1/25 and one down to nothing, as torch's OneCycleLR."""
    top = rise * steps

    def factor(t: int) -> float:
        if t < top:
            return 0.04 + 0.96 * 0.5 * (1 - math.cos(math.pi * t / top))
        return 0.5 * (1 + math.cos(math.pi * (t - top) / (steps - top)))

    return factor


def wide_resnet(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    model, steps = WideResNet(width), 220
    task = Supervised(model, small_images(), 40, seed)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    return Run(model, [optimizer], task, task.evaluate, steps, one_cycle(steps))


class Inverted(nn.Module):
    """Expansion, depthwise convolution, projection."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        hidden = 3 * into
        self.residual = into == out and stride == 1
        self.expand = nn.Conv2d(into, hidden, 1, bias=False)
        self.depthwise = nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False)
        self.project = nn.Conv2d(hidden, out, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in (hidden, hidden, out))
        self.act = nn.ReLU6()

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norms[0](self.expand(x)))
        h = self.norms[2](self.project(self.act(self.norms[1](self.depthwise(h)))))
        return x + h if self.residual else h


class MobileNet(nn.Module):
    def __init__(self, width: float) -> None:
        super().__init__()
        a, b, c = wide(16, width), wide(24, width), wide(40, width)
        self.stem = nn.Sequential(nn.Conv2d(3, a, 3, padding=1, bias=False), nn.BatchNorm2d(a), nn.ReLU6())
        self.blocks = nn.Sequential(Inverted(a, b, 2), Inverted(b, b, 1), Inverted(b, c, 2), Inverted(c, c, 1))
        self.last = nn.Sequential(nn.Conv2d(c, 4 * c, 1, bias=False), nn.BatchNorm2d(4 * c), nn.ReLU6())
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(4 * c, 10))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
        nn.init.normal_(self.classifier[1].weight, std=0.01)
        nn.init.zeros_(self.classifier[1].bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.last(self.blocks(self.stem(x))).mean((2, 3)))


def mobilenet(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    model, steps = MobileNet(width), 200
    task = Supervised(model, small_images(), 32, seed)
    optimizer = RMSprop(model.parameters(), lr=0.008, alpha=0.9, eps=0.0316, momentum=0.9, weight_decay=1e-5)
    return Run(model, [optimizer], task, task.evaluate, steps, lambda t: 0.973 ** (t / 2))


class GroupNet(nn.Module):
    """Strided convolutions with group norm."""

    def __init__(self, width: float) -> None:
        super().__init__()
        channels = [3, *(wide(c, width) for c in (24, 32, 48, 64))]
        self.convs = nn.ModuleList(nn.Conv2d(*pair, 3, padding=1) for pair in pairwise(channels))
        self.norms = nn.ModuleList(nn.GroupNorm(8, c) for c in channels[1:])
        self.head = nn.Linear(channels[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x)).relu()
            x = max_pool2d(x, 2) if x.shape[-1] > 4 else x
        return self.head(x.mean((2, 3)))


def group_net(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    model, steps = GroupNet(width), 220
    task = Supervised(model, small_images(), 64, seed)
    optimizer = Adam(model.parameters(), lr=2e-3)
    return Run(model, [optimizer], task, task.evaluate, steps, cosine(steps))


class BasicBlock(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, out // into, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        if h.shape != x.shape:
            x = pad(avg_pool2d(x, 2), (0, 0, 0, 0, 0, h.shape[1] - x.shape[1]))
        return (x + h).relu()


class ResNet(nn.Module):
    """Basic blocks whose shortcuts have no parameters."""

    def __init__(self, width: float) -> None:
        super().__init__()
        a = wide(16, width)
        self.conv1 = nn.Conv2d(3, a, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(a)
        self.layers = nn.Sequential(BasicBlock(a, a), BasicBlock(a, 2 * a), BasicBlock(2 * a, 4 * a))
        self.fc = nn.Linear(4 * a, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layers(self.bn1(self.conv1(x)).relu()).mean((2, 3)))


def sam_resnet(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    model, steps = ResNet(width), 200
    task = Supervised(model, small_images(), 64, seed, smoothed(0.1))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    update = sharpness_aware(task.generator)
    return Run(model, [optimizer], task, task.evaluate, steps, cosine(steps), update=update)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.pwconv1 = nn.Linear(width, 4 * width)
        self.pwconv2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        return x + self.pwconv2(gelu(self.pwconv1(h))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self, width: float) -> None:
        super().__init__()
        d = wide(48, width)
        self.stem = nn.Conv2d(3, d, 4, 4)
        self.blocks = nn.Sequential(*(ConvNeXtBlock(d) for _ in range(4)))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, 10)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(x)).mean((2, 3))))


def convnext(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    model, steps = ConvNeXt(width), 200
    task = Supervised(model, small_images(), 40, seed)
    hidden = [block.get_submodule(name).weight for block in model.blocks for name in ("pwconv1", "pwconv2")]
    chosen = {id(p) for p in hidden}
    groups = decayed(model, 0.05)
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in chosen]
    optimizers = [Muon(hidden, lr=0.02, momentum=0.95, weight_decay=0.01), AdamW(groups, lr=2e-3, betas=(0.9, 0.95))]
    return Run(model, optimizers, task, task.evaluate, steps, warmup_cosine(steps, 0.05))


RECIPES = (
    Recipe("VGG, SGD", vgg, "held out", "VGG with batch norm on CIFAR-10: SGD 0.9, 5e-4, rates divided by 10 twice"),
    Recipe("wide ResNet, SGD one cycle", wide_resnet, "held out", "WRN with Nesterov momentum and OneCycleLR"),
    Recipe(
        "MobileNet, RMSprop", mobilenet, "held out", "torchvision's MobileNetV3 reference: RMSprop 0.9, 0.9, 0.0316"
    ),
    Recipe("GroupNorm conv net, Adam", group_net, "held out", "Keras-like conv net with group norm, Adam 1e-3"),
    Recipe("ResNet, SAM", sam_resnet, "held out", "SAM: rho 0.05, SGD 0.9, 5e-4, label smoothing 0.1"),
    Recipe("ConvNeXt, Muon", convnext, "held out", "Muon 0.02, 0.95 for hidden matrices, AdamW for the rest"),
)
