"""Optimizers that run the forward elsewhere than where they step from."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from tests.loops.ways import Sharpness
from tests.one_step import training_step

MOVED = "something moved the weights between the forward pass and the update, or before both"


class MovesFirst(torch.optim.SGD):
    """Moves the weights before it runs the closure, and moves them back for the step."""

    def step(self, closure):
        parameters = [p for group in self.param_groups for p in group["params"]]
        here = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p in parameters:
                p.add_(0.05 * torch.ones_like(p))
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for p, old in zip(parameters, here, strict=True):
                p.copy_(old)
        super().step()
        return loss


def setting():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 80), nn.Tanh(), nn.Linear(80, 2))
    return model, torch.randn(16, 6)


def closure_of(model, optimizer, x):
    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("kind", [Sharpness, MovesFirst])
def test_the_update_is_that_of_the_whole_step(kind):
    model, x = setting()
    optimizer = kind(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1)
    for _ in range(3):
        before = copy.deepcopy(model)
        with probe.step():
            optimizer.step(closure_of(model, optimizer, x))
        m = probe.latest
        for i in (0, 2):
            dW = (model[i].weight - before[i].weight).detach().double()
            assert m.value("update_norm", str(i)) == pytest.approx(float(torch.linalg.matrix_norm(dW, 2)), rel=1e-3)
            weight = before[i].weight.detach().double()
            assert m.value("weight_norm", str(i)) == pytest.approx(float(torch.linalg.matrix_norm(weight, 2)), rel=1e-3)


def test_a_first_forward_at_the_weights_it_steps_from_gives_features():
    model, x = setting()
    optimizer = Sharpness(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1)
    before = copy.deepcopy(model)
    with probe.step():
        optimizer.step(closure_of(model, optimizer, x))
    h, after = before(x), model(x)
    expected = ((after - h).norm(dim=1) / h.norm(dim=1)).mean()
    assert probe.latest.value("feature_change", "2") == pytest.approx(float(expected), rel=1e-4)
    assert "closure ran 2 times" in probe.latest.why("contribution", "2")


def test_a_forward_elsewhere_gives_none_and_says_so():
    model, x = setting()
    optimizer = MovesFirst(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1)
    with probe.step():
        optimizer.step(closure_of(model, optimizer, x))
    for key in ("feature_rms", "feature_change", "alignment", "bfa", "feature_drift", "feature_change_local"):
        assert math.isnan(probe.latest.value(key, "2"))
        assert probe.latest.why(key, "2") == MOVED
    assert probe.latest.value("update_norm", "2") > 0


def test_weights_clamped_between_backward_and_step_are_noticed():
    model, x = setting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1)
    for clamp in (False, True):
        with training_step(probe, optimizer):
            model(x).square().mean().backward()
            if clamp:
                with torch.no_grad():
                    model[0].weight.clamp_(-0.1, 0.1)
        assert math.isnan(probe.latest.value("feature_change", "2")) == clamp
