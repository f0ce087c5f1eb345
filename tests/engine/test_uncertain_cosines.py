"""Samples that have one gradient each: a few of them say little of the angle between features and gradients."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spectral_monitor import SpectralProbe
from spectral_monitor.engine.features import replay_subset
from tests.one_step import training_step

WIDTH, CLASSES, BATCH, ROWS = 32, 4, 64, 64
KEYS = ["feature_change", "bfa_cos", "sensitivity"]


class Pooled(nn.Module):
    """A classifier of the mean over a sequence."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.c(torch.relu(self.b(torch.relu(self.a(x))))).mean(1)


def measurements(samples, seed, steps):
    """What a probe measures with so many samples."""
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(BATCH, ROWS, 8, generator=g), torch.randint(CLASSES, (BATCH,), generator=g)
    torch.manual_seed(seed)
    model = Pooled()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    whole = {"max_rows": None} if samples is None else {}
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=KEYS, replay_samples=samples, **whole)
    for step in range(steps):
        order = torch.randperm(BATCH, generator=torch.Generator().manual_seed(step))
        with training_step(probe, optimizer):
            F.cross_entropy(model(x[order]), y[order]).backward()
    return list(probe.measurements), probe


@pytest.mark.slow
def test_errors_hold_what_all_samples_say():
    """Those of the sensitivity are infinite where the sign of the cosine is not known, and only there."""
    compared = dict.fromkeys(KEYS, 0)
    outside = dict.fromkeys(KEYS, 0)
    known = 0
    for seed in range(4):
        few, whole = (measurements(samples, seed, 12)[0] for samples in ("auto", None))
        for found, true in list(zip(few, whole, strict=True))[1:]:
            for key in KEYS:
                off = (found.values[key] - true.values[key]).abs()
                compared[key] += int((~off.isnan()).sum())
                outside[key] += int((off > 3 * found.errors[key] + 1e-6).sum())
            cosine, error = found.values["bfa_cos"], found.errors["bfa_cos"]
            sure = 3 * error < cosine.abs()
            assert (found.errors["sensitivity"].isfinite() == sure)[~error.isnan()].all()
            known += int(sure.sum())
    assert known, "else the test says nothing of finite ones"
    assert all(count == 132 for count in compared.values())
    assert all(count <= 0.05 * 132 for count in outside.values()), outside


def test_more_samples_are_run_where_cosines_say_too_little():
    """Twice as many after four measured steps."""
    _, probe = measurements("auto", 0, 12)
    subset = probe._engine.features.replays.subset
    assert subset.samples >= 2 * replay_subset.MIN_SAMPLES


@pytest.mark.parametrize(("cosine", "samples"), [(0.19, 4), (0.21, 8), (math.inf, 8)])
def test_the_limit_of_cosines(cosine, samples):
    subset = replay_subset.ReplaySubset("auto", nn.Linear(1, 1))
    subset.agree([4])
    for _ in range(replay_subset.ERROR_STEPS):
        subset.portion = replay_subset.BatchSlice(4, 99)
        subset.widen([0.01], [0.01, cosine, 0.5])
    assert subset.samples == samples
