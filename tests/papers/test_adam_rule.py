"""A trap seen in the wild: under Adam, the learning rates that the spectral condition gives for SGD grow with width.

Adam moves an entry by about lr whatever its gradient, so lr fan_out / fan_in makes the update's natural norm
proportional to fan_out; lr / fan_in is right. A 3-layer perceptron on scikit-learn's digits at its 5th step.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam

from spectral_monitor import SpectralProbe
from tests.one_step import training_step

from .perceptron import adam_rule, geometric_mean, param_groups, perceptron, sgd_rule, slopes

WIDTHS = (128, 512, 2048)
SEEDS = (0, 1, 2)
STEPS, BATCH = 5, 256
WRONG_HIDDEN = np.array([0.048, 0.157, 0.635])
RIGHT_HIDDEN = np.array([0.046, 0.045, 0.045])
"""Found in the wild; with which data, batch and learning rate is not known, so only the trend can be compared."""


@pytest.fixture(scope="module")
def digits():
    x, y = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    x = x.float() / 16
    return ((x - x.mean(0)) / x.std(0).clamp(min=1e-6)).clamp(-3, 3), y


def natural_updates(digits, width, optimizer_class, lr, rule, seed):
    """``update_natural`` of the input, hidden and readout matrix at the 5th step."""
    generator = torch.Generator().manual_seed(seed)
    network = perceptron((64, width, width, 10), generator)
    optimizer = optimizer_class(param_groups(network, lr, rule))
    probe = SpectralProbe(network, optimizer, every_n_steps=STEPS, quantities=["update_natural"])
    x, y = digits
    for _ in range(STEPS):
        rows = torch.randint(len(x), (BATCH,), generator=generator)
        with training_step(probe, optimizer):
            cross_entropy(network(x[rows]), y[rows]).backward()
    assert len(probe.measurements) == 1
    return probe.latest.values["update_natural"].numpy()


def over_widths(digits, *recipe):
    """(widths, layers), geometric means over draws."""
    return np.array(
        [geometric_mean([natural_updates(digits, width, *recipe, seed) for seed in SEEDS]) for width in WIDTHS]
    )


@pytest.mark.slow
def test_adam_with_the_rule_of_sgd_grows_like_width(digits):
    natural = over_widths(digits, Adam, 1e-3, sgd_rule)
    into, hidden, readout = slopes(WIDTHS, natural)
    assert into == pytest.approx(1, abs=0.2)
    assert hidden == pytest.approx(1, abs=0.2)
    assert abs(readout) < 0.15  # its fan_out, 10, does not grow: there the two rules agree
    np.testing.assert_allclose(natural[:, 1], WRONG_HIDDEN, rtol=0.3)


@pytest.mark.slow
def test_adam_with_one_over_fan_in_is_flat(digits):
    natural = over_widths(digits, Adam, 1e-3 * WIDTHS[0], adam_rule)
    assert np.abs(slopes(WIDTHS, natural)).max() < 0.15
    np.testing.assert_allclose(natural[:, 1], RIGHT_HIDDEN, rtol=0.3)


@pytest.mark.slow
def test_sgd_with_its_own_rule_is_flat(digits):
    assert np.abs(slopes(WIDTHS, over_widths(digits, SGD, 0.1, sgd_rule))).max() < 0.15
