"""Parts of a change of features, changes of gradients and the dual angle, against two copies of a network."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from spectral_monitor import SpectralProbe
from tests.engine.test_full import LAYERS, Homogeneous, Net, batch, fresh, gradients, outputs_of, step

PARTS = ["feature_change_inherited", "feature_change_joint"]
ANGLE, CHANGE = ["dual_bfa_cos"], ["gradient_change"]


def rms(x):
    return float(x.square().sum(1).mean().sqrt())


def parts(before, after, x, y, layer):
    """Return the two parts of a layer's change that come with its inputs, over its outputs before."""
    (old, _), (new, _) = (outputs_of(m, x, y, inputs=True) for m in (before, after))
    h = outputs_of(before, x, y)[0][layer]
    dx = new[layer].detach() - old[layer].detach()
    W, W1 = (m.get_submodule(layer).weight.detach() for m in (before, after))
    return rms(dx @ W.T) / rms(h), rms(dx @ (W1 - W).T) / rms(h)


@pytest.mark.parametrize("low_memory", [False, True])
def test_parts_by_two_copies(low_memory):
    model, optimizer = fresh()
    m, before, (x, y) = step(model, optimizer, quantities=[*PARTS, "feature_change_local"], low_memory=low_memory)
    for layer in ("first", "second", "head"):
        inherited, joint = parts(before, model, x, y, layer)
        assert m.value("feature_change_inherited", layer) == pytest.approx(inherited, rel=1e-6), layer
        assert m.value("feature_change_joint", layer) == pytest.approx(joint, rel=1e-6), layer
        assert (layer == "first") == (inherited == joint == 0)
    assert m.why(PARTS[0], "third").startswith("defined only for a single trained matrix")
    assert m.value("feature_change_local", "first") > 0


