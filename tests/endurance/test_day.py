"""A day of training: 86,400 steps that do no work, one of them a simulated second; every 50th is measured."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.engine import guards, overhead_budget
from spectral_monitor.reporting import JSONLinesSink
from tests.endurance.endure import hooks, resident
from tests.one_step import training_step

STEPS, EVERY, SAMPLE, HISTORY = 86_400, 50, 4_000, 20
SETTLED = STEPS // 4
LIMIT = 1024
"""Bytes per measured step."""


class Clock:
    """A second each step."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.exhaustive
def test_memory_is_flat_for_a_day(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(overhead_budget, "perf_counter", clock)
    monkeypatch.setattr(guards, "time", SimpleNamespace(perf_counter=clock))
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    sink = JSONLinesSink(tmp_path / "run.jsonl")
    settings = {"every_n_steps": EVERY, "history": HISTORY, "max_overhead": 0.01, "mode": "observe", "sinks": [sink]}
    probe = SpectralProbe(model, optimizer, **settings)
    x, samples, measured = torch.randn(8, 6), [], 0
    for step in range(1, STEPS + 1):
        clock.now += 1.0
        if step % EVERY:
            with probe.step():
                pass
        else:
            with training_step(probe, optimizer):
                model(x).square().mean().backward()
            measured += 1
            assert probe.latest.step == step
        if step % SAMPLE == 0:
            gc.collect()
            samples.append((measured, resident(), len(gc.get_objects())))
            sink.path.unlink()
    assert clock.now == pytest.approx(24 * 3600)
    assert measured == STEPS // EVERY
    assert len(probe.measurements) == HISTORY
    assert hooks(model, optimizer) == {}
    settled = np.array(samples[len(samples) * SETTLED // STEPS :])
    assert abs(np.polyfit(settled[:, 0], settled[:, 1], 1)[0]) < LIMIT
    assert np.ptp(settled[:, 2]) < 100, "objects"
