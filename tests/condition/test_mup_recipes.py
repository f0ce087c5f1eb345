"""Networks whose learning rates are those of muP are healthy at any width, and their faults are still named.

Two ways to spread the rates, for SGD and Adam each: those of :data:`MUP`, and those of the package mup, which knows a
base width, multiplies the readout's outputs and gives readout, input layer and biases a rate of their own.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.reporting.content.typical import vs_typical
from spectral_monitor.scaling import MUP
from tests.one_step import training_step

BASE, STEPS = 64, 12
MATRICES = ("0", "2", "4", "6.linear")


class Readout(nn.Module):
    def __init__(self, width, scale):
        super().__init__()
        self.linear, self.scale = nn.Linear(width, 4), scale

    def forward(self, x):
        return self.scale * self.linear(x)


def make(width, scale=1.0):
    hidden = [nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*hidden, Readout(width, scale))


def ours(width, optimizer):
    model = make(width)
    MUP.init_(model)
    return model, MUP.param_groups(model, lr=0.1 if optimizer == "sgd" else 1e-2, optimizer=optimizer)


def packaged(width, optimizer):
    """Rates of MuSGD and MuAdam; entries of the readout as large as at the base width."""
    ratio = width / BASE
    model = make(width, 1 / ratio)
    with torch.no_grad():
        model[6].linear.weight *= ratio**0.5
    hidden = [model[2].weight, model[4].weight]
    others = [p for p in model.parameters() if all(p is not one for one in hidden)]
    if optimizer == "sgd":
        return model, [{"params": hidden, "lr": 0.1}, {"params": others, "lr": 0.1 * ratio}]
    return model, [{"params": hidden, "lr": 3e-3 / ratio}, {"params": others, "lr": 3e-3}]


def last(recipe, optimizer, width, factor=1.0):
    """The last measurement of a short training; ``factor``: on the learning rate of the matrix "2"."""
    torch.manual_seed(0)
    model, groups = recipe(width, optimizer)
    odd = model[2].weight
    split = []
    for group in groups:
        split.append({**group, "params": [p for p in group["params"] if p is not odd]})
        if len(split[-1]["params"]) < len(list(group["params"])):
            split.append({**group, "params": [odd], "lr": group["lr"] * factor})
    split = [group for group in split if group["params"]]
    chosen = (torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam)(split)
    probe = SpectralProbe(model, chosen, every_n_steps=1, quantities="light", mode="observe")
    for _ in range(STEPS):
        x = torch.randn(64, 32)
        y = torch.stack([x[:, 0] * x[:, 1], x[:, 2:5].sum(1), x[:, 5], x[:, 6]], 1)
        with training_step(probe, chosen):
            (model(x) - y).square().mean().backward()
    probe.close()
    return probe.latest


@pytest.mark.few(3)
@pytest.mark.parametrize("width", [256, 1024])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("recipe", [ours, packaged])
def test_a_healthy_run_is_healthy_at_any_width(recipe, optimizer, width):
    found = last(recipe, optimizer, width)
    assert found.verdicts == ()
    sizes = dict(zip((info.name for info in found.layers), vs_typical(found), strict=True))
    assert all(1 / 16 < sizes[name] < 8 for name in MATRICES), sizes


@pytest.mark.parametrize("factor", [100.0, 0.01])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("recipe", [ours, packaged])
def test_a_hidden_layer_with_a_wrong_rate_is_named(recipe, optimizer, factor):
    if recipe is packaged and factor > 1:
        factor = 1000.0  # two rates of two layers each are no rule: 100 is 6 times that of the ends
    found = last(recipe, optimizer, 256, factor)
    assert [verdict.layer for verdict in found.verdicts][:1] == ["2"], found.verdicts
