"""Which matrices read recurrent layers, from the graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spectral_monitor.capture.replay.loss_graph import reads_recurrent

WIDTH, STEPS = 8, 5
TOKENS = torch.zeros(2, STEPS, dtype=torch.long)


class Reader(nn.Module):
    """An embedding, a recurrent layer, something in between, and a head."""

    def __init__(self, recurrent, between=None):
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(5, WIDTH), recurrent
        self.between, self.head = between or nn.Identity(), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.between(self.recurrent(self.embedding(x))[0]))


class Cells(nn.Module):
    """A recurrent layer that is written as a loop over a cell."""

    def __init__(self, kind):
        super().__init__()
        self.cell = kind(WIDTH, WIDTH)

    def forward(self, x):
        state, outputs = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return (torch.stack(outputs, 1),)


LAYERS = {
    "LSTM": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
    "LSTM without its own kernel": lambda: nn.LSTM(WIDTH, WIDTH, 2, batch_first=True).double(),
    "GRU": lambda: nn.GRU(WIDTH, WIDTH, 2, batch_first=True),
    "RNN": lambda: nn.RNN(WIDTH, WIDTH, batch_first=True),
    "LSTMCell": lambda: Cells(nn.LSTMCell),
    "GRUCell": lambda: Cells(nn.GRUCell),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("between", [nn.Identity, lambda: nn.Dropout(0.2)])
def test_heads_of_recurrent_networks_read_them(name, between):
    model = Reader(LAYERS[name](), between()).to(torch.float64 if "without" in name else torch.float32)
    assert reads_recurrent(model(TOKENS).sum(), [model.head.weight])
    assert not reads_recurrent(model(TOKENS).sum(), [nn.Parameter(torch.ones(3, WIDTH))])


@pytest.mark.parametrize("between", [lambda: nn.Linear(WIDTH, WIDTH), lambda: nn.LayerNorm(WIDTH)])
def test_behind_a_matrix_or_a_norm_they_do_not(between):
    model = Reader(nn.GRU(WIDTH, WIDTH, batch_first=True), between())
    assert not reads_recurrent(model(TOKENS).sum(), [model.head.weight])


def test_a_tanh_or_a_matrix_used_twice_is_not_recurrent_by_itself():
    perceptron = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    assert not reads_recurrent(perceptron(torch.ones(2, WIDTH)).sum(), [perceptron[2].weight])
    tower, head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), nn.Linear(WIDTH, 3)
    loss = head(tower(torch.ones(2, WIDTH)) * tower(torch.zeros(2, WIDTH))).sum()
    assert not reads_recurrent(loss, [head.weight])
