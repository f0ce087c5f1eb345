"""The state of optimizers like Adam, against moments that are computed by hand in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from spectral_monitor import SpectralProbe
from tests.gloo import on_processes
from tests.one_step import training_step

KEYS = ("adam_rms", "eps_share", "momentum_cos", "dead_rows")


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.conv = nn.Conv1d(8, 6, 3, padding=1)
        self.body = nn.Linear(6, 16)
        self.head = nn.Linear(16, 3)
        with torch.no_grad():
            self.body.bias[:4] = -100.0  # a quarter of its units is dead

    def forward(self, tokens):
        x = self.conv(self.words(tokens).transpose(1, 2)).transpose(1, 2)
        return self.head(self.body(x).relu()).mean(1)


def batches(steps, samples=16):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(9, (samples, 5), generator=generator) for _ in range(steps)]  # three words never come


def naive(gradients, beta1, beta2, eps, amsgrad=False):
    """Return the four numbers after these gradients of a parameter, one output a row."""
    m = v = largest = torch.zeros_like(gradients[0])
    for g in gradients:
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        largest = torch.maximum(largest, v)
    v = (largest if amsgrad else v) / (1 - beta2 ** len(gradients))
    ratios = [[abs(a) / max(math.sqrt(b), eps) for a, b in zip(*rows, strict=True)]
              for rows in zip(g.flatten(1).tolist(), v.flatten(1).tolist(), strict=True)]  # fmt: skip
    every = [ratio for row in ratios for ratio in row]
    outputs = v.flatten(1).sum(1)
    return {
        "adam_rms": math.sqrt(sum(ratio**2 for ratio in every) / len(every)),
        "eps_share": sum(math.sqrt(b) < eps for b in v.flatten().tolist()) / v.numel(),
        "momentum_cos": float((m * g).sum() / (m.norm() * g.norm())),
        "dead_rows": float((outputs < 1e-3 * outputs.median()).double().mean()),
    }


OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95), eps=1e-3),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), eps=1e-3, amsgrad=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), eps=1e-3, fused=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, betas=(0.8, 0.95), eps=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numbers_are_those_of_moments_by_hand(name):
    torch.manual_seed(0)
    model = Network()
    optimizer = OPTIMIZERS[name](model.parameters())
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=list(KEYS))
    layers = {name: [] for name in ("words", "conv", "body", "head")}
    for tokens in batches(5):
        with training_step(probe, optimizer):
            model(tokens).square().mean().backward()
        for layer, gradients in layers.items():
            gradients.append(model.get_submodule(layer).weight.grad.double().clone())
            expected = naive(gradients, 0.8, 0.95, 1e-3, "amsgrad" in name)
            for key in KEYS:
                assert probe.latest.value(key, layer) == pytest.approx(expected[key], rel=1e-4, abs=1e-7), (layer, key)
    assert probe.latest.value("dead_rows", "body") == 0.25
    assert probe.latest.value("dead_rows", "words") == 0.25
    assert 0 < probe.latest.value("eps_share", "body") < 1


def test_gradients_that_never_change_point_where_the_momentum_does():
    model = nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=list(KEYS))
    x = torch.randn(8, 4)
    for _ in range(3):
        with training_step(probe, optimizer):
            model(x).sum().backward()
    assert probe.latest.value("momentum_cos", "weight") == pytest.approx(1.0)
    assert probe.latest.value("adam_rms", "weight") == pytest.approx(1.0, rel=1e-4)
    assert probe.latest.value("eps_share", "weight") == 0


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_other_optimizers_have_none(kind):
    model = nn.Linear(4, 3)
    optimizer = kind(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=list(KEYS))
    with probe.step():
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    for key in KEYS:
        assert math.isnan(probe.latest.value(key, "weight"))
        assert probe.latest.why(key, "weight") == "its optimizer keeps no exp_avg and exp_avg_sq for it"


def job(way):
    """Return the numbers of three steps, of a batch that processes share out if there are several."""
    torch.manual_seed(0)
    model, rank, count = Network(), 0, 1
    if way:
        rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if way == "ddp":
            model = DistributedDataParallel(model)
        else:
            for part in (model.words, model.conv, model.body, model.head, model):
                fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=list(KEYS))
    for tokens in batches(3):
        with training_step(probe, optimizer):
            model(tokens[rank::count]).square().mean().backward()
    return [
        [m.value(key, layer) for m in probe.measurements for key in KEYS for layer in ("words", "conv", "body", "head")]
    ]


@pytest.mark.parametrize("way", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_two_processes_have_the_numbers_of_one(tmp_path, way):
    [alone] = job("")
    for (found,) in on_processes(job, tmp_path, 2, way):
        assert found == pytest.approx(alone, rel=1e-4)
