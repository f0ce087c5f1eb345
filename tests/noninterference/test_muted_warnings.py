"""Warnings of the user's forward are shown as often as without a monitor."""

from __future__ import annotations

import threading
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralMonitorWarning, SpectralProbe
from spectral_monitor.state.muted_warnings import muted_warnings


class TimeFirst(nn.Module):
    """Warns of the size of its batch: of a replay that takes some of its samples, too."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x):
        warnings.warn(f"a batch of {len(x)}", stacklevel=1)
        return self.layers(x)


def steps(monitored, count=4):
    torch.manual_seed(0)
    model = TimeFirst()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe") if monitored else None
    for _ in range(count):
        optimizer.zero_grad()
        with nullcontext() if probe is None else probe.step():
            model(torch.randn(64, 4)).square().mean().backward()
            optimizer.step()
    return probe


@pytest.mark.parametrize("action", ["always", "default"])
def test_a_replay_adds_none_and_takes_none_away(action):
    heard = {}
    for monitored in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            globals().pop("__warningregistry__", None)
            probe = steps(monitored)
        heard[monitored] = [str(w.message) for w in caught if not issubclass(w.category, DeprecationWarning)]
    assert heard[True] == heard[False] == ["a batch of 64"] * (4 if action == "always" else 1)
    assert probe.latest.value("feature_change", "layers.2") > 0


def forward():
    warnings.warn("of a forward", stacklevel=1)
    warnings.warn("of the monitor", SpectralMonitorWarning, stacklevel=1)
    thread = threading.Thread(target=warnings.warn, args=("of a thread",))
    thread.start()
    thread.join()
    raise RuntimeError


def test_the_monitors_own_and_those_of_other_threads_are_heard():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = warnings.showwarning
        with pytest.raises(RuntimeError), muted_warnings():
            forward()
    assert [str(w.message) for w in caught] == ["of the monitor", "of a thread"]
    assert warnings.showwarning is before


def test_threads_that_run_something_again_at_a_time_leave_nothing():
    """The first to begin is the first to end."""
    first, second = muted_warnings(), muted_warnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before, ended, begun = warnings.showwarning, threading.Event(), threading.Event()

        def other():
            with second:
                begun.set()
                ended.wait(10)
                warnings.warn("of a forward", stacklevel=1)

        thread = threading.Thread(target=other)
        with first:
            thread.start()
            assert begun.wait(10)
        warnings.warn("of this thread", stacklevel=1)
        ended.set()
        thread.join()
        warnings.warn("after both", stacklevel=1)
        assert warnings.showwarning is before
    assert [str(w.message) for w in caught] == ["of this thread", "after both"]
