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
