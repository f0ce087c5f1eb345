"""Runs in files: a healthy one and one with a fault, both trained, and some made up of numbers that tests know."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch import nn

from spectral_monitor import LayerInfo, Measurement, SpectralProbe, Verdict
from spectral_monitor.cli import main
from spectral_monitor.measurement import LayerState
from spectral_monitor.reporting import JSONLinesSink
from tests.one_step import training_step

FILE = "spectral_monitor.jsonl"
COMMAND = Path(sys.executable).with_name("spectral-monitor")
FAULTY = "6"
"""The layer with a hundred times the learning rate of the others."""
LAYERS = (
    LayerInfo("net.0", "operator", 64, 64, (64, 64)),
    LayerInfo("net.2", "operator", 64, 64, (64, 64)),
    LayerInfo("head", "readout", 64, 64, (64, 64)),
    LayerInfo("head.bias", "vector", 64, 1, (64,)),
)


def measured(step, updates=(0.1, 0.2, 0.4, 0.8), layers=LAYERS, verdicts=(), reference=0.2):
    """A measurement of four layers whose numbers are known; the bias has no rank."""
    count = len(layers)
    values = {
        "update_natural": torch.tensor(updates[:count]),
        "weight_stable_rank": torch.tensor([3.0, 2.0, 1.0, math.nan][:count]),
    }
    bands = {"update_natural": torch.tensor([[reference / 16, reference * 8, reference]] * count)}
    named = {verdict.layer for verdict in verdicts}
    states = {
        info.name: LayerState("off", "too large") if info.name in named else LayerState("healthy")
        for info in layers
        if info.role != "vector"
    }
    summary = {"violations": float(len(verdicts)), "loss_change": math.nan}
    return Measurement(step, layers, values, summary, tuple(verdicts), states=states, bands=bands)


def fault(layer="net.2", cause="lr_too_large", consequences=()):
    sentence = "its learning rate is 0.1, that of the other layers 0.001: use 0.001"
    band = (0.0, math.inf)
    return Verdict(
        layer, "update_natural", 0.2, band, 85.0, 10, 3, cause, sentence, (layer,), consequences=consequences
    )


def logged(path, *measurements):
    path.parent.mkdir(parents=True, exist_ok=True)
    sink = JSONLinesSink(path)
    for measurement in measurements:
        sink.write(measurement)
    return path.parent


def said(arguments, capsys):
    """What a command prints that succeeds."""
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def fails(arguments, capsys):
    """The one sentence on stderr of a command that cannot be had."""
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("spectral-monitor: ")
    assert err.count("\n") == 1
    return err


def trained(folder, faulty):
    """The folder of a run of a dozen layers."""
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(32, 5))
    rates = {f"{FAULTY}.weight": 0.1} if faulty else {}
    groups = [{"params": [p], "lr": rates.get(name, 1e-3)} for name, p in model.named_parameters()]
    optimizer = torch.optim.Adam(groups, lr=1e-3)
    sink = JSONLinesSink(folder / FILE)
    probe = SpectralProbe(
        model, optimizer, every_n_steps=5, quantities="light", sinks=[sink], mode="observe", exclude=["*.bias"]
    )
    x, y = torch.randn(64, 32), torch.randint(5, (64,))
    for _ in range(30):
        with training_step(probe, optimizer):
            nn.functional.cross_entropy(model(x), y).backward()
    return folder
