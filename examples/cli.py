"""The network of quickstart.py from the command line: everything, the monitor too, is set in a configuration file.

    python examples/cli.py fit --config examples/config.yaml
    python examples/cli.py fit --config examples/config.yaml --model.lr 0.01 --trainer.max_epochs 3

Needs `pip install "jsonargparse[signatures]"`. What can be set, and what it means:

    python examples/cli.py fit --trainer.callbacks.help spectral_monitor.SpectralMonitor
"""

from __future__ import annotations

import lightning as L
from lightning.pytorch.cli import LightningCLI
from quickstart import Digits, loaders


class DigitsData(L.LightningDataModule):
    """The handwritten digits that come with scikit-learn."""

    def __init__(self, batch_size: int = 100) -> None:
        super().__init__()
        self._train, self._val = loaders(batch_size)

    def train_dataloader(self) -> object:
        return self._train

    def val_dataloader(self) -> object:
        return self._val


if __name__ == "__main__":
    LightningCLI(Digits, DigitsData, save_config_kwargs={"overwrite": True})
