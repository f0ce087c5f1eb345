"""Biases whose gradients cancel out but for rounding: what batch norm or softmax takes out again."""

from itertools import repeat

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spectral_monitor import LRCorrection, SpectralProbe
from spectral_monitor.correction.update_size import cancelled
from tests.one_step import training_step

KEYS = ["contribution", "lr"]


class Attention(nn.Module):
    """Softmax takes no notice of the bias of the keys, nor the batch norm of that of the convolution before it."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(8, 32, 1), nn.BatchNorm1d(32)
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 4)

    def forward(self, x, y):
        x = torch.relu(self.norm(self.conv(x))).mT
        x = F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        return F.cross_entropy(self.head(x.mean(1)).float(), y)


def train(steps=40, precision=None, optimizer=torch.optim.SGD, lr=0.1, **options):
    """A probe after some steps, and the network."""
    torch.manual_seed(0)
    net = Attention()
    probe = SpectralProbe(net, optimizer := optimizer(net.parameters(), lr), **({"every_n_steps": 1} | options))
    mixed = torch.autocast("cpu", precision, enabled=precision is not None)
    for _ in range(steps):
        y = torch.randint(4, (32,))
        x = torch.randn(32, 8, 6) + F.one_hot(y, 8)[:, :, None]
        with training_step(probe, optimizer):
            with mixed:
                loss = net(x, y)
            loss.backward()
    return probe, net


def correct(**more):
    """What a correction takes."""
    return {"correction": LRCorrection("target"), "every_n_steps": 1, "mode": "correct"} | more


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize(("optimizer", "lr", "square"), [(torch.optim.SGD, 0.1, True), (torch.optim.Adam, 1e-3, False)])
def test_they_are_told_from_all_others(precision, optimizer, lr, square):
    probe, _ = train(10, precision, optimizer, lr, every_n_steps=1, quantities=KEYS)
    for measurement in probe.measurements:
        found = {measurement.layers[i].name for i in cancelled(measurement, probe.anatomy.layers, repeat(square))}
        assert found == {"conv.bias", "key.bias"}


def test_a_gradient_of_a_hundredth_of_the_matrix_s_is_one():
    """Held against the gradients themselves, which SGD's contributions are the squares of."""
    probe, net = train(1, every_n_steps=1, quantities=KEYS)
    measurement, layers = probe.measurements[-1], probe.anatomy.layers
    place = {layer.info.name: i for i, layer in enumerate(layers)}
    values = measurement.values["contribution"]
    usual = net.value.weight.grad.square().mean() * 0.1 * 32  # of the 32 entries of a bias
    for factor, silent in ((0.009, True), (0.011, False)):
        values[place["value.bias"]] = -usual * factor**2
        assert (place["value.bias"] in cancelled(measurement, layers, repeat(True))) == silent


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "lr"), [(torch.optim.SGD, 0.1), (torch.optim.Adam, 0.001)])
def test_rounding_drives_no_rate(optimizer, lr):
    """Their rates stay what they were at the first step."""
    begin = train(1, None, optimizer, lr, **correct(every_n_steps=9))[0].multipliers
    probe, _ = train(40, None, optimizer, lr, **correct())
    kept = {name for name, rate in probe.multipliers.items() if rate == pytest.approx(begin[name], rel=1e-6)}
    assert kept == {"conv.bias", "key.bias"}
    assert all(rate < 100 for rate in probe.multipliers.values())
