"""Updates of weights that begin at zero, so small that their squares are below the range of float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from tests.one_step import after_one_step


def stepped(model, rates, batch):
    """One step; what the probe says of it."""
    optimizer = torch.optim.SGD([{"params": [p], "lr": rates.get(name, 0.1)} for name, p in model.named_parameters()])
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe")
    with probe.step():
        model(batch).square().mean().backward()
        optimizer.step()
    return probe.latest


@pytest.mark.parametrize("rate", [1e-1, 1e-22, 1e-30])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_update_alignment(rate, scale):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 80, bias=False), nn.Linear(80, 90))
    nn.init.zeros_(model[0].weight)
    x = scale * torch.randn(40, 96)
    m = stepped(model, {"0.weight": rate}, x)
    dW = model[0].weight.detach().double()
    stretch = (x.double() @ dW.T).norm(dim=1) / x.double().norm(dim=1)
    assert m.value("update_alignment", "0") == pytest.approx(
        float(stretch.mean() / torch.linalg.matrix_norm(dW, 2)), rel=1e-2
    )


@pytest.mark.parametrize("rate", [1e-10, 1e-20, 1e-30])
def test_update_natural_of_an_embedding(rate):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 96), nn.Linear(96, 4))
    nn.init.zeros_(model[0].weight)
    m = stepped(model, {"0.weight": rate}, torch.randint(0, 20, (40,)))
    truth = model[0].weight.detach().double().square().mean(1).sqrt().max()
    assert m.value("update_natural", "0") == pytest.approx(float(truth), rel=1e-5, abs=0)


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_inputs_that_cannot_be_squared(scale):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 80, bias=False))
    x = torch.randn(40, 96)
    W = model[0].weight.detach().double().clone()
    truth = float(((x.double() @ W.T).norm(dim=1) / x.double().norm(dim=1)).mean() / torch.linalg.matrix_norm(W, 2))
    probe = after_one_step(model, lambda: model(scale * x).mean(), lr=1e-3 / scale, mode="observe")
    assert probe.latest.value("alignment", "0") == pytest.approx(truth, rel=1e-2)
