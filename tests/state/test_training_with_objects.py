"""A model that draws from, and counts in, plain objects trains the same under a probe, and its replay is right."""

from __future__ import annotations

import functools
import math
import random
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as nnf
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.messages import SpectralMonitorWarning
from spectral_monitor.state.objects import MAX_DEPTH

STEPS = 4


class Noise:
    __slots__ = ("generator", "scale")

    def __init__(self):
        self.generator, self.scale = torch.Generator().manual_seed(0), 1.0

    def __call__(self, x):
        self.scale *= 0.9
        return x + self.scale * torch.randn(x.shape, generator=self.generator)


class Masker:
    """Draws from all kinds of generators, some of them far below, and counts."""

    def __init__(self):
        self.noise, self.calls = Noise(), 0
        self.sources = {"numpy": [np.random.default_rng(0)], "state": np.random.RandomState(0)}
        self.flip = functools.partial(self.flipped, source=random.Random(0))

    def flipped(self, x, source):
        self.calls += 1
        return -x if source.random() < 0.5 else x / self.calls

    def mask(self, x):
        x = self.flip(self.noise(x)) * (1 + self.sources["state"].rand())
        return x * torch.from_numpy(self.sources["numpy"][0].random(x.shape) < 0.7)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask = Masker().mask
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x):
        return self.layers(self.mask(x))


class FarNet(Net):
    """Its masker is too far below to be found."""

    def __init__(self):
        super().__init__()
        held = Masker()
        for _ in range(MAX_DEPTH + 2):
            held = Holder(held)
        self.held = held
        self.mask = lambda x: held.masker().mask(x)


class Holder:
    def __init__(self, inner):
        self.inner = inner

    def masker(self):
        return self.inner.masker() if isinstance(self.inner, Holder) else self.inner


def train(make, watched):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
    probe = SpectralProbe(model, optimizer, every_n_steps=1) if watched else None
    for _ in range(STEPS):
        with probe.step() if probe else nullcontext():
            optimizer.zero_grad()
            nnf.cross_entropy(model(x), y).backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()], probe


def equal(plain, seen):
    return all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))


def test_training_is_the_same_and_the_replay_draws_the_same():
    plain, _ = train(Net, watched=False)
    seen, probe = train(Net, watched=True)
    assert equal(plain, seen)
    for m in probe.measurements:
        # With other noise or another mask in the replay it would be about one.
        assert 0 < m.value("feature_change", "layers.0") < 0.2
        assert 0 < m.value("feature_change", "layers.2") < 0.6


def test_what_cannot_be_put_back_is_not_run_again():
    plain, _ = train(FarNet, watched=False)
    with pytest.warns(SpectralMonitorWarning, match="the forward of FarNet cannot be run again"):
        seen, probe = train(FarNet, watched=True)
    assert equal(plain, seen)
    for m in probe.measurements:
        assert math.isnan(m.value("feature_change", "layers.0"))
        assert f"cannot be put back: it is more than {MAX_DEPTH} steps away" in m.why("feature_change", "layers.0")
        assert math.isfinite(m.value("update_norm", "layers.0"))


def test_nothing_is_said_where_all_comes_back():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, probe = train(Net, watched=True)
    assert not caught
    assert probe.measurements
