"""Development recipes that adapt a pretrained model: adapters, layer-wise rates, a frozen backbone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from benchmarks.recipes.development.common import (
    Split,
    characters,
    classification,
    flipped,
    image_split,
    language,
    wide,
)
from benchmarks.recipes.development.language import GPT
from benchmarks.recipes.development.vision import ResNet, ViT
from benchmarks.recipes.run import Run, warmup_cosine

State = dict[str, Tensor]


class LoraLinear(nn.Module):
    """A frozen linear layer with a trainable update of low rank (Hu et al., 2022)."""

    def __init__(self, base_layer: nn.Linear, rank: int = 8, alpha: float = 16.0) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)
        self.scaling = alpha / rank
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.scaling * self.lora_B(self.lora_A(x))


def swapped() -> Tensor:
    """Return the text with every vowel replaced by the next, a language whose structure the base knows."""
    codes, vocab = characters()
    vowels = torch.tensor([ord(letter) - ord("a") + vocab - 26 for letter in "aeiou"])
    order = torch.arange(vocab)
    order[vowels] = vowels.roll(1)
    return order[codes]


def pretrained(build: Callable[[float], Run], width: float) -> State:
    """Train briefly from one seed, without disturbing the generator of the caller."""
    with torch.random.fork_rng(devices=[]):
        run = build(width)
        base = [group["lr"] for group in run.groups()]
        for step in range(run.steps):
            for group, lr in zip(run.groups(), base, strict=True):
                group["lr"] = lr * run.schedule(step)
            run.step()
    return {name: value.clone() for name, value in run.model.state_dict().items()}


@cache
def language_base(width: float) -> State:
    def build(width: float) -> Run:
        torch.manual_seed(100)
        model = GPT(characters()[1], wide(64, width, 16), depth=3)
        return language(model, AdamW(model.parameters(), lr=4e-3), 100, 200, schedule=warmup_cosine(200))

    return pretrained(build, width)


def turned() -> Split:
    """Return images turned by quarters and how far, a task that needs no labels."""
    data = image_split(16)
    quarters = torch.arange(len(data.x)) % 4
    x = torch.stack([image.rot90(int(k), (1, 2)) for image, k in zip(data.x, quarters, strict=True)])
    return Split(x, quarters, x[:256], quarters[:256])


def image_base(make: Callable[[int], nn.Module], units: int, lr: float) -> State:
    def build(width: float) -> Run:
        torch.manual_seed(100)
        model = make(units)
        return classification(model, AdamW(model.parameters(), lr=lr), turned(), 100, 200, schedule=warmup_cosine(200))

    return pretrained(build, 1.0)


@cache
def vit_base(units: int) -> State:
    return image_base(lambda width: ViT(width, classes=4), units, 1e-3)


@cache
def resnet_base(units: int) -> State:
    return image_base(lambda width: ResNet(width, classes=4), units, 4e-3)


def without(state: State, prefix: str) -> State:
    return {name: value for name, value in state.items() if not name.startswith(prefix)}


def lora(seed: int, width: float = 1.0) -> Run:
    torch.manual_seed(seed)
    model = GPT(characters()[1], wide(64, width, 16), depth=3)
    model.load_state_dict(language_base(width))
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "proj", "fc", "out"):
            setattr(block, name, LoraLinear(getattr(block, name)))
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, weight_decay=0.0)
    return language(model, optimizer, seed, 200, codes=swapped(), clip=1.0, schedule=warmup_cosine(200, warmup=0.05))


def layerwise(seed: int, width: float = 1.0) -> Run:
    """Make a run that fine-tunes a vision transformer, every layer at 0.75 times the rate of the one above."""
    torch.manual_seed(seed)
    units = wide(64, width, 16)
    model = ViT(units)
    model.load_state_dict(without(vit_base(units), "head."), strict=False)
    depth = len(model.blocks)
    stages: list[list[nn.Parameter]] = [[*model.patch.parameters(), model.pos]]
    stages += [list(block.parameters()) for block in model.blocks]
    stages.append([*model.norm.parameters(), *model.head.parameters()])
    groups = [
        {
            "params": [p for p in stage if (p.ndim > 1) == decays],
            "lr": 2e-3 * 0.75 ** (depth + 1 - i),
            "weight_decay": 0.05 if decays else 0.0,
        }
        for i, stage in enumerate(stages)
        for decays in (True, False)
    ]
    return classification(
        model,
        AdamW(groups, lr=2e-3),
        image_split(16),
        seed,
        200,
        augment=flipped,
        smoothing=0.1,
        schedule=warmup_cosine(200),
    )


class Frozen(nn.Module):
    """A pretrained residual net whose first stages stay as they are, also in their statistics."""

    def __init__(self, net: ResNet) -> None:
        super().__init__()
        self.net = net
        self.still = (net.stem, net.bn, net.layer1, net.layer2)
        for module in self.still:
            module.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        for module in self.still:
            module.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def frozen(seed: int, width: float = 1.0) -> Run:
    """Make a run that fine-tunes the last stage of a residual net and, at ten times the rate, a new head."""
    torch.manual_seed(seed)
    units = wide(16, width)
    net = ResNet(units)
    net.load_state_dict(without(resnet_base(units), "fc."), strict=False)
    model = Frozen(net)
    optimizer = SGD(
        [{"params": list(net.layer3.parameters())}, {"params": list(net.fc.parameters()), "lr": 0.2}],
        lr=0.02,
        momentum=0.9,
        weight_decay=1e-4,
    )
    return classification(model, optimizer, image_split(16), seed, 200, schedule=warmup_cosine(200, warmup=0.05))
