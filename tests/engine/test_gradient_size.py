"""The sizes of gradients: of weights in the natural norm, of outputs as a root mean square."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from spectral_monitor import SpectralProbe
from tests.gloo import on_processes
from tests.one_step import after_one_step, training_step

KEYS = ["gradient_natural", "backward_rms"]
LAYERS = ("words", "conv", "qkv", "body", "head")
MATRICES = LAYERS[1:]


class Network(nn.Module):
    """A table, a convolution, three matrices in one, a matrix that is not trained, a readout."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.conv = nn.Conv1d(8, 6, 3, padding=1)
        self.qkv = nn.Linear(6, 15)
        self.body = nn.Linear(15, 9)
        self.still = nn.Linear(9, 9).requires_grad_(False)
        self.head = nn.Linear(9, 3)

    def forward(self, tokens):
        x = self.conv(self.words(tokens).transpose(1, 2)).transpose(1, 2)
        return self.head(self.still(self.body(self.qkv(x).relu()).tanh())).mean(1)


def batch(samples=16):
    return torch.randint(12, (samples, 5), generator=torch.Generator().manual_seed(3))


def fresh():
    torch.manual_seed(0)
    return Network().double()


def expected(samples=16, low=0):
    """Return layer -> the two numbers, from the gradients of the mean loss, written out."""
    model, outs = fresh(), {}
    for name in (*LAYERS, "still"):
        model.get_submodule(name).register_forward_hook(lambda m, a, out, name=name: outs.update({name: out}))
    loss = model(batch(samples)[low:]).square().mean()
    b = dict(zip(outs, torch.autograd.grad(loss, list(outs.values()), retain_graph=True), strict=True))
    weights = [model.get_submodule(name).weight for name in LAYERS]
    g = dict(zip(LAYERS, (x.numpy() for x in torch.autograd.grad(loss, weights)), strict=True))
    natural = {
        "words": math.nan,
        "conv": math.sqrt(6 / 8) * sum(np.linalg.norm(g["conv"][:, :, tap], 2) for tap in range(3)),
        "qkv": max(math.sqrt(5 / 6) * np.linalg.norm(block, 2) for block in np.split(g["qkv"], 3)),
        "body": math.sqrt(9 / 15) * np.linalg.norm(g["body"], 2),
        "still": math.nan,
        "head": math.sqrt(3 / 9) * np.linalg.norm(g["head"], 2),
    }
    return {name: (natural[name], math.sqrt(float(b[name].square().mean()))) for name in (*LAYERS, "still")}


def measured(model, steps=(slice(None),), scale=1.0, kind=torch.optim.SGD, **settings):
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=KEYS, blocks={"*qkv": 3}, **settings)
    with probe.step(accumulated=len(steps)):
        for some in steps:
            (scale * model(batch()[some]).square().mean() / len(steps)).backward()
        optimizer.step()
    return probe.latest


@pytest.mark.parametrize("low_memory", [False, True])
def test_numbers_are_those_of_gradients_written_out(low_memory):
    m = measured(fresh(), tol=1e-6, low_memory=low_memory)
    for name, (natural, rms) in expected().items():
        assert m.value("gradient_natural", name) == pytest.approx(natural, rel=1e-5, nan_ok=True), name
        assert m.value("backward_rms", name) == pytest.approx(rms, rel=1e-6), name
    assert m.why("gradient_natural", "words") == "an embedding's inputs are one-hot"
    assert m.why("gradient_natural", "still") == "no optimizer updates it"
    assert m.why("gradient_natural", "body.bias").startswith("biases and gains")


def test_weights_that_have_little_memory_have_the_same_gradients(monkeypatch):
    """Updates and gradients then lie in the memory of the weights, one after the other."""
    monkeypatch.setattr("spectral_monitor.engine.weights.matrix_batches.SPARE_BYTES", 0)
    model = fresh()
    probe = after_one_step(
        model, lambda: model(batch()).square().mean(), quantities=["gradient_natural", "update_natural"], tol=1e-6
    )
    natural, _ = expected()["body"]
    assert probe.latest.value("gradient_natural", "body") == pytest.approx(natural, rel=1e-5)
    assert probe.latest.value("update_natural", "body") == pytest.approx(0.1 * natural * 15 / 9, rel=1e-5)


