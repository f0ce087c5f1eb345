"""Outliers, the size of logits and what 8 bits lose, against plain float64 and the definition of the formats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from spectral_monitor.functional.features import underflow_share
from tests.gloo import on_processes
from tests.one_step import after_one_step

KEYS = ["log_z", "readout_row", "feature_kurtosis", "outlier_ratio"]
KEYS += ["underflow_inputs", "underflow_weights", "underflow_backward"]
LAYERS = ("words", "conv", "body", "head")
E4M3, E5M2 = (448.0, 2.0**-9), (57344.0, 2.0**-16)
"""The largest number of a format, and the smallest above 0."""


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.conv = nn.Conv1d(8, 6, 3, padding=1)
        self.body, self.dead, self.head = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 5)
        with torch.no_grad():
            for layer in (self.words, self.conv, self.body, self.head):
                layer.weight.mul_(torch.randn(layer.weight.shape).mul(5).exp())  # entries of very different sizes
                layer.weight.div_(layer.weight.abs().max())
            self.dead.weight.zero_()
            self.dead.bias.zero_()

    def forward(self, tokens):
        x = self.body(self.conv(self.words(tokens).transpose(1, 2)).transpose(1, 2).relu())
        return self.head(x + self.dead(x)).mean(1)


def batch(samples=16):
    return torch.randint(12, (samples, 5), generator=torch.Generator().manual_seed(3))


def loss_of(model, tokens):
    return functional.cross_entropy(model(tokens), tokens[:, 0] % 5)


def fresh():
    torch.manual_seed(0)
    return Network().double()


def lost(x, form):
    """Return the share of entries other than 0 that are nearer to 0, or as near, than to the smallest number."""
    largest, smallest = form
    sizes = [abs(value) / float(x.abs().max()) * largest for value in x.flatten().tolist() if value]
    return sum(size <= smallest / 2 for size in sizes) / len(sizes)


def rows_of(x, name):
    return (x.transpose(1, 2) if name == "conv" else x).flatten(0, -2).detach()


def expected(tokens):
    model, seen = fresh(), {}
    for name in LAYERS:
        hook = lambda m, args, out, name=name: seen.update({name: (args[0], out)})  # noqa: E731
        model.get_submodule(name).register_forward_hook(hook)
    gradients = torch.autograd.grad(loss_of(model, tokens), [out for _, out in seen.values()])
    found = {}
    for (name, (given, out)), b in zip(seen.items(), gradients, strict=True):
        h, W = rows_of(out, name), model.get_submodule(name).weight.detach()
        squares = [float((column * column).mean()) for column in h.T]
        peaks = sorted(float(column.abs().max()) for column in h.T)
        found[name] = {
            "log_z": sum(math.log(sum(map(math.exp, row))) for row in h.tolist()) / len(h),
            "readout_row": math.sqrt(9) * max(float(row.norm()) for row in W),
            "feature_kurtosis": len(squares) * sum(s * s for s in squares) / sum(squares) ** 2,
            "outlier_ratio": peaks[-1] / peaks[(len(peaks) - 1) // 2],
            "underflow_inputs": math.nan if name == "words" else lost(rows_of(given, name), E4M3),
            "underflow_weights": lost(W, E4M3),
            "underflow_backward": lost(rows_of(b, name), E5M2),
        }
        if name != "head":
            found[name].update(log_z=math.nan, readout_row=math.nan)
    return found


def measured(model, tokens, keys=KEYS):
    probe = after_one_step(model, lambda: loss_of(model, tokens), quantities=keys)
    return probe.latest


@pytest.fixture(scope="module")
def taken():
    return measured(fresh(), batch()), expected(batch())


@pytest.mark.parametrize("key", KEYS)
def test_numbers_by_plain_arithmetic(taken, key):
    m, found = taken
    values = [found[name][key] for name in LAYERS]
    for name in LAYERS:
        assert m.value(key, name) == pytest.approx(found[name][key], rel=1e-6, nan_ok=True), name
    if key.startswith("underflow") and key != "underflow_backward":
        assert 0.01 < max(v for v in values if not math.isnan(v)) < 0.9, "else nothing is compared"


@pytest.mark.parametrize("key", KEYS)
def test_a_single_key_is_what_it_is_among_others(taken, key):
    m = measured(fresh(), batch(), [key])
    torch.testing.assert_close(m.values[key], taken[0].values[key], equal_nan=True)


def test_what_there_is_not_has_a_reason(taken):
    m, _ = taken
    assert m.why("log_z", "body") == m.why("readout_row", "words") == "it is not an output layer"
    assert m.why("underflow_inputs", "words") == "an embedding's inputs are one-hot"
    assert m.why("feature_kurtosis", "dead") == "undefined: it divides by a norm that is zero"
    assert m.value("underflow_weights", "dead") == 0
    assert m.summary["skipped_updates"] == 0


def test_entries_that_are_zero_are_not_lost():
    x = torch.tensor([[0.0, 448.0, 2.0**-10, -(2.0**-10)], [0.0, 0.0, 2.1**-10, 2.0**-9]])
    assert float(underflow_share([x[:1], x[1:]], torch.float8_e4m3fn)) == pytest.approx(3 / 5) == lost(x, E4M3)


def test_gradients_of_very_different_sizes_are_lost_too():
    model = nn.Linear(3, 2, bias=False).double()
    x = torch.randn(64, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sizes = torch.logspace(0, -14, 64, dtype=torch.float64)[:, None]
    probe = after_one_step(model, lambda: (model(x) * sizes).sum(), quantities=["underflow_backward"])
    share = lost(sizes, E5M2)
    assert 0.1 < share < 0.9
    assert probe.latest.value("underflow_backward", "weight") == pytest.approx(share)


def job(way):
    model, rank, count = fresh(), torch.distributed.get_rank(), torch.distributed.get_world_size()
    if way == "ddp":
        model = DistributedDataParallel(model)
    else:
        for part in (model.words, model.conv, model.body, model.dead, model.head, model):
            fully_shard(part)
    m = measured(model, batch()[rank::count])
    names = {info.name.removeprefix("module."): info.name for info in m.layers}
    return [m.value(key, names[name]) for key in KEYS for name in LAYERS]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_two_processes_have_the_numbers_of_one_or_the_mean_of_their_own(tmp_path, way):
    """Casts are those of each process by itself: of rows always, of weights where each has a part."""
    alone, apart = expected(batch()), [expected(batch()[rank::2]) for rank in (0, 1)]
    for found in on_processes(job, tmp_path, 2, way):
        found = dict(zip(((key, name) for key in KEYS for name in LAYERS), found, strict=True))
        for (key, name), value in found.items():
            if key in ("underflow_inputs", "underflow_backward"):
                mean = sum(some[name][key] for some in apart) / 2
                assert value == pytest.approx(mean, rel=1e-4, abs=1e-6, nan_ok=True), (key, name)
            elif key == "underflow_weights" and way == "fsdp2":
                mean = sum(lost(part, E4M3) for part in fresh().get_submodule(name).weight.chunk(2)) / 2
                assert value == pytest.approx(mean, rel=1e-4, abs=1e-6), (key, name)
            else:
                assert value == pytest.approx(alone[name][key], rel=1e-4, nan_ok=True), (key, name)
