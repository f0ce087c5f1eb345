"""The Hugging Face Trainer: the example trains bit for bit as it does without the callback, and all is measured."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.noninterference.recorder import Run, differences, leaves, of_module, of_optimizer, of_random

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'spectral-monitor[hf]'")

from transformers import TrainerCallback

TESTS = Path(__file__).parents[1]

STEPS = 4


class Reader(TrainerCallback):
    """Everything after every step, the hooks too."""

    def __init__(self):
        self.run = Run()

    def on_step_end(self, args, state, control, *, model, optimizer, lr_scheduler, **_):
        parts = (of_module(model), of_optimizer(optimizer.optimizer), of_random())
        self.run.add(f"step {state.global_step}", *parts, dict(leaves("scheduler", lr_scheduler.state_dict())))


def trained(module, *callbacks, **arguments):
    reader = Reader()
    trainer = module.train(STEPS, 32, *callbacks, reader, use_cpu=True, **arguments)
    history = [
        {k: v for k, v in row.items() if k in ("loss", "grad_norm", "learning_rate")}
        for row in trainer.state.log_history
    ]
    reader.run.add("end", dict(leaves("log", history)))
    return reader.run


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("arguments", [{}, {"bf16": True}, {"activation_checkpointing": True}], ids=str)
def test_training_is_the_same(example, arguments):
    module = example("hf_trainer")
    alone = trained(module, **arguments)
    assert alone.tensors("optimizer") > 0
    for every in (1, 2):
        spectral = module.SpectralCallback(every_n_steps=every)
        watched = trained(module, spectral, **arguments)
        assert not differences(alone, watched)
        assert len(watched.records) == STEPS + 1
        assert [m.step for m in spectral.probe.measurements] == list(range(every, STEPS + 1, every))
        for m in spectral.probe.measurements[0], spectral.probe.latest:
            for info in m.layers:
                keys = (
                    ("weight_natural", "lr")
                    if info.role == "vector"
                    else ("weight_norm", "update_ratio", "feature_rms")
                )
                for key in keys:
                    assert math.isfinite(m.value(key, info.name)), (key, info.name, m.why(key, info.name))
        assert not {info.name for info in m.layers if "module" in info.name}


@pytest.mark.slow
def test_every_quantity_of_a_hidden_layer_is_there(example):
    module = example("hf_trainer")
    spectral = module.SpectralCallback(every_n_steps=2)
    trained(module, spectral)
    m = spectral.probe.measurements[0]
    missing = {
        key: m.why(key, "transformer.h.1.mlp.c_fc")
        for key in m.values
        if math.isnan(m.value(key, "transformer.h.1.mlp.c_fc"))
    }
    assert not missing


class Grabs(TrainerCallback):
    """The real change of a weight in every step, and the learning rate it was made with."""

    def __init__(self):
        self.moved, self.rates = [], []

    def on_pre_optimizer_step(self, args, state, control, *, model, optimizer, **_):
        self.before = model.lm_head.weight.detach().clone()
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_optimizer_step(self, args, state, control, *, model, **_):
        self.moved.append(model.lm_head.weight.detach() - self.before)


@pytest.mark.slow
def test_the_numbers_are_those_of_the_whole_step(example):
    module, grabs = example("hf_trainer"), Grabs()
    spectral = module.SpectralCallback(every_n_steps=1)
    module.train(STEPS, 32, grabs, spectral, use_cpu=True, weight_decay=0.1)
    assert len(set(grabs.rates)) == STEPS, "the Trainer's schedule moves the rate at every step"
    for m, moved, rate in zip(spectral.probe.measurements, grabs.moved, grabs.rates, strict=True):
        assert m.value("update_fro", "lm_head") == pytest.approx(moved.norm().item(), rel=1e-5)
        assert m.value("update_norm", "lm_head") == pytest.approx(torch.linalg.matrix_norm(moved, 2).item(), rel=0.02)
        assert m.value("lr", "lm_head") == pytest.approx(rate, rel=1e-6)


class Breaks(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, *, model, **_):
        self.model = model
        if state.global_step == 1:
            raise RuntimeError("boom")


@pytest.mark.slow
def test_an_exception_leaves_no_hook(example):
    module, breaks = example("hf_trainer"), Breaks()
    spectral = module.SpectralCallback(every_n_steps=1)
    with pytest.raises(RuntimeError, match="boom"):
        module.train(STEPS, 32, spectral, breaks, use_cpu=True)
    assert hooks(breaks.model), "the Trainer has told nobody"
    spectral.abandon()
    assert not hooks(breaks.model)
    assert [m.step for m in spectral.probe.measurements] == [1]


def hooks(model):
    return [path for path, n in of_module(model).items() if path.startswith("hooks/") and n]


@pytest.mark.slow
def test_as_a_script():
    command = [sys.executable, TESTS.parent / "examples" / "hf_trainer.py", "--steps", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert not done.returncode, done.stderr
    out = done.stdout
    assert "11 matrices and 18 biases and gains are measured" in out
    assert "lm_head          output     128 -> 76         tied to transformer.wte" in out
    assert "spectral monitor, step 10: " in out
