"""A batch that holds NaN or inf is told from steps that are too large."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from spectral_monitor import SpectralProbe
from spectral_monitor.condition.whole_network import WholeNetwork
from tests.one_step import training_step

BATCH = "the batch holds NaN, inf"


def train(steps, spoil, lr=1e-3):
    """Train a perceptron and return the verdict that it diverged; ``spoil`` is given the last batch but one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, verbose=False)
    for step in range(steps):
        x, y = torch.randn(32, 16), torch.randint(4, (32,))
        if step == steps - 2:
            spoil(x)
        with training_step(probe, optimizer):
            cross_entropy(model(x), y).backward()
    return {verdict.cause: verdict for verdict in probe.verdicts}["diverged"], probe


@pytest.mark.parametrize("steps", [2, 5])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_batch_that_is_not_finite(steps, value):
    """It is still said at the next step, when weights are lost, and after that by a run that goes on."""
    verdict, probe = train(steps, lambda x: x[3].fill_(value))
    assert probe.latest.step == steps
    assert BATCH in verdict.sentence
    assert verdict.remedy.action == "check"
    resumed = WholeNetwork()
    assert not resumed.history.bad_batch
    resumed.load_state_dict(probe.state_dict()["state"]["oversight"]["judge"]["whole"])
    assert resumed.history.bad_batch


def test_steps_that_are_too_large():
    verdict, _ = train(30, lambda x: None, lr=1e4)
    assert BATCH not in verdict.sentence
    assert "divide every learning rate" in verdict.sentence
