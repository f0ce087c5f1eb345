"""Measurements made up of numbers: a small healthy network, but for what a test changes."""

from __future__ import annotations

import math

import torch

from spectral_monitor import LayerInfo, Measurement
from spectral_monitor.condition import Judge, SpectralCondition
from spectral_monitor.condition.optimizers.hyperparameters import Hyperparameters, family

LAYERS = {
    "tok": LayerInfo("tok", "embedding", 64, 1, (100, 64)),
    "a": LayerInfo("a", "operator", 64, 64, (64, 64)),
    "a.bias": LayerInfo("a.bias", "vector", 1, 1, (64,)),
    "b": LayerInfo("b", "operator", 256, 64, (256, 64)),
    "b.bias": LayerInfo("b.bias", "vector", 1, 1, (256,)),
    "c": LayerInfo("c", "operator", 64, 256, (64, 256)),
    "c.bias": LayerInfo("c.bias", "vector", 1, 1, (64,)),
    "head": LayerInfo("head", "readout", 10, 64, (10, 64)),
}
HEALTHY = {
    "weight_natural": 1.0,
    "weight_fro": 8.0,
    "update_natural": 0.1,
    "update_ratio": 0.05,
    "drift_ratio": 1.0,
    "contribution": 0.01,
    "lr": 0.01,
}
ZERO = "undefined: it divides by a norm that is zero"
"""Why a ratio to a matrix that is, or began at, zero has no value."""


def measured(step, *, only=None, layers=LAYERS, reasons=None, summary=None, **changed):
    """A measurement; ``changed``: quantity -> layer -> value; ``only``: the quantities there are."""
    values = {}
    for key, usual in (dict.fromkeys(changed, math.nan) | HEALTHY).items():
        if only is None or key in only:
            own = changed.get(key, {})
            values[key] = torch.tensor([float(own.get(name, usual)) for name in layers])
    return Measurement(step, tuple(layers.values()), values, summary or {}, reasons=reasons or {})


def nothing(*layers):
    """NaN for these layers."""
    return dict.fromkeys(layers, math.nan)


def heavy(**factors):
    """Weights so many times as large as they were, in both norms that tell."""
    return {
        "weight_natural": dict(factors),
        "weight_fro": {name: factor * HEALTHY["weight_fro"] for name, factor in factors.items()},
    }


def set_by(optimizer="AdamW", *, layers=LAYERS, lr=None, **every):
    """Settings of every layer, under one optimizer and each in a group of its own.

    Args:
        optimizer: class name.
        layers: by name.
        lr: layer -> learning rate where it is not 0.01.
        every: fields that all have.
    """
    found = {}
    for group, name in enumerate(layers):
        rate = (lr or {}).get(name, HEALTHY["lr"])
        fields = {"group": group, "owner": 0, "lr": rate, "peak": rate} | every
        found[name] = Hyperparameters(optimizer, family([optimizer]), **fields)
    return found


WATCHFUL = SpectralCondition(band=(1 / 16, 8))
"""The usual band, but chosen: then what stands out is told without a known cause too."""


def judged(measurements, *, settings=None, tied=None, **condition):
    """The judge after all of them, and the last verdicts."""
    chosen = {} if "reference" in condition else {"band": WATCHFUL.band}
    judge = Judge(SpectralCondition(**(chosen | condition)), tied)
    verdicts = ()
    for measurement in measurements:
        verdicts = judge.judge(measurement, settings)
    return judge, verdicts


def verdicts_on(steps=3, *, layers=LAYERS, settings=None, condition=None, **changed):
    """The verdicts when every measurement looks the same."""
    measurements = [measured(step, layers=layers, **changed) for step in range(1, steps + 1)]
    return judged(measurements, settings=settings, **(condition or {}))[1]


def only_verdict(steps=3, **changed):
    """The only one of :func:`verdicts_on`."""
    verdicts = verdicts_on(steps, **changed)
    assert len(verdicts) == 1, [str(verdict) for verdict in verdicts]
    return verdicts[0]
