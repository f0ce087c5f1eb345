"""A short fit, with a fault if wanted."""

from __future__ import annotations

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spectral_monitor import SpectralMonitor


class Net(L.LightningModule):
    """A perceptron; ``faulty``: net.2 has a hundred times the learning rate of the others."""

    def __init__(self, faulty=False):
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.ReLU())]
        self.net = nn.Sequential(*layers, nn.Linear(16, 3))
        self.faulty = faulty

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        rates = {"net.2.weight": 0.1} if self.faulty else {}
        groups = [{"params": [p], "lr": rates.get(name, 1e-3)} for name, p in self.named_parameters()]
        return torch.optim.Adam(groups, lr=1e-3)


def data():
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(96, 16), torch.randint(3, (96,))), 32)


def fitted(folder, faulty=False, steps=12, **options):
    """A monitor after a fit that was logged to a folder, and its trainer."""
    torch.manual_seed(0)
    monitor = SpectralMonitor(**{"every_n_steps": 3, "quantities": "light", "mode": "observe", **options})
    trainer = L.Trainer(
        max_steps=steps,
        callbacks=[monitor],
        logger=L.pytorch.loggers.CSVLogger(folder, name="", version=""),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        log_every_n_steps=1000,
    )
    trainer.fit(Net(faulty), data())
    return monitor, trainer
