"""The example of reinforcement learning: the environment, advantages by their definition, and a short run."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import reinforcement_learning as example
import torch

pytestmark = pytest.mark.filterwarnings("ignore")


def one_step(state, push):
    """Of a cart with a pole, by the two equations of motion as they are published, one after the other."""
    x, v, angle, spin = state
    force, mass, pole, half = 10.0 if push else -10.0, 1.1, 0.1, 0.5
    inner = (force + pole * half * spin**2 * math.sin(angle)) / mass
    turn = (9.8 * math.sin(angle) - math.cos(angle) * inner) / (half * (4 / 3 - pole * math.cos(angle) ** 2 / mass))
    pull = inner - pole * half * turn * math.cos(angle) / mass
    return [x + 0.02 * v, v + 0.02 * pull, angle + 0.02 * spin, spin + 0.02 * turn]


def test_the_environment():
    torch.manual_seed(0)
    poles = example.Poles()
    states = [row.tolist() for row in poles.state]
    pushes = torch.randint(2, (5, example.POLES))
    for push in pushes:
        states = [one_step(state, int(p)) for state, p in zip(states, push, strict=True)]
        fell, done, _ = poles.step(push)
        assert not fell.any()
        assert not done.any()
    np.testing.assert_allclose(poles.state.numpy(), states, rtol=1e-4, atol=1e-6)


def test_poles_fall_and_begin_again():
    torch.manual_seed(0)
    poles, ones = example.Poles(), torch.ones(example.POLES, dtype=torch.long)
    for _ in range(60):
        before = poles.state
        fell, done, age = poles.step(ones)
        assert torch.equal(fell, done)
        assert (age[done] < 20).all()
        assert (poles.state[done].abs() <= 0.05).all()
        assert (poles.age[done] == 0).all()
        assert (before[:, 2].abs() <= math.radians(12)).all()


def test_advantages_are_sums_of_surprises():
    """Each as the sum that defines it, up to the end of its episode."""
    torch.manual_seed(0)
    values, ends = torch.randn(8, 3, dtype=torch.float64), torch.rand(7, 3) < 0.3
    assert ends.any()
    found = example.advantages(values, ends)
    for k in range(3):
        for t in range(7):
            total, weight = 0.0, 1.0
            for s in range(t, 7):
                following = 0.0 if ends[s, k] else values[s + 1, k].item()
                total += weight * (1 + 0.98 * following - values[s, k].item())
                weight *= 0.98 * 0.95
                if ends[s, k]:
                    break
            assert found[t, k].item() == pytest.approx(total, rel=1e-12)


def test_a_short_run(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script", "--rounds", "3"])
    example.main()
    out = capsys.readouterr().out
    assert "all 6 layers healthy" in out
    assert "poles stood for" in out


@pytest.mark.slow
def test_it_learns_and_names_a_rate_that_is_too_large(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script"])
    example.main()
    stood = int(capsys.readouterr().out.rpartition("poles stood for ")[2].split()[0])
    assert stood > 150
    monkeypatch.setattr(sys, "argv", ["script", "--rounds", "9", "--lr", "0.1"])
    example.main()
    assert "steps are too large" in capsys.readouterr().out
