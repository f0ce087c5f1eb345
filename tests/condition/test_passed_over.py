"""Towers that are called without gradients, ahead of the backward passes of several micro-batches: real networks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from spectral_monitor import SpectralProbe
from spectral_monitor.measurement import PASSED_OVER

STEPS = 5


def tower(*sizes):
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class TwoTowers(nn.Module):
    """Two towers, as in CLIP; none is called through ``forward``."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.text, self.image = tower(16, 24, 24, 8), tower(32, 40, 40, 8)


def optimizer_of(*parts):
    return torch.optim.AdamW([p for part in parts for p in part.parameters()], 1e-3)


def trained(model, optimizers, one_step):
    """Return the probe after a few steps, and the causes at each."""
    probe = SpectralProbe(model, optimizers, every_n_steps=1, mode="observe")
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        with probe.step():
            for optimizer in optimizers:
                optimizer.zero_grad()
            one_step(step)
        found.append({verdict.cause: set(verdict.layers) for verdict in probe.latest.roots})
    return probe, found


def towers_step(model, optimizer, reached):
    """Return a step that gives gradients to some towers, each in micro-batches of its own."""

    def one_step(step):
        data = {"text": torch.randn(32, 16), "image": torch.randn(32, 32)}
        with torch.no_grad():
            fixed = {name: getattr(model, name)(x) for name, x in data.items()}
        for name in reached(step):
            for rows in (slice(0, 16), slice(16, 32)):
                features = dict(fixed)
                features[name] = fixed[name].clone()
                features[name][rows] = getattr(model, name)(data[name][rows])
                logits = features["text"] @ features["image"].T
                functional.cross_entropy(logits, torch.arange(32)).backward()
        optimizer.step()

    return one_step


@pytest.mark.parametrize("forgotten", ["text", "image"])
def test_a_tower_that_no_gradient_reaches_is_told(forgotten):
    model = TwoTowers()
    optimizer = optimizer_of(model)
    reached = {"text", "image"} - {forgotten}
    probe, found = trained(model, [optimizer], towers_step(model, optimizer, lambda step: reached))
    assert found == [{}] + [{"dead": {f"{forgotten}.{k}" for k in (0, 2, 4)}}] * (STEPS - 1)
    assert probe.latest.why("feature_rms", f"{forgotten}.0") == PASSED_OVER


@pytest.mark.parametrize("turns", [1, 2])
def test_nothing_is_told_of_towers_that_both_learn_at_once_or_in_turns(turns):
    model = TwoTowers()
    optimizer = optimizer_of(model)
    order = ["text", "image"]
    reached = (lambda step: order) if turns == 1 else (lambda step: [order[step % 2]])
    _, found = trained(model, [optimizer], towers_step(model, optimizer, reached))
    assert found == [{}] * STEPS


@pytest.mark.parametrize("how", ["frozen", "in no optimizer"])
def test_nothing_is_told_of_a_tower_that_is_not_to_be_trained(how):
    model = TwoTowers()
    model.text.requires_grad_(how != "frozen")
    optimizer = optimizer_of(model.image)
    _, found = trained(model, [optimizer], towers_step(model, optimizer, lambda step: ["image"]))
    assert found == [{}] * STEPS


def test_nothing_is_told_of_a_generator_whose_critic_is_trained_first():
    """Its outputs are made without gradients, and the critic has a backward pass for each kind of samples."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"generator": tower(8, 24, 24, 16), "critic": tower(16, 32, 32, 1)})
    optimizers = [optimizer_of(model["generator"]), optimizer_of(model["critic"])]

    def one_step(step):
        with torch.no_grad():
            fake = model["generator"](torch.randn(32, 8))
        functional.softplus(-model["critic"](torch.randn(32, 16) + 1)).mean().backward()
        functional.softplus(model["critic"](fake)).mean().backward()
        optimizers[1].step()
        if step == STEPS - 1:
            functional.softplus(-model["critic"](model["generator"](torch.randn(32, 8)))).mean().backward()
            optimizers[0].step()

    _, found = trained(model, optimizers, one_step)
    assert found == [{}] * STEPS


def test_nothing_is_told_of_experts_that_no_sample_was_sent_to():
    torch.manual_seed(0)
    model = nn.ModuleDict({"experts": nn.ModuleList(tower(16, 24, 24, 8) for _ in range(4)), "head": nn.Linear(8, 4)})
    optimizer = optimizer_of(model)

    def one_step(step):
        for _ in range(2):
            x = torch.randn(32, 16)
            with torch.no_grad():
                best = max(model["experts"][:2], key=lambda expert: float(expert(x).square().mean()))
            functional.cross_entropy(model["head"](best(x)), (x[:, 0] > 0).long()).backward()
        optimizer.step()

    _, found = trained(model, [optimizer], one_step)
    assert found == [{}] * STEPS
