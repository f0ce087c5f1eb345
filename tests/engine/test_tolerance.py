"""How close norms of matrices must be, and that a solve is told."""

import pytest
import torch
from torch import nn

from spectral_monitor.engine.settings import Settings
from tests.one_step import after_one_step


@pytest.mark.parametrize("tol", [0, 1.0, True, "0.01"])
def test_what_is_no_tolerance_is_refused(tol):
    with pytest.raises(ValueError, match="tol must be a number in"):
        Settings(tol=tol)


@pytest.mark.parametrize("quantities", ["light", "standard"])
@pytest.mark.parametrize(("given", "tolerance"), [({}, 0.05), ({"tol": 0.2}, 0.2)])
def test_the_solve_of_a_measured_step_has_that_tolerance(monkeypatch, quantities, given, tolerance):
    from spectral_monitor.engine.weights import norms

    solve, seen = norms.spectral_estimates, set()

    def noted(stacks, tol, **kwargs):
        seen.add(tol)
        return solve(stacks, tol, **kwargs)

    monkeypatch.setattr(norms, "spectral_estimates", noted)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    after_one_step(
        model, lambda: model(torch.ones(4, 8)).sum(), quantities=quantities, every_n_steps=1, mode="observe", **given
    )
    assert seen == {tolerance}
