"""Targets of a regression beyond the range of the activation before the loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spectral_monitor.measurement import LossFault
from tests.capture.test_loss_input import backward, fault_at

STANDARDIZED = torch.linspace(-1.7, 1.7, 60)
IMAGES = torch.linspace(0, 1, 60)


def outputs():
    return nn.Linear(4, 1)(torch.ones(60, 4))


FAR = {
    "negative ones behind a ReLU": lambda: F.mse_loss(outputs()[:, 0].relu(), STANDARDIZED),
    "standardized ones behind a tanh": lambda: F.mse_loss(outputs().tanh()[:, 0], 1.5 * STANDARDIZED),
    "standardized ones behind a sigmoid": lambda: F.smooth_l1_loss(outputs().sigmoid()[:, 0], STANDARDIZED),
    "images up to 255 behind a sigmoid": lambda: F.huber_loss(outputs()[:, 0].sigmoid(), 255 * IMAGES),
    "beside another loss": lambda: F.mse_loss(outputs()[:, 0].relu(), STANDARDIZED) + outputs().square().mean(),
}
NEAR = {
    "images behind a sigmoid": lambda: F.mse_loss(outputs()[:, 0].sigmoid(), IMAGES),
    "counts behind a ReLU": lambda: F.mse_loss(outputs()[:, 0].relu(), 255 * IMAGES),
    "noisy images behind a ReLU": lambda: F.mse_loss(outputs()[:, 0].relu(), IMAGES - 0.1),
    "images between -1 and 1 behind a tanh": lambda: F.mse_loss(outputs()[:, 0].tanh(), 2 * IMAGES - 1),
    "standardized ones without an activation": lambda: F.mse_loss(outputs()[:, 0], STANDARDIZED),
    "a range that is scaled": lambda: F.mse_loss(4 * outputs()[:, 0].tanh(), STANDARDIZED),
    "the other way round": lambda: F.mse_loss(STANDARDIZED, outputs()[:, 0].relu()),
    "zeros": lambda: F.mse_loss(outputs()[:, 0].relu(), torch.zeros(60)),
}


@pytest.mark.parametrize("loss", FAR.values(), ids=FAR)
def test_targets_out_of_reach_are_told(loss):
    assert fault_at(loss()) == LossFault.REACH
    assert fault_at(backward(loss())) == LossFault.NONE, "the graph has lost them"
    assert fault_at(loss(), reads_targets=False) == LossFault.NONE, "they differ between processes"


@pytest.mark.parametrize("loss", NEAR.values(), ids=NEAR)
def test_targets_within_reach_are_not(loss):
    assert fault_at(loss()) == LossFault.NONE
