"""What is smoothed and what is followed, and how fast."""

from __future__ import annotations

import math

import pytest
import torch

from spectral_monitor.correction.smoothing import MIN_PACE, Tracker


def levels(values):
    tracker = Tracker()
    return [tracker.see(value) for value in values]


def test_the_first_value_counts_in_full():
    assert math.isnan(Tracker().level)
    assert levels([3.5]) == [3.5]


def test_a_drift_is_followed_in_full():
    """Errors all go one way from the first: nothing of them is left."""
    assert levels([float(x) for x in range(10)]) == pytest.approx(list(range(10)))


def test_a_step_is_followed_within_a_few_values():
    found = levels([0.0] * 5 + [1.0] * 5)
    assert found[5] == 1.0
    assert found[-1] == pytest.approx(1.0)


def test_noise_is_averaged():
    noise = torch.randn(400, generator=torch.Generator().manual_seed(0)).tolist()
    found = torch.tensor(levels(noise)[50:])
    assert float(found.std()) < 0.75 * float(torch.tensor(noise).std())
    alternating = levels([(-1.0) ** k for k in range(200)])
    assert max(map(abs, alternating[100:])) <= MIN_PACE / (2 - MIN_PACE) + 0.1


def test_it_goes_on_from_its_state():
    values = [0.0, 1.0, 0.5, 0.7, -0.2, 0.9]
    tracker = Tracker()
    for value in values[:3]:
        tracker.see(value)
    again = Tracker(*tracker.state())
    assert [again.see(value) for value in values[3:]] == levels(values)[3:]
