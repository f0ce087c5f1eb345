"""The multipliers of first steps, before anything has been measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spectral_monitor import LRCorrection, SpectralProbe
from spectral_monitor.correction.corrector import Corrector
from spectral_monitor.correction.peak_rates import CONSTANT
from spectral_monitor.correction.wanted import TRIAL
from spectral_monitor.layers import dissect
from tests.one_step import training_step


def first(network, *optimizers):
    return Corrector(LRCorrection("target", size="lr"), dissect(network).layers, optimizers).multipliers


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))


@pytest.mark.parametrize(
    ("kinds", "multiplier"),
    [
        ([torch.optim.Adam], 1 / 256),
        ([torch.optim.SGD], TRIAL),
        ([torch.optim.SGD, torch.optim.AdamW], 1 / 256),
        ([torch.optim.Muon, torch.optim.AdamW], 1 / 256),
        ([torch.optim.Muon], 1 / (0.2 * 16)),
        ([], TRIAL),
    ],
)
def test_what_no_optimizer_has_yet_begins_as_under_those_there_are(kinds, multiplier):
    network = perceptron()
    optimizers = [kind([layer.weight], lr=0.1) for kind, layer in zip(kinds, (network[0], network[4]), strict=False)]
    assert first(network, *optimizers)["2"] == pytest.approx(multiplier)


@pytest.mark.parametrize(("lr", "multiplier"), [(0.1, CONSTANT * 1e-3), (1e-6, CONSTANT), (0.0, TRIAL)])
def test_first_steps_in_the_size_of_gradients_are_small(lr, multiplier):
    """At a rate of 1e-4, or the user's where that is smaller; where that is 0 it is not known yet."""
    network = perceptron()
    correction = LRCorrection("target", size=1 / 8)
    found = Corrector(correction, dissect(network).layers, [torch.optim.SGD(network.parameters(), lr=lr)]).multipliers
    assert [found[name] for name in "024"] == pytest.approx([multiplier] * 3)


def test_a_layer_unfrozen_under_adam_does_not_leap():
    network = perceptron()
    network[2].requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], lr=0.1)
    rule = LRCorrection("target", size="lr")
    probe = SpectralProbe(
        network, optimizer, mode="correct", every_n_steps=50, quantities=rule.quantities, correction=rule
    )
    began = float(torch.linalg.matrix_norm(network[2].weight.detach(), 2))
    for step in range(8):
        if step == 6:
            optimizer.add_param_group({"params": list(network[2].requires_grad_(True).parameters())})
        before = network[2].weight.detach().clone()
        with training_step(probe, optimizer):
            (network(torch.randn(32, 64)) - 1).square().mean().backward()
        moved = float(torch.linalg.matrix_norm(network[2].weight.detach() - before, 2))
        assert moved <= 0.101 * began**0.5, "the largest update that there is"
        assert (moved > 0) == (step >= 6)
