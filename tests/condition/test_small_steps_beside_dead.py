"""A layer that gets no gradient does not hide that the steps of all others are too small: real networks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from spectral_monitor import SpectralProbe
from tests.one_step import training_step


class Selection(nn.Module):
    """Weighs its inputs by a softmax, as in a temporal fusion transformer; of a single input that is 1."""

    def __init__(self, count):
        super().__init__()
        self.weights = nn.Linear(32 * count, count)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(count))

    def forward(self, *inputs):
        shares = torch.softmax(self.weights(torch.cat(inputs, dim=-1)), dim=-1).split(1, dim=-1)
        return sum(
            share * functional.elu(layer(x)) for share, layer, x in zip(shares, self.layers, inputs, strict=True)
        )


class Fusion(nn.Module):
    """Two selections; ``dead`` further layers lie ahead of a ReLU that never opens."""

    def __init__(self, dead):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(8, 32), nn.Linear(8, 32)
        self.one, self.two = Selection(1), Selection(2)
        self.dead = nn.ModuleList(nn.Linear(8, 32) for _ in range(dead))
        for layer in self.dead:
            nn.init.constant_(layer.bias, -50.0)
        self.middle, self.head = nn.Linear(64, 32), nn.Linear(32, 4)

    def forward(self, x):
        left, right = functional.elu(self.left(x)), functional.elu(self.right(x))
        left = left + sum(layer(x).relu() for layer in self.dead)
        return self.head(functional.elu(self.middle(torch.cat([self.one(left), self.two(left, right)], dim=-1))))


@pytest.mark.parametrize(
    ("lr", "dead", "causes"),
    [
        (1e-3, 0, {"dead"}),
        (1e-5, 0, {"dead", "rates_too_small"}),
        (1e-5, 6, {"dead"}),  # many dead layers may be why the others are slow
    ],
)
def test_rates_that_are_too_small_are_a_root_beside_few_dead_layers(lr, dead, causes):
    model = Fusion(dead)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    probe = SpectralProbe(model, optimizer, every_n_steps="1, 2, 4, ..., every 100", mode="observe")
    generator = torch.Generator().manual_seed(0)
    for _ in range(32):
        x = torch.randn(64, 8, generator=generator)
        with training_step(probe, optimizer):
            functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
    assert {verdict.cause for verdict in probe.latest.roots} == causes
