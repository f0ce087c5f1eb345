"""Every quantity of networks with pieces in a random order, against the naive implementation."""

from __future__ import annotations

import math

import pytest
import torch

from spectral_monitor import SpectralProbe
from tests.one_step import training_step
from tests.oracle import naive
from tests.oracle.architectures import Network
from tests.oracle.test_every_quantity import assert_agrees, assert_same_weights, make_batches, make_optimizer

STEPS, DRIFT_EVERY = 3, 2
QUICK, SLOW, EXHAUSTIVE = 5, 25, 150
"""Networks of each kind."""
ROWS = {"rel": 0.1}
"""Tolerance of ranks of rows, whose largest singular value is known to a twentieth."""
EXACT = {"tol": 1e-6, "replay_samples": None, "max_rows": None, "mode": "observe", "drift_every": DRIFT_EVERY}


def make(kind, seed):
    model = Network(seed, kind).double().train()
    return model, make_optimizer(("sgd", "adamw", "adam")[seed % 3], model)


def compare(kind, seed):
    """Train both ways, compare all steps, and return how many numbers there were."""
    model, optimizer = make(kind, seed)
    layers = naive.list_layers(model, "head", model.fused())
    trainer = naive.NaiveTrainer(model, optimizer, layers, model.loss, returns_loss=model.returns_loss)
    batches = make_batches(model, torch.float64, STEPS)
    records = [trainer.step([batch], [100 + i], i % DRIFT_EVERY == 0) for i, batch in enumerate(batches)]

    watched, optimizer = make(kind, seed)
    probe = SpectralProbe(watched, optimizer, every_n_steps=1, blocks=watched.fused(), **EXACT)
    for i, (x, y) in enumerate(batches):
        with training_step(probe, optimizer):
            torch.manual_seed(100 + i)
            watched.loss(watched(x, y), y).backward()
    assert_same_weights(watched, model)
    for measurement, record in zip(probe.measurements, records, strict=True):
        assert_agrees(measurement, record, torch.float64, of_rows=ROWS)
    return sum(math.isfinite(value) for m in probe.measurements for value in m.scalars().values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rows", "images", "tokens"])
def test_agrees_with_the_naive_implementation(kind):
    assert sum(compare(kind, seed) for seed in range(QUICK)) > 100 * QUICK


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rows", "images", "tokens"])
def test_agrees_on_more(kind):
    for seed in range(QUICK, SLOW):
        compare(kind, seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["rows", "images", "tokens"])
@pytest.mark.parametrize("part", range(5))
def test_agrees_on_many(kind, part):
    for seed in range(SLOW + part, EXHAUSTIVE, 5):
        compare(kind, seed)