def test_parts_add_up_to_the_change():
    """dh = dW h' + W dh' + dW dh' where there is no bias: checked as vectors by the three lengths of one row."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 1, bias=False)).double()
    x = torch.randn(1, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    keys = [*PARTS, "feature_change_local", "feature_change"]
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=keys)
    with probe.step():
        model(x).square().sum().backward()
        optimizer.step()
    joint, inherited = probe.latest.value(PARTS[1], "2"), probe.latest.value(PARTS[0], "2")
    local, whole = (probe.latest.value(key, "2") for key in keys[2:])
    # of one output each part is a number with a sign
    sums = [abs(local + a * inherited + b * joint) for a in (1, -1) for b in (1, -1)]
    assert min(abs(whole - some) for some in sums) < 1e-6 * whole
    assert min(local, inherited, joint) > 0.01 * whole


class Many(nn.Module):
    """A transposed weight, three matrices in one, a pointwise convolution, one with taps, a layer called twice."""

    def __init__(self):
        super().__init__()
        self.below, self.qkv = nn.Linear(5, 6), nn.Linear(6, 12)
        self.point, self.taps = nn.Conv1d(12, 7, 1), nn.Conv1d(7, 8, 3)
        self.twice, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        x = self.qkv(self.below(x).tanh()).transpose(1, 2)
        x = self.taps(self.point(x.tanh())).transpose(1, 2)
        return self.head(self.twice(self.twice(x).tanh())).square().mean()


def test_parts_of_what_is_no_plain_matrix():
    torch.manual_seed(0)
    model, x = Many().double(), torch.randn(6, 4, 5, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = copy.deepcopy(model)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=PARTS, blocks={"qkv": 3})
    with probe.step():
        model(x).backward()
        optimizer.step()
    for name in ("qkv", "point", "twice"):
        rows = []
        for network in (before, model):
            seen = []
            module = network.get_submodule(name)
            handle = module.register_forward_hook(lambda m, args, out, seen=seen: seen.append((args[0], out)))
            network(x)
            handle.remove()
            some = [[part.transpose(1, 2) if name == "point" else part for part in pair] for pair in seen]
            rows.append([torch.cat(parts).flatten(0, 1).detach() for parts in zip(*some, strict=True)])
        dx, W = rows[1][0] - rows[0][0], before.get_submodule(name).weight.detach().flatten(1)
        assert probe.latest.value(PARTS[0], name) == pytest.approx(rms(dx @ W.T) / rms(rows[0][1]), rel=1e-6), name
    assert probe.latest.why(PARTS[0], "taps").startswith("defined only for a single trained matrix")


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_gradient_change_by_two_copies(factor):
    model, optimizer = fresh()
    m, before, (x, y) = step(model, optimizer, quantities=CHANGE, factor=factor)
    g, g_after = (dict(zip(LAYERS, grads(one, x, y), strict=True)) for one in (before, model))
    for layer in ("first", "second", "head"):
        expected = float((g_after[layer] - g[layer]).norm() / g[layer].norm())
        assert expected > 1e-3
        assert m.value("gradient_change", layer) == pytest.approx(expected, rel=1e-6), layer
    assert m.why("gradient_change", "third") == "no gradient arrived at its weight, or more than one"


def grads(model, x, y):
    weights = [model.get_submodule(name).weight.requires_grad_() for name in LAYERS]
    return torch.autograd.grad(outputs_of(model, x, y)[1], weights)


def test_gradient_change_is_not_that_of_clipped_or_averaged_gradients():
    """Gradients are seen where they arrive: clipping and earlier micro-batches do not count."""
    model, optimizer = fresh()
    (x, y), before = batch(18), copy.deepcopy(model)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=CHANGE)
    with probe.step(accumulated=2):
        for half in (slice(9), slice(9, 18)):
            torch.manual_seed(5)
            (model(x[half], y[half]) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    g, g_after = (grads(one, x[9:], y[9:]) for one in (before, model))
    expected = float((g_after[0] - g[0]).norm() / g[0].norm())
    assert probe.latest.value("gradient_change", "first") == pytest.approx(expected, rel=1e-6)


def test_of_several_backward_passes_no_gradient_is_that_of_the_loss():
    model, optimizer = fresh()
    x, y = batch()
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=CHANGE)
    with probe.step():
        model.first.weight.square().sum().backward()  # a penalty by itself
        model(x, y).backward()
        optimizer.step()
    assert math.isnan(probe.latest.value("gradient_change", "first"))
    assert probe.latest.why("gradient_change", "first") == "no gradient arrived at its weight, or more than one"
    assert probe.latest.value("gradient_change", "second") > 0


def test_gradients_of_tables_may_be_sparse():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)

        def forward(self, x, y):
            return functional.cross_entropy(self.head(self.table(x)), y)

    torch.manual_seed(0)
    model = Words().double()
    x, y = torch.tensor([1, 4, 4, 7]), torch.tensor([0, 2, 1, 0])
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.5), copy.deepcopy(model)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=CHANGE)
    with probe.step():
        model(x, y).backward()
        optimizer.step()
    g, g_after = (torch.autograd.grad(one(x, y), one.table.weight)[0].to_dense() for one in (before, model))
    expected = float((g_after - g).norm() / g.norm())
    assert probe.latest.value("gradient_change", "table") == pytest.approx(expected, rel=1e-6)


def test_parameters_show_no_trace_of_hooks():
    model, optimizer = fresh()
    step(model, optimizer, quantities=[*CHANGE, *PARTS, *ANGLE])
    assert all(p._backward_hooks is None for p in model.parameters())


@pytest.mark.parametrize("layer", LAYERS)
def test_dual_angle_by_two_copies(layer):
    model, optimizer = fresh()
    m, before, (x, y) = step(model, optimizer, quantities=ANGLE)
    db = gradients(model, x, y)[layer] - gradients(before, x, y)[layer]
    h = outputs_of(before, x, y)[0][layer]
    expected = float(-(db * h).sum() / (db.norm() * h.norm()))
    assert m.value("dual_bfa_cos", layer) == pytest.approx(expected, rel=1e-6)


def test_backward_speed_follows_from_the_dual_angle():
    """Proposition 6.1: |db| |f| cos is the sum of the contributions further up, for a linear loss without biases."""
    torch.manual_seed(2)
    model = Homogeneous().double()
    x, y = torch.randn(1, 6, dtype=torch.float64), torch.randn(1, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD([{"params": [W], "lr": 1e-6 * (i + 1)} for i, W in enumerate(model.parameters())])
    keys = ["dual_bfa_cos", "backward_speed", "backward_rms", "feature_rms", "contribution"]
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=keys)
    with probe.step():
        model(x, y).backward()
        optimizer.step()
    value, names = probe.latest.value, [f"layers.{i}" for i in range(4)]
    for v, name in enumerate(names[:-1]):
        cosine, speed, b, f = (value(key, name) for key in keys[:-1])
        further = sum(value("contribution", later) for later in names[v + 1 :])
        assert speed * b * f * 20 * cosine == pytest.approx(further, rel=1e-3)
    assert probe.latest.why("dual_bfa_cos", names[-1]).startswith("undefined"), "the loss is linear in the last output"


def test_in_half_the_digits_small_changes_of_gradients_are_rounding():
    torch.manual_seed(1)
    model = Net(p=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    x, y = batch()
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=[*CHANGE, *ANGLE])
    with probe.step():
        model(x.float(), y).backward()
        optimizer.step()
    for key in (*CHANGE, *ANGLE):
        assert probe.latest.why(key, "first") == "its change is too close to the rounding of its gradients"


def test_changes_of_inputs_that_are_rounding_have_no_parts():
    torch.manual_seed(1)
    model = Net(p=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    x, y = batch()
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=PARTS)
    with probe.step():
        model(x.float(), y).backward()
        optimizer.step()
    for key in PARTS:
        assert probe.latest.why(key, "second") == "its change is too close to the rounding of its outputs"
        assert probe.latest.value(key, "first") == 0