def test_accumulated_gradients_are_those_of_the_mean_and_outputs_those_of_the_last_micro_batch():
    m = measured(fresh(), (slice(8), slice(8, 16)), tol=1e-6)
    for name, (natural, _) in expected().items():
        assert m.value("gradient_natural", name) == pytest.approx(natural, rel=1e-5, nan_ok=True), name
    for name, (_, rms) in expected(low=8).items():
        assert m.value("backward_rms", name) == pytest.approx(rms, rel=1e-6), name


def test_many_rows_are_known_by_a_sample():
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    x, optimizer = torch.randn(5000, 4), torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=KEYS)
    with probe.step():
        model(x).square().mean().backward()
        optimizer.step()
    b = 2 * x @ (model.weight + 0.1 * model.weight.grad).detach().T / 15000
    assert probe.latest.value("backward_rms", "weight") == pytest.approx(float(b.square().mean().sqrt()), rel=0.1)


def test_it_is_of_all_samples_where_few_are_run_again():
    """The first ones, which are run again, have gradients unlike those of the others."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3, bias=False).double(), torch.randn(64, 4, dtype=torch.float64)
    weight = torch.cat([torch.full((8, 1), 1e-3), torch.ones(56, 1)]).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    keys = ["backward_rms", "feature_change"]
    probe = SpectralProbe(model, optimizer, quantities=keys, replay_samples=8, every_n_steps=1)
    for _ in range(3):
        with training_step(probe, optimizer):
            (model(x) * weight).square().mean().backward()
    b = 2 * (x @ model.weight.detach().T) * weight.square() / 192
    for m in probe.measurements:
        assert m.value("backward_rms", "weight") == pytest.approx(float(b.square().mean().sqrt()), rel=1e-6)


def test_overwritten_gradients_are_not_those_of_the_loss():
    class Rewrites(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.grad.mul_(2.0)
            return super().step(closure)

    m = measured(fresh(), kind=Rewrites)
    assert m.why("gradient_natural", "body") == "the optimizer overwrote the gradients"
    assert m.value("backward_rms", "body") > 0


def test_computed_weights_have_no_gradient_of_their_own():
    model = fresh()
    nn.utils.parametrizations.weight_norm(model.body)
    m = measured(model)
    name = next(info.name for info in m.layers if info.name.startswith("body") and len(info.shape) > 1)
    assert m.why("gradient_natural", name) == "its weight is computed from other parameters"


def test_it_does_not_depend_on_width_under_the_spectral_condition():
    """Eq. 20: |g|* is of order sqrt(n/m) in the first layer, in the middle and in the last, as muP begins."""
    sizes = {"0": [], "2": [], "4": []}
    for width in (64, 1024):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
        for layer, std in ((model[0], 1 / 4), (model[2], width**-0.5), (model[4], 1 / width)):
            nn.init.normal_(layer.weight, std=std)
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=["gradient_natural"])
        with probe.step():
            (model(x) - x[:, :2]).square().mean().backward()
            optimizer.step()
        for name, found in sizes.items():
            found.append(probe.latest.value("gradient_natural", name))
    for name, (narrow, wide) in sizes.items():
        assert abs(math.log(wide / narrow) / math.log(16)) < 0.1, name


def job(way):
    model, rank, count = fresh(), torch.distributed.get_rank(), torch.distributed.get_world_size()
    if way == "ddp":
        model = DistributedDataParallel(model)
    else:
        for part in (model.words, model.conv, model.qkv, model.body, model.head, model):
            fully_shard(part)
    m = measured(model, (slice(rank, None, count),), tol=1e-6)
    names = {info.name.removeprefix("module."): info.name for info in m.layers}
    return [m.value(key, names[name]) for name in MATRICES for key in KEYS]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_two_processes_have_the_numbers_of_one(tmp_path, way):
    alone = expected()
    for found in on_processes(job, tmp_path, 2, way):
        assert found == pytest.approx([x for name in MATRICES for x in alone[name]], rel=1e-4)
