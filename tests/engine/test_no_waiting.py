"""Inside a measured training step the host hardly ever waits for the device, and never before the update.

On a GPU every ``.item()``, ``bool(tensor)`` or copy to the host waits for all that was queued before. The forward and
the backward pass are never held up; after the update Lanczos looks at its small matrices a few times, for all layers at
once, and all numbers cross in one copy.
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from spectral_monitor import SpectralProbe
from spectral_monitor.engine import Engine

WAITS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy", "nonzero")
LOOKS = {"projected", "_failing_stacks"}
"""Functions that decide whether a norm is good enough, or whether a matrix has to be scaled."""
ON_HOST = {"_lanczos", "_decided", "_unpacked", "balance_ratios", "relative_errors", "known_errors"}
"""Functions that ask tensors of the host."""


class Watch:
    """Which functions of the package wait, by phase of the step."""

    def __init__(self, monkeypatch):
        self.seen: dict[str, Counter] = {}
        self.phase = ""
        for name in WAITS:
            monkeypatch.setattr(Tensor, name, self.watched(getattr(Tensor, name)))
        original_to = Tensor.to

        def to(tensor, *args, **kwargs):
            if any(isinstance(arg, str) and arg == "cpu" for arg in (*args, *kwargs.values())):
                self.note(tensor)
            return original_to(tensor, *args, **kwargs)

        monkeypatch.setattr(Tensor, "to", to)

    def watched(self, original):
        def call(tensor, *args, **kwargs):
            self.note(tensor)
            return original(tensor, *args, **kwargs)

        return call

    def note(self, tensor):
        frame = sys._getframe(2)
        file = frame.f_code.co_filename.replace("\\", "/")
        host = file.endswith(("quantities/readings.py", "engine/results/summary.py")) or "/condition/" in file
        inside = "/spectral_monitor/" in file and not host
        # What is counted on the host, such as indices, is no one's to wait for.
        inside &= frame.f_code.co_name not in ON_HOST
        if self.phase and inside and (tensor.is_floating_point() or tensor.dtype == torch.bool):
            self.seen.setdefault(self.phase, Counter())[frame.f_code.co_name] += 1


def measured(monkeypatch, depth=1, **settings):
    torch.manual_seed(0)
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(130, 130), nn.GELU())]
    model = nn.Sequential(nn.Embedding(50, 96), nn.Linear(96, 130), *hidden, nn.Linear(130, 80))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, **settings)
    tokens = torch.randint(50, (8, 12))

    def step():
        watch.phase = "before"
        with probe.step():
            optimizer.zero_grad()
            loss = model(tokens).square().mean()
            loss.backward()
            watch.phase = "update"
            optimizer.step()
            watch.phase = "rest"
        watch.phase = ""

    watch = Watch(monkeypatch)
    for _ in range(2):  # the first one finds out which outputs last
        watch.seen.clear()
        step()
    assert probe.latest is not None
    return watch.seen


@pytest.mark.parametrize("quantities", ["light", "standard", "full"])
def test_forward_and_backward_wait_for_nothing(monkeypatch, quantities):
    seen = measured(monkeypatch, quantities=quantities)
    assert not seen.get("before")
    assert set(seen["update"]) <= LOOKS


def test_frobenius_norms_wait_for_nothing(monkeypatch):
    seen = measured(monkeypatch, quantities=["weight_fro", "update_fro", "contribution", "feature_rms"])
    assert not seen.get("update")


@pytest.mark.parametrize("depth", [1, 12])
@pytest.mark.parametrize(("quantities", "most"), [("light", 6), ("standard", 10)])
def test_a_measured_step_waits_at_most_ten_times(monkeypatch, quantities, most, depth):
    seen = measured(monkeypatch, depth, quantities=quantities, drift_every=100)
    assert sum(count for phase in seen.values() for count in phase.values()) <= most, seen


def test_what_crosses_to_the_host_at_the_end_does_not_grow_with_the_number_of_layers():
    def crossings(depth):
        with pytest.MonkeyPatch.context() as patch:
            seen = measured(patch, depth, quantities="standard", drift_every=100)
        return {name: count for name, count in seen["rest"].items() if name not in LOOKS}

    assert crossings(1) == crossings(6)


def test_waiting_is_noticed(monkeypatch):
    original = Engine._ready

    def waiting(self, optimizer):
        float(next(self.model.parameters()).sum())
        return original(self, optimizer)

    waiting.__code__ = waiting.__code__.replace(co_filename=original.__code__.co_filename)
    monkeypatch.setattr(Engine, "_ready", waiting)
    assert "waiting" in measured(monkeypatch, quantities="light")["update"]
