"""Prop. 5.1 of "The Feature Speed Formula": the cosine of the backward-feature angle falls like 1/sqrt(depth).

At infinite width, of one sample and with equal contributions, the kernel of a ReLU chain of v trained matrices has
the moments ``M_1 = v`` and ``M_2 = v (2 v^2 + 1) / 3``. The second is the sum of ``1 + 2 (v - the later one)`` over
pairs of matrices, because each matrix with ReLU adds 2 to the second moment of a product. So
``cos = M_1 / sqrt(M_2) = sqrt(3 v / (2 v^2 + 1))``.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest

from spectral_monitor.fitting.power_law import fit_slope

from .residual import take_step

# torch.func.jvp, the first time it is used
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

LENGTHS, WIDTH, DRAWS = (4, 8, 16, 32), 600, 12


@cache
def cosines(residual: bool) -> list[list[float]]:
    """For each draw the probe's cosine at the last node, after v trained matrices each."""
    found = []
    for seed in range(DRAWS):
        row = []
        for v in LENGTHS:
            beta = 1 / math.sqrt(v) if residual else 1.0
            step = take_step(beta, 10 * seed + v, m=WIDTH, L=v + 2, eta=1e-6, windows=(v,))
            row.append(step.at("bfa_cos", v))
        found.append(row)
    return found


def infinitely_wide(v: int) -> float:
    return math.sqrt(3 * v / (2 * v**2 + 1))


@pytest.mark.slow
def test_cosine_of_a_chain_falls_like_one_over_the_root_of_the_depth():
    fit = fit_slope(LENGTHS, cosines(residual=False))
    assert fit.slope == pytest.approx(-0.5, abs=0.1)
    assert fit.low < -0.5 < fit.high
    assert fit.high - fit.low < 0.2


@pytest.mark.slow
def test_cosine_of_a_chain_is_that_of_infinite_width():
    logs = np.log(cosines(residual=False))
    expected = np.log([infinitely_wide(v) for v in LENGTHS])
    error = logs.std(axis=0, ddof=1) / math.sqrt(DRAWS)
    assert (np.abs(logs.mean(axis=0) - expected) < 3 * error + 0.05).all()


@pytest.mark.slow
def test_cosine_of_a_residual_net_does_not_fall():
    """With branches of 1/sqrt(L), as in Table 2 of the paper; the stream's nodes are cut nodes."""
    fit = fit_slope(LENGTHS, cosines(residual=True))
    assert fit.slope == pytest.approx(0, abs=0.1)
    assert fit.high - fit.low < 0.2


def test_moments_of_the_kernel():
    """The closed form is the sum over pairs of matrices."""
    for v in (1, 2, 7, 30):
        second = sum(1 + 2 * (v - max(i, j)) for i in range(1, v + 1) for j in range(1, v + 1))
        assert infinitely_wide(v) == pytest.approx(v / math.sqrt(second))
