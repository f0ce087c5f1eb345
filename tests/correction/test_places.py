"""Outputs of what a bias is added to, which its learning rate goes by."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spectral_monitor.correction import spectral_param_groups


class Grouped(nn.Module):
    """Fewer keys than queries, one bias for all."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Parameter(torch.randn(n, 16)) for n in (32, 8, 8))
        self.bias = nn.Parameter(torch.zeros(48))

    def forward(self, x):
        return x @ torch.cat([self.query, self.key, self.value]).T + self.bias


class Apart(nn.Module):
    """A vector that is as long as nothing beside it."""

    def __init__(self):
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.randn(12, 16)), nn.Parameter(torch.randn(20, 16))
        self.scale = nn.Parameter(torch.ones(24))


@pytest.mark.parametrize(
    ("make", "name", "rate"),
    [
        (lambda: nn.MultiheadAttention(32, 4), "in_proj_bias", 32),
        (lambda: nn.MultiheadAttention(32, 4, kdim=16, vdim=16), "in_proj_bias", 32),
        (lambda: nn.MultiheadAttention(32, 4, kdim=16, vdim=8), "out_proj.bias", 32),
        (lambda: nn.Linear(16, 24), "bias", 24),
        (lambda: nn.LSTM(8, 20), "bias_ih_l0", 20),
        (Grouped, "bias", 32),
        (Apart, "scale", 24),
    ],
)
def test_a_bias_goes_by_the_outputs_of_one_matrix(make, name, rate):
    network = nn.ModuleDict({"part": make(), "head": nn.Linear(32, 50)})
    groups = spectral_param_groups(network, lr=1.0, optimizer="sgd")
    rates = {parameter: group["lr"] for group in groups for parameter in group["parameter_names"]}
    assert rates[f"part.{name}"] == rate
