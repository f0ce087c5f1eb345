"""A run in which nothing moves: the verdict says why, from real steps."""

from __future__ import annotations

import torch
from torch import nn

from spectral_monitor import SpectralProbe


def sentence(loss_of, takes_step=lambda model: True):
    """The sentence on a network that has taken three steps, or skipped them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe")
    for _ in range(3):
        with probe.step():
            optimizer.zero_grad()
            loss_of(model(torch.randn(16, 8))).backward()
            if takes_step(model):
                optimizer.step()
    (root,) = probe.latest.roots
    assert root.cause == "nothing_trains"
    return root.sentence


def test_a_density_that_is_closed_for_all_samples():
    """As in a NeRF whose densities begin below 0."""
    told = sentence(lambda outputs: (torch.relu(outputs - 100) - 1).square().mean())
    assert told.startswith("no parameter moves: every gradient is 0: the loss does not change with the outputs")


def test_a_step_that_is_skipped_for_gradients_that_are_nan():
    """As a gradient scaler does."""
    told = sentence(
        lambda outputs: outputs.mean() * float("nan"),
        lambda model: all(p.grad.isfinite().all() for p in model.parameters()),
    )
    assert "no optimizer made a step, and gradients are NaN or inf" in told


def test_a_step_that_is_skipped_for_another_reason():
    told = sentence(torch.Tensor.mean, lambda model: False)
    assert told == "no parameter moves: no optimizer made a step that could be seen"
