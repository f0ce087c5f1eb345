"""Lightning Fabric: the example trains bit for bit as it does without the probe, and everything is measured."""

from __future__ import annotations

import math
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric

from spectral_monitor import SpectralProbe
from spectral_monitor.quantities import TIERS
from tests.noninterference import zoo
from tests.noninterference.recorder import Run, differences, of_module, of_optimizer, of_random

TESTS = Path(__file__).parents[1]

STEPS = 8
ROUNDED = "its change is too close to the rounding of its outputs"
HALF = f"{ROUNDED}, which are of half precision: replay_samples=None runs the forward in full precision"


@pytest.mark.few(2)
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
    for key in TIERS["standard"]:
        for layer in ("0", "2", "4"):
            reason = m.why(key, layer)
            assert math.isfinite(m.value(key, layer)) or (bf16 and reason in (ROUNDED, HALF)), (key, layer, reason)


class ByTrainingStep(zoo.Classifier):
    """A LightningModule whose ``training_step`` is called on Fabric's wrapper, not its forward."""

    def forward(self, x, y):
        raise AssertionError("not called in training")

    def training_step(self, x, y):
        return super().loss((x, y))


def by_training_step(every):
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(0, verbose=False)
    module = ByTrainingStep(zoo.cnn)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
    probe, run = SpectralProbe(model, optimizer, every_n_steps=every) if every else None, Run()
    for x, y in zoo.Batches("images", count=8):
        with probe.step() if probe else nullcontext():
            optimizer.zero_grad()
            fabric.backward(model.training_step(x, y))
            optimizer.step()
        run.add("step", of_module(module), of_optimizer(optimizer.optimizer), of_random())
    return run, probe


@pytest.mark.parametrize("every", [1, 2])
def test_a_lightning_module_by_its_training_step(every):
    alone, _ = by_training_step(None)
    run, probe = by_training_step(every)
    assert not differences(alone, run)
    assert alone.tensors("buffer") > 0
    assert [m.step for m in probe.measurements] == list(range(every, 9, every))
    for m in probe.measurements:
        for layer in ("net.0", "net.4", "net.9"):
            assert m.value("feature_change", layer) > 0, m.why("feature_change", layer)
            assert m.value("update_ratio", layer) > 0
            assert abs(m.value("bfa_cos", layer)) <= 1


def test_a_longer_training_would_differ(example):
    """The comparison above can fail."""
    fabric, runs = example("fabric"), []
    for steps in (STEPS, STEPS + 1):
        net, optimizer, _ = fabric.train(steps, 32, None)
        runs.append(Run())
        runs[-1].add("end", of_module(net), of_optimizer(optimizer.optimizer), of_random())
    assert {path.partition("/")[0] for _, path in differences(*runs)} >= {"parameter", "optimizer"}


@pytest.mark.slow
def test_as_a_script():
    command = [sys.executable, TESTS.parent / "examples" / "fabric.py", "--steps", "20"]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert "3 matrices and 3 biases and gains are measured" in out
    assert "step   20  loss" in out
    assert out.index("step   20  loss") < out.index("spectral monitor, step 20: ")
    assert "nan" not in out
