"""Networks for sweeps, where other processes can import them."""

from __future__ import annotations

import torch
from torch import nn

INPUTS = 4


class Known(nn.Module):
    """Of exactly known natural norms: ``4 width^weight`` of the weight, four times the learning rate of each update.

    All entries of the weight are alike, and so are those of the gradient of a loss that is the sum of the outputs.
    """

    weight, rate, lr = 0.5, -0.25, 1e-3

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.layer = nn.Linear(INPUTS, width, bias=False)
        nn.init.constant_(self.layer.weight, width**self.weight)

    def forward(self, x):
        return self.layer(x).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr * self.width**self.rate)


def ones(seed):
    return (torch.ones(1, INPUTS),)


class Noisy(nn.Module):
    """Draws at its start and at every step, more the wider it is."""

    def __init__(self, width, depth=1):
        super().__init__()
        self.read = nn.Linear(INPUTS, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 3)
        self.drop = nn.Dropout(0.2)

    def forward(self, x, y):
        h = self.read(x)
        for block in self.blocks:
            h = self.drop(block(h.relu()))
        return nn.functional.cross_entropy(self.head(h), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def noise(seed):
    """Batches that are read in another order at every pass."""
    data = torch.utils.data.TensorDataset(torch.randn(24, INPUTS), torch.randint(3, (24,)))
    return torch.utils.data.DataLoader(data, batch_size=6, shuffle=True)


class Chain(nn.Module):
    """A ReLU perceptron of ``depth`` hidden matrices."""

    def __init__(self, width, depth):
        super().__init__()
        self.read = nn.Linear(16, width, bias=False)
        self.body = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.out = nn.Linear(width, 8, bias=False)

    def features(self, x):
        f = self.read(x)
        for layer in self.body:
            f = layer(f.relu())
        return f

    def forward(self, x, y):
        return (self.out(self.features(x)) - y).square().mean()


class Residual(Chain):
    """A residual net of ``depth`` branches of one matrix, each times what the parametrization asks for."""

    def __init__(self, width, depth, parametrization):
        super().__init__(width, depth)
        self.multiplier = parametrization.branch_multiplier(depth)

    def features(self, x):
        f = self.read(x)
        for branch in self.body:
            f = f + self.multiplier * branch(f.relu())
        return f


def one_sample(seed):
    """One sample of RMS 1, and targets that are far from what networks put out at their start."""
    x = torch.randn(1, 16)
    return x / x.square().mean().sqrt(), torch.full((1, 8), 3.0)
