"""Image classifiers whose measured step is compared with a plain one: convolutions of all kinds and patches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    ConvNextConfig,
    ConvNextForImageClassification,
    EfficientNetConfig,
    EfficientNetForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

CLASSES = 10
MODELS: dict[str, Callable[[int], nn.Module]] = {
    "ResNet-10": lambda pixels: ResNetForImageClassification(
        ResNetConfig(
            embedding_size=64,
            hidden_sizes=[64, 128, 256, 512],
            depths=[1, 1, 1, 1],
            layer_type="basic",
            num_labels=CLASSES,
        )
    ),
    "ConvNeXt Atto": lambda pixels: ConvNextForImageClassification(
        ConvNextConfig(hidden_sizes=[40, 80, 160, 320], depths=[2, 2, 6, 2], num_labels=CLASSES)
    ),
    "EfficientNet-B0": lambda pixels: EfficientNetForImageClassification(
        EfficientNetConfig(
            width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, dropout_rate=0.2, num_labels=CLASSES
        )
    ),
    "ViT-Tiny": lambda pixels: ViTForImageClassification(
        ViTConfig(hidden_size=192, num_attention_heads=3, intermediate_size=768, image_size=pixels, num_labels=CLASSES)
    ),
}
"""Of the sizes that go by these names, from the size of an image."""


class Classifier(pl.LightningModule):
    """A network of images, under AdamW."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(images).logits, labels)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self(*batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@dataclass(frozen=True)
class Images:
    """A classifier by name, and its batch of random images."""

    name: str
    batch: int = 16
    pixels: int = 224

    @property
    def parameters(self) -> int:
        """All of them, without making any."""
        with torch.device("meta"):
            return sum(p.numel() for p in MODELS[self.name](self.pixels).parameters())

    def start(self, text: str | None) -> tuple[pl.LightningModule, Any]:
        """A new model and its data, the same at every call; ``text`` is for models of text."""
        pl.seed_everything(0, verbose=False)
        net = MODELS[self.name](self.pixels)
        for module in net.modules():  # convolutions of one standard deviation for all end in zeros
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                module.reset_parameters()
        images = torch.randn(4 * self.batch, 3, self.pixels, self.pixels)
        labels = torch.randint(CLASSES, (len(images),))
        return Classifier(net), DataLoader(TensorDataset(images, labels), self.batch)

    def describe(self) -> str:
        """For tables."""
        return f"{self.name}, {self.batch} images of {self.pixels} x {self.pixels}"
