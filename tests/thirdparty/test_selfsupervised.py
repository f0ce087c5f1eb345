"""Networks beside networks: BYOL's frozen target, Lightning's autoencoder."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.thirdparty.running import fit


class Byol(pl.LightningModule):
    """Bootstrap your own latent: an online encoder, projector and predictor, and a target that follows them."""

    def __init__(self, target_first):
        super().__init__()
        encoder = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        online = nn.Sequential(
            encoder, nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))
        )
        target = copy.deepcopy(online).requires_grad_(False)
        if target_first:
            self.target = target
        self.predictor = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6))
        self.online = online
        self.target = target

    def training_step(self, batch, batch_idx):
        one, two = batch
        with torch.no_grad():
            goals = [self.target(view) for view in (two, one)]
        guesses = [self.predictor(self.online(view)) for view in (one, two)]
        return -sum(functional.cosine_similarity(*pair).mean() for pair in zip(guesses, goals, strict=True))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
                target.lerp_(online, 0.01)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


@pytest.mark.parametrize("target_first", [True, False])
def test_the_predictor_ends_in_the_readout_and_the_target_has_none(tmp_path, target_first):
    views = torch.utils.data.TensorDataset(torch.randn(12, 3, 8, 8), torch.randn(12, 3, 8, 8))
    ran = fit(Byol(target_first), torch.utils.data.DataLoader(views, batch_size=4), tmp_path)
    assert ran.readouts == {"predictor.2"}
    assert len(ran.guess) == 1
    assert not any(name.startswith("target") for name in ran.guess)
    assert ran.bare == []
    assert ran.unmeasured("target") == {}


class LitAutoEncoder(pl.LightningModule):
    """Lightning's example, from its README."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, 128), nn.ReLU(), nn.Linear(128, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 128), nn.ReLU(), nn.Linear(128, 28 * 28))

    def forward(self, x):
        # in lightning, forward defines the prediction/inference actions
        return self.encoder(x)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        x = x.view(x.size(0), -1)
        x_hat = self.decoder(self.encoder(x))
        return functional.mse_loss(x_hat, x)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def test_the_autoencoder_ends_in_its_decoder(tmp_path):
    data = torch.utils.data.TensorDataset(torch.rand(32, 1, 28, 28), torch.zeros(32))
    ran = fit(LitAutoEncoder(), torch.utils.data.DataLoader(data, batch_size=8), tmp_path)
    assert ran.readouts == {"decoder.2"}
    assert len(ran.measurements) == 4
    assert (ran.bare, ran.unmeasured()) == ([], {})
