"""Parameters that are not measured, beside others that are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from tests.correction.native import SizesItsSteps
from tests.one_step import training_step

TIERS = ["light", "standard"]


class WithPhases(nn.Module):
    """Complex numbers between two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.phases = nn.Parameter(torch.randn(8, dtype=torch.cfloat))
        self.scale = nn.Parameter(torch.randn((), dtype=torch.cfloat))

    def forward(self, x):
        h = self.first(x) * self.phases * self.scale
        return self.last(h.real + h.imag.tanh()).square().mean()


class Quantized(nn.Module):
    """A frozen layer of eight bits."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.weight = nn.Parameter(torch.randn(8, 8).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x):
        return self.last(self.first(x) @ self.weight.float()).square().mean()


def stepped(kind, quantities):
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=quantities, mode="observe")
    x = torch.randn(16, 6)
    for _ in range(2):
        with training_step(probe, optimizer):
            loss = model(x)
            loss.backward()
    after = model(x)
    return probe.latest, float(after.detach() - loss.detach())


@pytest.mark.parametrize("quantities", TIERS)
@pytest.mark.parametrize("kind", [WithPhases, Quantized])
def test_the_other_layers_are_measured(kind, quantities):
    latest, _ = stepped(kind, quantities)
    assert latest.step == 2
    for layer in ("first", "last"):
        assert latest.value("weight_norm", layer) > 0
        assert latest.value("contribution", layer) > 0


def test_complex_parameters_contribute_what_they_do_to_the_loss():
    latest, change = stepped(WithPhases, "standard")
    assert latest.summary["loss_change"] == pytest.approx(change, rel=1e-3)
    assert latest.summary["loss_change_predicted"] == pytest.approx(change, rel=0.01)


@pytest.mark.parametrize("quantities", ["standard", "full"])
def test_an_optimizer_without_a_learning_rate_is_measured(quantities):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    optimizer = SizesItsSteps(model.parameters())
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=quantities)
    before = model[0].weight.detach().clone()
    with probe.step():
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
    update = (model[0].weight.detach() - before).double()
    assert probe.latest.value("update_norm", "0") == pytest.approx(float(torch.linalg.matrix_norm(update, 2)), rel=0.02)
    assert probe.latest.why("lr", "0") == "its optimizer has no learning rate"
