"""Learning rates of embeddings under Adam rise so far and no further, however small gradients become."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spectral_monitor import LRCorrection, SpectralMonitorWarning, SpectralProbe
from spectral_monitor.correction import wanted
from spectral_monitor.correction.peak_rates import CONSTANT
from tests.one_step import training_step

WORDS, WIDTH, STEPS = 20, 32, 40
LR = 5e-4


def trained(size=1 / 8, decay=0.0):
    """A classifier of words whose embedding gets gradients that halve from step to step."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))
    nn.init.normal_(network[0].weight, std=0.02)
    halves = [0.5**step for step in range(STEPS)]
    network[0].weight.register_hook(lambda grad: grad * halves.pop(0))
    optimizer = torch.optim.AdamW(network.parameters(), lr=LR, weight_decay=decay)
    probe = SpectralProbe(network, optimizer, every_n_steps=1, mode="correct", correction=LRCorrection(size=size))
    for step in range(STEPS):
        words = torch.randint(WORDS, (64,), generator=torch.Generator().manual_seed(step))
        with training_step(probe, optimizer):
            nn.functional.cross_entropy(network(words), (3 * words + 1) % WORDS).backward()
    return network, probe


def over_wanted(probe):
    """The learning rate over the wanted size of the embedding's steps."""
    found = probe._supervisor._corrector.wanted
    layer = next(layer for layer in found.layers if layer.info.role == "embedding")
    return probe.multipliers[layer.info.name] * LR / (CONSTANT * found.size * found.share(layer))


def test_the_learning_rate_is_four_times_the_wanted_size_at_most():
    assert over_wanted(trained()[1]) == pytest.approx(wanted.EMBEDDING_RATE, rel=0.02)


@pytest.mark.slow
def test_decay_does_not_take_the_rows_away(monkeypatch):
    """Decay goes with the learning rate."""
    kept = trained(decay=0.5)[0][0].weight.norm()
    monkeypatch.setattr(wanted, "EMBEDDING_RATE", float("inf"))
    with pytest.warns(SpectralMonitorWarning, match="held at the limit"):
        lost = trained(decay=0.5)[0][0].weight.norm()
    assert kept > 2 * lost


def test_where_sizes_are_learning_rates_they_are_met():
    assert trained("lr")[1].multipliers["0"] > wanted.EMBEDDING_RATE
