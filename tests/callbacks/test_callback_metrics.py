"""Numbers of the whole network are there for ModelCheckpoint and EarlyStopping."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spectral_monitor import SpectralMonitor


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def trained(tmp_path, *callbacks, every=2):
    data = DataLoader(TensorDataset(torch.randn(32, 8), torch.randint(4, (32,))), 8)
    monitor = SpectralMonitor(every_n_steps=every)
    trainer = pl.Trainer(
        max_epochs=4,
        logger=False,
        callbacks=[monitor, *callbacks],
        accelerator="cpu",
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
    )
    trainer.fit(Module(), data, data)
    return trainer, monitor


def test_they_are_those_of_the_latest_measurement(tmp_path):
    trainer, monitor = trained(tmp_path)
    found, latest = trainer.callback_metrics, monitor.latest
    assert float(found["spectral/summary/violations"]) == latest.summary["violations"]
    ratios = [latest.value("feature_change", f"net.{i}") for i in (0, 2)]
    assert float(found["spectral_feature_change/all/highest"]) == pytest.approx(max(ratios))
    assert not [key for key in found if key.endswith("net.0")]
    assert "val_loss" in found


def test_checkpoints_and_early_stopping_can_go_by_them(tmp_path):
    best = ModelCheckpoint(tmp_path, monitor="spectral_feature_change/all/highest", save_top_k=1)
    stop = EarlyStopping("spectral/summary/violations", stopping_threshold=1.0, mode="min", check_finite=False)
    trainer, _ = trained(tmp_path, best, stop)
    assert best.best_model_score is not None
    assert trainer.current_epoch == 1, "0 violations is below the threshold at the end of the first epoch"


@pytest.mark.filterwarnings("ignore:Early stopping conditioned")
def test_early_stopping_before_the_first_measurement_needs_to_be_lenient(tmp_path):
    with pytest.raises(RuntimeError, match="spectral/summary/violations` which is not available"):
        trained(tmp_path, EarlyStopping("spectral/summary/violations"), every=10)
    trainer, _ = trained(tmp_path, EarlyStopping("spectral/summary/violations", strict=False), every=10)
    assert trainer.current_epoch == 4
