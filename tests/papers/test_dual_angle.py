"""Lemma A.1 of "The Feature Speed Formula": the dual angle is that of the dual kernel, and falls like 1/sqrt(depth).

At infinite width, of one sample, a linear loss and equal contributions, the dual kernel of a layer with n matrices
behind it is ``D A D``. ``D`` is the derivative of the ReLU after the layer, and ``A`` the sum of n terms ``P_i^T P_i``,
P_i a product of i = 0 to n - 1 matrices that are square between the half of the neurons that are on. Such a product has
the moments 1 and i + 1, and of two terms the shorter one decides. So per entry ``M_1 = n / 2`` and
``M_2 = n (n + 1) (2 n + 1) / 12``, and ``cos = M_1 / sqrt(M_2) = sqrt(3 n / ((n + 1) (2 n + 1)))``.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.fitting.power_law import fit_slope

BEHIND, WIDTH, DRAWS = (4, 8, 16, 32), 800, 8
KEYS = ("dual_bfa_cos", "dual_bfk_ratio")


class Chain(nn.Module):
    """Matrices with ReLU between them, and a linear loss."""

    def __init__(self, depth, generator):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)).double()
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=math.sqrt(2 / WIDTH), generator=generator)

    def forward(self, x, y):
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return (self.layers[-1](x) * y).sum()


@cache
def measured() -> np.ndarray:
    """(KEYS, DRAWS, BEHIND), after a small step to which all matrices contribute alike."""
    found = []
    for seed in range(DRAWS):
        generator = torch.Generator().manual_seed(seed)
        model = Chain(max(BEHIND) + 1, generator)
        x, y = torch.randn(2, 1, WIDTH, generator=generator, dtype=torch.float64)
        optimizer = torch.optim.SGD([{"params": [layer.weight]} for layer in model.layers], lr=1.0)
        names = [f"layers.{max(BEHIND) - n}" for n in BEHIND]
        probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=list(KEYS), include=names)
        with probe.step():
            model(x, y).backward()
            for group in optimizer.param_groups:
                group["lr"] = 1e-6 / group["params"][0].grad.square().sum().item()
            optimizer.step()
        found.append([[probe.latest.value(key, name) for name in names] for key in KEYS])
    return np.array(found).transpose(1, 0, 2)


def infinitely_wide(n: int) -> float:
    return math.sqrt(3 * n / ((n + 1) * (2 * n + 1)))


@pytest.mark.slow
def test_the_dual_kernel_tells_the_dual_angle():
    cosine, ratio = measured().mean(axis=1)
    np.testing.assert_allclose(ratio, cosine, rtol=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_both_fall_like_one_over_the_root_of_the_matrices_behind(key):
    found = measured()[KEYS.index(key)]
    logs, expected = np.log(found), np.log([infinitely_wide(n) for n in BEHIND])
    fit = fit_slope(BEHIND, found)
    assert fit.slope == pytest.approx(np.polyfit(np.log(BEHIND), expected, 1)[0], abs=0.05), "-0.43, on the way to -0.5"
    assert fit.high - fit.low < 0.2
    error = logs.std(axis=0, ddof=1) / math.sqrt(DRAWS)
    assert (np.abs(logs.mean(axis=0) - expected) < 3 * error + 0.05).all()


def test_moments_of_the_dual_kernel():
    """The closed form is the sum over pairs of terms, and falls like 1/sqrt(n)."""
    for n in (1, 2, 7, 30):
        second = sum(1 + min(i, j) for i in range(n) for j in range(n)) / 2
        assert infinitely_wide(n) == pytest.approx(n / 2 / math.sqrt(second))
    assert infinitely_wide(10**8) * 10**4 == pytest.approx(math.sqrt(1.5), rel=1e-6)
