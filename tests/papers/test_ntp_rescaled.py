"""The neural tangent parametrization with a smaller output becomes muP (Spectral Condition, section 5.3)."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.scaling import abc, mup, ntp
from tests.one_step import training_step

HALF = Fraction(1, 2)
LR, STEPS, HIDDEN, SEEDS = 0.2, 3, 2, 5


def rescaled(hidden):
    """NTP with ``1/sqrt(n)`` before the loss, and learning rates times n, for gradients are that much smaller."""
    plain = ntp(hidden)
    return abc((*plain.a[:-1], plain.a[-1] + HALF), plain.b, -1)


@pytest.mark.parametrize("hidden", [1, 2, 5])
def test_by_exponents(hidden):
    assert ntp(hidden).classify().limit == "NTK"
    assert rescaled(hidden).shifted(-HALF) == mup(hidden)
    assert rescaled(hidden).classify().regime == "feature learning"


def train(exponents, width, factor=1.0, gain=1.0, seed=0):
    """Weights as they are applied, with their rates; ``factor`` before the loss, rates times ``gain``."""
    torch.manual_seed(seed)
    network = nn.Sequential(
        *(nn.Linear(8, width, bias=False), nn.Tanh(), nn.Linear(width, width, bias=False), nn.Tanh()),
        nn.Linear(width, 1, bias=False),
    ).double()
    groups = []
    for layer, std, rate in zip(network[::2], exponents.init_exponents, exponents.lr_exponents, strict=True):
        with torch.no_grad():
            layer.weight.copy_(torch.randn(layer.weight.shape, dtype=torch.float64) * width ** float(std))
        groups.append({"params": [layer.weight], "lr": LR * gain * width ** float(rate)})
    optimizer = torch.optim.SGD(groups)
    probe = SpectralProbe(network, optimizer, every_n_steps=1, quantities=["feature_change"], mode="observe")
    x = torch.randn(6, 8, dtype=torch.float64) / math.sqrt(8)
    y, outputs = torch.sign(x[:, :1]), []
    for _ in range(STEPS):
        with training_step(probe, optimizer):
            outputs.append(factor * network(x))
            (outputs[-1] - y).square().mean().backward()
    return torch.stack(outputs).detach(), probe.latest.value("feature_change", "2")


@pytest.mark.parametrize("width", [32, 200])
def test_it_is_the_same_training(width):
    ours, _ = train(ntp(HIDDEN), width, factor=width**-0.5, gain=width)
    expected, _ = train(mup(HIDDEN), width)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
    assert (ours[-1] - ours[0]).abs().max() > 0.05, "it does train"


@pytest.mark.slow
def test_features_are_then_learned_at_any_width():
    """Without the factor their change falls like 1 / sqrt(width)."""
    widths, slopes = [64, 128, 256, 512], {}
    for name in ("ntp", "rescaled"):
        changes = []
        for n in widths:
            as_it_is = name == "ntp"
            some = [
                train(ntp(HIDDEN), n, *((1.0, 1.0) if as_it_is else (n**-0.5, n)), seed)[1] for seed in range(SEEDS)
            ]
            changes.append(np.mean(np.log(some)))
        slopes[name] = np.polyfit(np.log(widths), changes, 1)[0]
    assert slopes["rescaled"] == pytest.approx(0, abs=0.15)
    assert slopes["ntp"] == pytest.approx(-0.5, abs=0.15)
