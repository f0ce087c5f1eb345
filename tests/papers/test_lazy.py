"""Is this run lazy: linearity and kernels since the start, over width, under NTK's rates and under muP's."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from spectral_monitor import SpectralProbe
from spectral_monitor.scaling import MUP, NTK
from tests.one_step import training_step

from .perceptron import geometric_mean, slopes

WIDTHS = (256, 512, 1024, 2048)
SEEDS = (0, 1)
KEYS = ("linearity", "kernel_drift", "feature_drift")
PARTS = ("output_drift_features", "output_drift_readout", "output_drift_joint")


class Net(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        sides = (64, width, width, width)
        hidden = [nn.Sequential(nn.Linear(n, m, bias=False), nn.ReLU()) for n, m in pairwise(sides)]
        self.hidden, self.head = nn.Sequential(*hidden), nn.Linear(width, 10, bias=False)

    def forward(self, x, y):
        return functional.mse_loss(self.head(self.hidden(x)), y)


def digits(count=128):
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.tensor(found.data[:count], dtype=torch.float32)
    return (x - x.mean()) / x.std(), functional.one_hot(torch.tensor(found.target[:count]), 10).float()


def trained(parametrization, width, seed, lr, steps=100):
    """Return `linearity` of the output, the other KEYS of the hidden matrices, and PARTS of the output's change."""
    torch.manual_seed(seed)
    model, (x, y) = Net(width), digits()
    parametrization.init_(model)
    optimizer = torch.optim.SGD(parametrization.param_groups(model, lr=lr, optimizer="sgd"))
    probe = SpectralProbe(model, optimizer, quantities=[*KEYS, *PARTS], every_n_steps=steps, drift_every=1)
    for _ in range(steps):
        with training_step(probe, optimizer):
            model(x, y).backward()
    m = probe.latest
    hidden = [[m.value(key, f"hidden.{k}.0") for k in (1, 2)] for key in KEYS[1:]]
    return m.summary["linearity"], hidden, [m.value(key, "head") for key in PARTS]


@cache
def runs(parametrization, lr):
    """Return what every run found, (SEEDS, WIDTHS)."""
    return [[trained(parametrization, width, seed, lr) for width in WIDTHS] for seed in SEEDS]


def over_widths(parametrization, lr):
    found = runs(parametrization, lr)
    linearity = geometric_mean([np.array([run[0] for run in some]) for some in found])
    others = geometric_mean([np.array([run[1] for run in some]) for some in found])
    return linearity, slopes(WIDTHS, others)


@pytest.mark.slow
def test_ntk_is_lazy():
    """Features move like 1 / sqrt(width), their inner products like 1 / width: half of the terms cancel."""
    linearity, (kernels, features) = over_widths(NTK, 1.0)
    print(linearity, kernels, features)
    assert linearity[-1] < 0.05
    np.testing.assert_allclose(features, -0.5, atol=0.1)
    np.testing.assert_allclose(kernels, -1, atol=0.2)


@pytest.mark.exhaustive
def test_mup_is_not():
    linearity, (kernels, features) = over_widths(MUP, 1.0)
    print(linearity, kernels, features)
    assert (linearity > 0.5).all()
    np.testing.assert_allclose(features, 0, atol=0.1)
    np.testing.assert_allclose(kernels, 0, atol=0.1)


def parts_over_widths(parametrization, lr):
    """Return the parts of the output's change over widths (WIDTHS, PARTS), geometric means over SEEDS."""
    return geometric_mean([np.array([run[2] for run in some]) for some in runs(parametrization, lr)])


@pytest.mark.slow
def test_under_ntk_the_joint_part_vanishes():
    """Appendix B: ``dV dx`` vanishes, the two other parts are of order 1.

    To first order ``dV`` goes like ``x_0`` and ``dx`` like ``V_0``, which are independent: of n terms of the size
    ``n^-3/2`` with random signs the sum is of the order 1 / n.
    """
    parts = parts_over_widths(NTK, 1.0)
    found = slopes(WIDTHS, parts)
    print(parts, found)
    assert found[2] == pytest.approx(-1, abs=0.1)
    np.testing.assert_allclose(found[:2], 0, atol=0.2)  # of two seeds the part of the features scatters by a tenth
    assert (parts[:, :2] > 0.1).all()


@pytest.mark.exhaustive
def test_under_mup_it_does_not():
    parts = parts_over_widths(MUP, 1.0)
    found = slopes(WIDTHS, parts)
    print(parts, found)
    assert found[2] == pytest.approx(0, abs=0.1)
    np.testing.assert_allclose(found[:2], 0, atol=0.2)
    assert (parts > 0.1).all()
