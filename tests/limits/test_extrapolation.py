"""Extrapolation to infinite width where the limit is known: how often the interval holds it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from spectral_monitor.limits import LinearPopulations, WeightedNeurons, extrapolate, finite_width, infinite_width

from .perceptron import losses

WIDTHS = (64, 128, 256, 512)
DRAWS, SEEDS = 20, 6
XS, YS = [1.0, -1.0, 1.0, 1.0, -1.0], [1.0, -1.0, -1.0, 1.0, 1.0]


def loss_of(step):
    """The fifth loss of a limit."""
    for x, y in zip(XS, YS, strict=True):
        f = step(torch.tensor([[x]]), lambda f, y=y: f - y).item()
    return (f - y) ** 2 / 2


def linear(network):
    """The loss of a linear network after clipped, decayed steps on batches."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    y = x[:, :2] - 0.5 * x[:, 2:4]
    for _ in range(8):
        network = network.step(x, (network(x) - y) / 8, 0.2, clip=2.0, decay=0.05)
    return (network(x) - y).square().mean().item()


def drawn_linear(n, seed):
    generator = torch.Generator().manual_seed(seed)
    return linear(finite_width(n, 5, 2, generator=generator, dtype=torch.float64))


CASES = {
    "linear, one hidden layer": (drawn_linear, lambda: linear(infinite_width(5, 2, dtype=torch.float64))),
    "tanh, one hidden layer": (
        lambda n, seed: losses(n, 1, torch.tanh, 0.5, XS, YS, seed)[-1],
        lambda: loss_of(WeightedNeurons(1, 1, torch.tanh, lr=0.5).step),
    ),
    "linear, two hidden layers": (
        lambda n, seed: losses(n, 2, lambda z: z, 0.5, XS, YS, seed)[-1],
        lambda: loss_of(LinearPopulations(1, lr=0.5, examples=5).step),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_interval_holds_the_limit_in_18_of_20_draws(case):
    draw, limit = CASES[case]
    wanted, held, apart = limit(), 0, 0
    for start in range(0, DRAWS * SEEDS, SEEDS):
        rows = [[draw(n, 1000 * seed + n) for n in WIDTHS] for seed in range(start, start + SEEDS)]
        found = extrapolate(WIDTHS, rows)
        held += found.low <= wanted <= found.high
        apart += found.low <= np.mean([row[0] for row in rows]) <= found.high
    assert held >= 18
    print(case, held, "of 20; the narrowest width's mean is inside", apart)


def test_a_line_in_1_over_n_is_found_and_a_curve_is_cut():
    line = [[2 + 5 / n + noise / n**0.5 for n in WIDTHS] for noise in (-1.0, 1.0, 0.0)]
    found = extrapolate(WIDTHS, line)
    assert found.value == pytest.approx(2)
    assert found.slope == pytest.approx(5)
    assert found.widths == WIDTHS
    curved = [[2 + 5 / n + 4000 / n**2 + noise / n for n in (*WIDTHS, 1024)] for noise in (-0.1, 0.1, 0.0)]
    found = extrapolate((*WIDTHS, 1024), curved)
    assert found.widths == (256, 512, 1024)
    assert found.value == pytest.approx(2, abs=0.02)
    assert found.distance(2 * found.value) == pytest.approx(1)


def test_what_cannot_be_said():
    assert extrapolate((64, 128), [[1.0, 2.0]] * 2).reason == "2 widths, at least 3 are needed"
    found = extrapolate(WIDTHS, [[1.0, 2.0, 3.0, math.nan], [1.0, 2.0, 3.0, 4.0]])
    assert found.reason == "1 seeds with values at all widths, at least 2 are needed"
    assert str(found).startswith("no limit: 1 seeds")
    assert math.isnan(found.value)
