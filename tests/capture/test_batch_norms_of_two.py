"""Batch norms that see two values of each channel."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spectral_monitor.capture.replay.loss_faults import normalizes_pairs
from spectral_monitor.measurement import LossFault
from tests.capture.test_loss_input import fault_at

FLAT = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8))
IMAGES = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
POOLED = nn.Sequential(IMAGES, nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))


@pytest.mark.parametrize(
    ("network", "shape", "pairs"),
    [
        (FLAT, (2, 4), True),
        (FLAT, (3, 4), False),
        (IMAGES, (2, 1, 8, 8), False),  # many values of each channel
        (IMAGES, (2, 1, 5, 5), False),  # one of two norms
        (POOLED, (2, 1, 8, 8), False),  # one of three, as in a pyramid of poolings
        (nn.Linear(4, 2), (2, 4), False),
    ],
)
def test_most_batch_norms_see_two_values(network, shape, pairs):
    loss = network(torch.randn(shape)).square().mean()
    assert normalizes_pairs(loss) == pairs
    assert (fault_at(loss) == LossFault.PAIRS) == pairs


def test_batch_norms_in_evaluation_mode_do_not_count():
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).eval()
    assert not normalizes_pairs(network(torch.randn(2, 4)).square().mean())
