"""Which steps are measured, by a number or in words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spectral_monitor import LRCorrection, SpectralProbe
from spectral_monitor.engine.schedule import Schedule


@pytest.mark.parametrize(
    ("given", "until", "expected"),
    [
        (1, 4, [1, 2, 3, 4]),
        (50, 160, [50, 100, 150]),
        ("every 50", 160, [50, 100, 150]),
        ("1,2,4,8,...,every 100", 320, [1, 2, 4, 8, 16, 32, 64, 100, 200, 300]),
        ("1, 10, 100, ..., every 1000", 2500, [1, 10, 100, 1000, 2000]),
        ("2, 3, ..., every 12", 30, [2, 3, 4, 6, 9, 12, 24]),
        ("5, 7, every 6", 20, [5, 6, 7, 12, 18]),
        ("1, 10, 30", 100, [1, 10, 30]),
        ("200, every 50", 210, [50, 100, 150, 200]),
    ],
)
def test_steps_in_words(given, until, expected):
    schedule = Schedule.of(given)
    assert [step for step in range(1, until + 1) if schedule.due(step)] == expected


@pytest.mark.parametrize(
    "given",
    [
        0,
        -3,
        True,
        2.5,
        None,
        "5",
        "",
        "often",
        "every",
        "every 0",
        "every 5, 7",
        "4, 2",
        "2, 2",
        "0, 1",
        "1, ..., every 9",
        "1, 2, ...",
        "..., every 9",
        "1, 2, ..., 9",
        "1,, 2",
        "-1, 5",
    ],
)
def test_what_stands_for_nothing_is_refused(given):
    with pytest.raises(ValueError, match=r"every_n_steps must be an integer >= 1, or steps in words such as .*; got"):
        Schedule.of(given)


def steps_measured(every, **more):
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    probe = SpectralProbe(net, optimizer, every_n_steps=every, quantities="light", **more)
    for _ in range(30):
        with probe.step():
            optimizer.zero_grad()
            net(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    return [measurement.step for measurement in probe.measurements]


def test_the_probe_measures_these_steps():
    assert steps_measured("1, 3, ..., every 20") == [1, 3, 9, 20]
    assert steps_measured("5, 6") == [5, 6]


def test_a_correction_sees_the_powers_of_two_before():
    correction = {"mode": "correct", "correction": LRCorrection("target")}
    assert steps_measured("6, every 20", **correction) == [1, 2, 4, 6, 8, 16, 20]
