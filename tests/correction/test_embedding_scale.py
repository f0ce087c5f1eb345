"""Embeddings that a network multiplies by a constant take steps that are smaller by it, and no others."""

from __future__ import annotations

from statistics import geometric_mean

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from spectral_monitor import LRCorrection, SpectralLRCorrector, SpectralProbe
from tests.condition.test_slips_in_code import Module
from tests.one_step import training_step
from tests.resume.resuming import QUIET

SCALE, STEPS = 8.0, 40
IDS = torch.randint(12, (64, 6), generator=torch.Generator().manual_seed(0))
NEXT = (IDS.sum(1) + 1) % 4


class Reader(nn.Module):
    """Multiplies its embeddings by a constant, or has them larger by it."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 64)
        self.hidden, self.norm, self.head = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 4)
        self.scale = SCALE if scaled else 1.0
        nn.init.normal_(self.embed.weight, std=0.5 / self.scale)

    def forward(self, ids):
        x = (self.embed(ids) * self.scale).mean(1)
        return self.head(self.norm(self.hidden(x).relu()))


def in_a_loop(network):
    optimizer = torch.optim.Adam(network.parameters(), 1e-3, eps=1e-15)
    probe = SpectralProbe(
        network, optimizer, every_n_steps=1, mode="correct", quantities="light", correction=LRCorrection()
    )
    for _ in range(STEPS):
        with training_step(probe, optimizer):
            F.cross_entropy(network(IDS), NEXT).backward()
    return probe


def under_lightning(network):
    monitor = SpectralLRCorrector(every_n_steps=1)
    trainer = pl.Trainer(max_steps=STEPS, callbacks=[monitor], logger=False, accelerator="cpu", **QUIET)
    trainer.fit(Module(network, eps=1e-15, weight_decay=0.0), DataLoader(TensorDataset(IDS, NEXT), batch_size=64))
    return monitor


@pytest.mark.slow
@pytest.mark.parametrize("train", [in_a_loop, under_lightning])
def test_steps_are_those_of_the_same_network_without_the_constant(train):
    def updates(scaled):
        network = Reader(scaled)
        run = train(network)
        assert not network._forward_hooks, "nothing is left behind"
        (name,) = (info.name for info in run.latest.layers if info.name.endswith("embed"))
        return geometric_mean(m.value("update_natural", name) for m in list(run.measurements)[8:])

    assert updates(scaled=True) * SCALE == pytest.approx(updates(scaled=False), rel=0.1)
