"""Layers that no module has, as those in a Python list: gradients arrive, and no optimizer can know them."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from spectral_monitor import SpectralMonitor, SpectralProbe
from tests.resume.resuming import QUIET

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
Y = (X @ torch.randn(16, 4, generator=torch.Generator().manual_seed(1))).argmax(1)


class Network(nn.Module):
    def __init__(self, container):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.hidden = container(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x):
        x = self.first(x).relu()
        for layer in self.hidden:
            x = layer(x).relu()
        return self.last(x)


class Module(pl.LightningModule):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.network(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


def under_lightning(network):
    monitor = SpectralMonitor(mode="observe", every_n_steps=1)
    trainer = pl.Trainer(max_steps=5, max_epochs=-1, callbacks=[monitor], logger=False, accelerator="cpu", **QUIET)
    trainer.fit(Module(network), DataLoader(TensorDataset(X, Y), batch_size=16))
    return monitor.latest


def in_a_loop(network, report=True, also=lambda out: 0.0, after=lambda: None):
    """``also``: what is added to the loss; ``after``: what is done after each step."""
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
    probe = SpectralProbe(network, optimizer, mode="observe", every_n_steps=1)
    for _ in range(5):
        with probe.step():
            out = network(X)
            loss = F.cross_entropy(out, Y) + also(out)
            if report:
                probe.report_loss(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        after()
    return probe.latest


def forgotten(measurement):
    return [str(verdict) for verdict in measurement.roots if verdict.cause == "left_out"]


@pytest.mark.parametrize("train", [under_lightning, in_a_loop])
def test_layers_in_a_list_are_named(train):
    (sentence,) = forgotten(train(Network(list)))
    assert "unregistered parameter 1" in sentence
    assert "32 x 32" in sentence
    assert "ModuleList" in sentence
    assert not forgotten(train(Network(nn.ModuleList)))


def test_a_loop_that_does_not_report_its_loss_is_not_looked_at():
    assert not forgotten(in_a_loop(Network(list), report=False))


def outside(train):
    """A network that the loss goes through and that is no part of the model."""
    torch.manual_seed(1)
    judge = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(judge.parameters(), 1e-3)

    def after():
        optimizer.zero_grad()
        judge(torch.randn(8, 4)).mean().backward()
        optimizer.step()

    return in_a_loop(Network(nn.ModuleList), also=lambda out: 0.1 * judge(out).mean(), after=after if train else int)


def test_a_network_with_an_optimizer_of_its_own_is_not():
    assert not forgotten(outside(train=True))
    assert forgotten(outside(train=False))  # the same network that nobody trains


def test_a_trained_network_that_serves_as_a_loss_is_not():
    with torch.random.fork_rng():
        torch.manual_seed(2)
        critic = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    for layer in critic:
        if isinstance(layer, nn.Linear):  # a matrix of small stable rank, as training leaves it
            u, s, v = torch.linalg.svd(layer.weight.detach(), full_matrices=False)
            layer.weight.data = u @ torch.diag(s * 0.5 ** torch.arange(len(s))) @ v
    assert not forgotten(in_a_loop(Network(nn.ModuleList), also=lambda out: 0.1 * critic(out).mean()))


def test_inputs_that_want_a_gradient_and_parameters_that_an_optimizer_holds_are_not():
    coordinates = nn.Parameter(torch.randn(64, 4))
    held = nn.Parameter(torch.randn(4, 4))
    network = Network(nn.ModuleList)
    optimizer = torch.optim.AdamW([*network.parameters(), held], 1e-3)
    probe = SpectralProbe(network, optimizer, mode="observe", every_n_steps=1)
    for _ in range(5):
        with probe.step():
            loss = F.cross_entropy(network(X) @ held + X[:, :4].requires_grad_(), Y)
            probe.report_loss(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert not forgotten(probe.latest)
    assert coordinates.grad is None


def test_frozen_ones_are_not():
    network = Network(list)
    for layer in network.hidden:
        layer.requires_grad_(False)
    assert not forgotten(in_a_loop(network))
