"""Table 1 of "A Spectral Condition for Feature Learning": how norms of W and dW scale with the fans.

Gaussian weights of Parametrization 1, one gradient step on one sample.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.optim import SGD

from spectral_monitor import SpectralProbe

from .perceptron import geometric_mean, param_groups, perceptron, sgd_rule, slopes

WIDTHS = (64, 128, 256, 512, 1024)
SEEDS = range(6)
LAYERS = ("input", "hidden", "readout")

# m = fan_out, n = fan_in
TABLE = {
    "weight_stable_rank": lambda m, n: min(m, n),
    "weight_norm": lambda m, n: math.sqrt(m / n),
    "weight_fro": lambda m, n: math.sqrt(min(m, n) * m / n),
    "weight entry RMS": lambda m, n: math.sqrt(min(m, n) * m / n / (m * n)),
    "update_stable_rank": lambda m, n: 1,
    "update_norm": lambda m, n: math.sqrt(m / n),
    "update_fro": lambda m, n: math.sqrt(m / n),
    "update entry RMS": lambda m, n: math.sqrt(m / n / (m * n)),
}


def sizes(width):
    """Few inputs and outputs: a Gaussian m x n matrix has norm sqrt m + sqrt n, of which one part must prevail."""
    return (3, width, width, 2)


def measured(width, seed):
    """(rows of the table, layers)."""
    generator = torch.Generator().manual_seed(seed)
    network = perceptron(sizes(width), generator)
    optimizer = SGD(param_groups(network, 0.1, sgd_rule))
    probe = SpectralProbe(network, optimizer, every_n_steps=1, quantities=[key for key in TABLE if " " not in key])
    x = torch.randn(1, 3, generator=generator)
    with probe.step():
        (network(x * math.sqrt(3) / x.norm()) - 1).square().mean().backward()
        optimizer.step()
    entries = torch.tensor([math.sqrt(info.fan_in * info.fan_out) for info in probe.latest.layers])
    values = dict(probe.latest.values)
    for name in ("weight", "update"):
        values[f"{name} entry RMS"] = values[f"{name}_fro"] / entries
    return np.array([values[key].numpy() for key in TABLE])


@pytest.fixture(scope="module")
def norms():
    """(widths, rows of the table, layers), geometric means over draws."""
    return np.array([geometric_mean([measured(width, seed) for seed in SEEDS]) for width in WIDTHS])


@pytest.mark.parametrize("key", TABLE)
@pytest.mark.parametrize("layer", LAYERS)
def test_slope(norms, layer, key):
    j = LAYERS.index(layer)
    expected = [TABLE[key](sizes(width)[j + 1], sizes(width)[j]) for width in WIDTHS]
    found = norms[:, list(TABLE).index(key), j]
    assert slopes(WIDTHS, found) == pytest.approx(slopes(WIDTHS, expected), abs=0.15)


def test_update_of_one_sample_has_rank_one(norms):
    np.testing.assert_allclose(norms[:, list(TABLE).index("update_stable_rank")], 1, rtol=1e-4)
