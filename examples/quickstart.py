"""Train a small network on handwritten digits and watch every layer: the callback, nothing else.

    python examples/quickstart.py

It ends with a table of all layers and the commands that show what was logged, in TensorBoard or as a page of HTML.
Works unchanged on a GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from spectral_monitor import SpectralMonitor


class Digits(L.LightningModule):
    """Three hidden layers. ``forward`` returns the loss, so that the monitor can say by how much a step lowered it."""

    def __init__(self, width: int = 512, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            *(nn.Linear(64, width), nn.ReLU()),
            *(nn.Linear(width, width), nn.ReLU()),
            *(nn.Linear(width, width), nn.ReLU()),
            nn.Linear(width, 10),
        )
        self.accuracy = MulticlassAccuracy(num_classes=10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(images), labels)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self(*batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def loaders(batch_size: int) -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    """The 1,797 digits that come with scikit-learn, 8 x 8 pixels, 1,500 of them to train on."""
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
    train, val = torch.utils.data.random_split(data, [1500, 297], generator=torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size, shuffle=True, drop_last=True), DataLoader(val, batch_size)


def command(name: str) -> str:
    """How a program of this environment is called from here: by its path, unless the shell finds it or that is long."""
    path = Path(os.path.relpath(sys.executable)).with_name(name)
    return name if shutil.which(name) or path.parts[:2] == ("..", "..") else str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512, help="units of a hidden layer")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="measure every n-th optimizer step")
    parser.add_argument("--logdir", default="runs", help="where TensorBoard files go")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    L.seed_everything(0, verbose=False)

    monitor = SpectralMonitor(every_n_steps=args.every)  # this is all it takes
    logger = TensorBoardLogger(args.logdir, name="quickstart")
    trainer = L.Trainer(
        max_epochs=args.epochs,
        logger=logger,
        callbacks=[monitor],
        devices=1,
        log_every_n_steps=5,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(args.width, args.lr), *loaders(args.batch_size))

    print(f"validation accuracy {trainer.callback_metrics['val_accuracy']:.3f}")
    if monitor.latest is not None:
        print(f"\nSee it:  {command('tensorboard')} --logdir {args.logdir}    (tab Custom Scalars)")
        print(f"     or  {command('spectral-monitor')} report {logger.log_dir} -o report.html")


if __name__ == "__main__":
    main()
