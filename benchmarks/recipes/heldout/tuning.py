"""Trained backbones that are tuned further: adapters, new heads, rates by depth, a student."""

from __future__ import annotations

import copy
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from torch.optim import SGD, Adam, AdamW

from benchmarks.recipes.heldout.convs import GroupNet
from benchmarks.recipes.heldout.data import (
    Corpus,
    Groups,
    Language,
    Supervised,
    half_of_classes,
    small_images,
    smoothed,
    wide,
)
from benchmarks.recipes.heldout.text import GPT
from benchmarks.recipes.heldout.vision import ViT
from benchmarks.recipes.recipe import Recipe
from benchmarks.recipes.run import Run, cosine, warmup_cosine


def pretrain(task: Supervised | Language, steps: int, lr: float = 4e-3) -> nn.Module:
    """Train for some steps with AdamW."""
    optimizer, schedule = AdamW(task.model.parameters(), lr=lr), warmup_cosine(steps)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * schedule(step)
        optimizer.zero_grad()
        task().backward()
        optimizer.step()
    return task.model


@cache
def trained_gpt(width: float) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        corpus = Corpus(16, 33, 0)
        return pretrain(Language(GPT(corpus.vocab, wide(64, width), 2, 32, tied=False, bias=True), corpus), 200)


@cache
def trained_vit(width: float) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ViT(wide(64, width), depth=4, patch=4, token=False, classes=5)
        return pretrain(Supervised(model, half_of_classes(False), 64, 0), 150, 2e-3)


@cache
def trained_conv(width: float) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GroupNet(width)
        return pretrain(Supervised(model, half_of_classes(False), 64, 0), 150, 2e-3)


@cache
def teacher() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = pretrain(Supervised(GroupNet(1.5), small_images(), 64, 0), 250)
    return model.eval().requires_grad_(False)


class LoraLinear(nn.Module):
    """A frozen linear layer with a trained product of two small matrices beside it, named as in peft."""

    def __init__(self, base: nn.Linear, r: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_dropout = nn.Dropout(dropout)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, r, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(r, base.out_features, bias=False)})
        self.scaling = alpha / r
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: Tensor) -> Tensor:
        low = self.lora_A["default"](self.lora_dropout(x))
        return self.base_layer(x) + self.scaling * self.lora_B["default"](low)


class Backwards(Corpus):
    """The same text, read from its end."""

    def at(self, starts: Tensor) -> Tensor:
        return super().at(starts).flip(1)


def lora(seed: int, width: float) -> Run:
    model = copy.deepcopy(trained_gpt(width)).requires_grad_(False)
    torch.manual_seed(seed)
    for block in model.h:
        for parent, name in ((block.attn, "qkv"), (block.attn, "proj"), (block, "c_fc"), (block, "c_proj")):
            setattr(parent, name, LoraLinear(getattr(parent, name), r=8, alpha=16, dropout=0.05))
    corpus, steps = Backwards(16, 33, seed), 220
    task = Language(model, corpus)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=4e-3, weight_decay=0.01)
    return Run(model, [optimizer], task, task.evaluate, steps, warmup_cosine(steps, 0.05), clip=1.0)


def by_depth(model: ViT, lr: float, weight_decay: float, decay: float) -> Groups:
    """Groups whose rates fall from the head to the patches, with and without weight decay."""
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    depth = len(model.blocks)
    for name, p in model.named_parameters():
        if name.startswith("blocks."):
            level = 1 + int(name.split(".")[1])
        else:
            level = 0 if name.startswith(("patch_embed", "pos_embed")) else depth + 1
        groups.setdefault((level, p.ndim == 2), []).append(p)
    return [
        {"params": params, "lr": lr * decay ** (depth + 1 - level), "weight_decay": weight_decay * matrix}
        for (level, matrix), params in groups.items()
    ]


