"""Lightning Fabric: the example trains bit for bit as it does without the probe, and everything is measured."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from conftest import TESTS
from recorder import Run, differences, of_module, of_optimizer, of_random

from spectral_monitor.quantities import QUANTITIES

STEPS = 8
ROUNDED = "its change is too close to the rounding of its outputs"


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_training_is_the_same(example, precision):
    fabric, runs = example("fabric"), []
    for every in (None, 1, 4):
        net, optimizer, probe = fabric.train(STEPS, 32, every, precision)
        run = Run()
        run.add("end", of_module(net), of_optimizer(optimizer.optimizer), of_random())
        runs.append(run)
        if every is not None:
            assert [m.step for m in probe.measurements] == list(range(every, STEPS + 1, every))
            assert [info.name for info in probe.latest.layers if info.role != "vector"] == ["0", "2", "4"]
            assert_all_there(probe.measurements[0], bf16="bf16" in precision)
    assert runs[0].tensors("optimizer") == 18
    assert runs[0].tensors("parameter") == 6
    for run in runs[1:]:
        assert not differences(runs[0], run)


def assert_all_there(m, bf16):
    for key in QUANTITIES:
        for layer in ("0", "2", "4"):
            reason = m.why(key, layer)
            assert math.isfinite(m.value(key, layer)) or (bf16 and reason == ROUNDED), (key, layer, reason)


def test_a_longer_training_would_differ(example):
    """The comparison above can fail."""
    fabric, runs = example("fabric"), []
    for steps in (STEPS, STEPS + 1):
        net, optimizer, _ = fabric.train(steps, 32, None)
        runs.append(Run())
        runs[-1].add("end", of_module(net), of_optimizer(optimizer.optimizer), of_random())
    assert {path.partition("/")[0] for _, path in differences(*runs)} >= {"parameter", "optimizer"}


def test_as_a_script():
    command = [sys.executable, TESTS.parent / "examples" / "fabric.py", "--steps", "20"]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert "3 matrices and 3 biases and gains are measured" in out
    assert "step   20  loss" in out
    assert out.index("step   20  loss") < out.index("spectral measurement, step 20: 3 matrices")
    assert "nan" not in out
