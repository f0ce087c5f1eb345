"""A list of quantities pays for those and no others, counted in estimates, forwards and hooks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.engine.features import stage as activations
from spectral_monitor.engine.weights import norms

WIDTH = 80  # above the size at which norms are exact, so that estimates are Lanczos runs


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        type(self).seen += 1
        return self.net(x).square().mean()

    seen = 0


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize(
    ("quantities", "estimates", "forwards", "hooked"),
    [
        (["contribution"], 0, 1, False),
        (["weight_fro", "update_fro"], 0, 1, False),
        (["lr"], 0, 1, False),
        (["update_angle", "radial", "decay_share"], 0, 1, False),
        (["update_norm"], 2, 1, False),
        (["weight_norm", "update_norm", "update_ratio", "update_stable_rank"], 4, 1, False),
        ("light", 6, 1, False),
        (["feature_rms"], 0, 1, True),
        (["input_stable_rank"], 2, 1, True),
        (["backward_stable_rank"], 2, 1, True),
        (["feature_change"], 0, 2, True),
        (["bfa", "bfa_cos", "sensitivity"], 0, 2, True),
        (["alignment"], 2, 1, True),
        (["update_alignment"], 2, 1, True),
        (["feature_drift"], 0, 2, True),
        ("standard", 10, 2, True),
    ],
)
def test_only_what_is_asked_for_is_paid_for(monkeypatch, quantities, estimates, forwards, hooked):
    torch.manual_seed(0)
    model = Counted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=quantities, exclude=["*.bias"])
    runs = []

    def counting(stacks, tol, **rest):
        runs.extend(A.shape[0] for A in stacks)
        return original(stacks, tol, **rest)

    original = norms.spectral_estimates
    monkeypatch.setattr(norms, "spectral_estimates", counting)
    monkeypatch.setattr(activations, "spectral_estimates", counting)
    Counted.seen = 0
    with probe.step():
        model(torch.randn(100, WIDTH)).backward()
        assert (hooks(model) > 0) == hooked
        optimizer.step()
    assert sum(runs) == estimates
    assert Counted.seen == forwards
    assert hooks(model) == 0
    if isinstance(quantities, list):
        assert list(probe.latest.values) == [key for key in probe.latest.values if key in quantities]
        assert len(probe.latest.values) == len(quantities)
    assert any(bool(values.isfinite().any()) for values in probe.latest.values.values())


def test_an_unmeasured_step_registers_nothing():
    model = Counted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=3)
    with probe.step():  # the start of feature_drift
        model(torch.randn(4, WIDTH)).backward()
        optimizer.step()
    with probe.step():
        model(torch.randn(4, WIDTH)).backward()
        assert hooks(model) == 0
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        optimizer.step()
    assert probe.latest is None