def layer_decay(seed: int, width: float) -> Run:
    model = copy.deepcopy(trained_vit(width))
    torch.manual_seed(seed)
    model.head = nn.Linear(model.head.in_features, 5)
    nn.init.trunc_normal_(model.head.weight, std=0.02)
    steps = 200
    task = Supervised(model, half_of_classes(True), 32, seed, smoothed(0.1))
    optimizer = AdamW(by_depth(model, 2e-3, 0.05, 0.65), betas=(0.9, 0.999))
    return Run(model, [optimizer], task, task.evaluate, steps, warmup_cosine(steps))


def fast_head(seed: int, width: float) -> Run:
    model = copy.deepcopy(trained_conv(width))
    torch.manual_seed(seed)
    model.head = nn.Linear(model.head.in_features, 5)
    lr, steps = 5e-3, 180
    task = Supervised(model, half_of_classes(True), 64, seed)
    backbone = [p for name, p in model.named_parameters() if not name.startswith("head.")]
    groups = [{"params": backbone, "lr": lr}, {"params": model.head.parameters(), "lr": 10 * lr}]
    optimizer = SGD(groups, lr=lr, momentum=0.9, weight_decay=1e-4)
    return Run(model, [optimizer], task, task.evaluate, steps, cosine(steps))


def frozen(seed: int, width: float) -> Run:
    model = copy.deepcopy(trained_conv(width)).requires_grad_(False)
    torch.manual_seed(seed)
    model.head = nn.Linear(model.head.in_features, 5)
    steps = 180
    task = Supervised(model, half_of_classes(True), 64, seed)
    optimizer = SGD(model.head.parameters(), lr=0.1, momentum=0.9)
    return Run(model, [optimizer], task, task.evaluate, steps, cosine(steps))


class Student(nn.Module):
    """Three strided convolutions and a linear layer."""

    def __init__(self, width: float) -> None:
        super().__init__()
        a = wide(16, width)
        self.conv1, self.conv2 = nn.Conv2d(3, a, 3, 2, 1), nn.Conv2d(a, 2 * a, 3, 2, 1)
        self.conv3 = nn.Conv2d(2 * a, 4 * a, 3, 2, 1)
        self.fc1, self.fc2 = nn.Linear(16 * a, 8 * a), nn.Linear(8 * a, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv3(self.conv2(self.conv1(x).relu()).relu()).relu()
        return self.fc2(self.fc1(h.flatten(1)).relu())


class Distilled(Supervised):
    """Mostly the teacher's softened shares, a little the labels."""

    temperature = 4.0

    def __call__(self) -> Tensor:
        x, y = self.batch()
        with torch.no_grad():
            target = (teacher()(x) / self.temperature).softmax(-1)
        logits = self.model(x)
        soft = kl_div((logits / self.temperature).log_softmax(-1), target, reduction="batchmean")
        return 0.9 * self.temperature**2 * soft + 0.1 * cross_entropy(logits, y)


def student(seed: int, width: float) -> Run:
    teacher()
    torch.manual_seed(seed)
    model, steps = Student(width), 250
    task = Distilled(model, small_images(), 64, seed)
    optimizer = Adam(model.parameters(), lr=2e-3)
    return Run(model, [optimizer], task, task.evaluate, steps, cosine(steps))


RECIPES = (
    Recipe("LoRA, AdamW", lora, "held out", "peft: rank 8, alpha 16, dropout 0.05, AdamW, warm-up"),
    Recipe(
        "layer-wise decay, AdamW",
        layer_decay,
        "held out",
        "BEiT fine-tuning: AdamW, layer decay 0.65, 0.05",
        deliberate="the first layers' rates are small on purpose",
    ),
    Recipe(
        "fast head, SGD",
        fast_head,
        "held out",
        "torchvision fine-tuning: head at ten times the backbone's rate",
        deliberate="the backbone's rate is a tenth of the head's on purpose",
    ),
    Recipe(
        "frozen backbone, SGD",
        frozen,
        "held out",
        "linear probing: SGD 0.9 on a new head",
        deliberate="the backbone is frozen on purpose",
    ),
    Recipe("distilled student, Adam", student, "held out", "Hinton: temperature 4, share 0.9, Adam 1e-3"),
)
