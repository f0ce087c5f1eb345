"""The parts of the change of the outputs since the start, against two deep copies and a split by hand in float64."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.engine.features import linearization
from tests.engine.test_laziness import Doubled, Returns, made, tokens, train
from tests.one_step import training_step

torch.set_num_threads(1)
KEYS = list(linearization.PARTS)


def given_to(model, name, x):
    """What a layer is given and returns, under the masks of seed 0, in float64: rows (R, n) and (R, m)."""
    model, seen = copy.deepcopy(model).double(), []
    handle = model.get_submodule(name).register_forward_hook(lambda m, args, out: seen.append((args[0], out)))
    torch.manual_seed(0)
    model(x if not x.is_floating_point() else x.double())
    handle.remove()
    return [torch.cat([pair[k].detach().flatten(0, -2) for pair in seen]) for k in (0, 1)]


def split(start, now, name, x):
    """The three parts over the change of the outputs; what is measured of float64 is kept in float32."""
    (x0, f0), (xt, ft) = (given_to(model, name, x) for model in (start, now))
    V0, Vt = (model.get_submodule(name).weight.detach().double() for model in (start, now))
    df, dx, dV = ft - f0, xt - x0, Vt - V0
    parts = [dx @ V0.T, x0 @ dV.T, dx @ dV.T]
    bias = [model.get_submodule(name).bias for model in (start, now)]
    moved = 0 if bias[0] is None else (bias[1] - bias[0]).detach().double()
    torch.testing.assert_close(sum(parts) + moved, df, rtol=1e-4, atol=1e-4)
    return [float(part.norm() / df.norm()) for part in parts]


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-6), (torch.float32, 1e-3)])
@pytest.mark.parametrize("others", [[], ["linearity"]], ids=["alone", "with linearity"])
def test_against_two_copies(dtype, rel, others):
    """The readout's weight is tied to the embedding; there is dropout, whose masks are those of the start."""
    model = made(dtype)
    probe, start = train(model, keys=[*KEYS, *others])
    want = split(start, model, "head", tokens(0))
    assert [probe.latest.value(key, "head") for key in KEYS] == pytest.approx(want, rel=rel)
    assert min(want) > 0.02
    assert {probe.latest.why(key, "twice") for key in KEYS} == {"it is not an output layer"}


@pytest.mark.parametrize("settings", [{"low_memory": True}, {"replay_samples": None}, {"every_n_steps": 1}], ids=str)
def test_settings_do_not_matter(settings):
    model = made()
    probe, start = train(model, keys=KEYS, **settings)
    want = split(start, model, "head", tokens(0))
    assert [probe.latest.value(key, "head") for key in KEYS] == pytest.approx(want, rel=1e-6)


class Heads(nn.Module):
    """A trunk with two heads, one of them with a bias that moves."""

    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 2, bias=False)

    def forward(self, x):
        h = self.trunk(x).tanh()
        return self.left(h).square().mean() + (self.right(h) - 1).square().mean()


def test_each_of_several_readouts_has_its_own():
    torch.manual_seed(0)
    model, x = Heads().double(), torch.randn(9, 6).double()
    probe, start = train(model, keys=KEYS, batch=lambda step: x)
    for name in ("left", "right"):
        want = split(start, model, name, x)
        assert [probe.latest.value(key, name) for key in KEYS] == pytest.approx(want, rel=1e-6), name


def test_where_only_the_readout_is_trained_it_is_all():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4, bias=False)).double()
    net[0].requires_grad_(False)
    x = torch.randn(9, 6).double()
    probe, _ = train(Returns(net), keys=KEYS, batch=lambda step: x)
    assert [probe.latest.value(key, "net.2") for key in KEYS] == pytest.approx([0, 1, 0], abs=1e-9)


def test_where_the_readout_is_frozen_features_are_all():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4, bias=False)).double()
    net[2].requires_grad_(False)
    x = torch.randn(9, 6).double()
    probe, _ = train(Returns(net), keys=KEYS, batch=lambda step: x, roles={"net.2": "readout"})
    assert [probe.latest.value(key, "net.2") for key in KEYS] == pytest.approx([1, 0, 0], abs=1e-9)


def test_it_takes_no_derivative_in_forward_mode():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), Doubled(), nn.Linear(8, 4)).double()
    x = torch.randn(9, 6).double()
    probe, start = train(Returns(net), keys=[*KEYS, "linearity"], batch=lambda step: x)
    assert "no derivative in forward mode" in probe.latest.why("linearity", "net.2")
    want = split(start, Returns(net), "net.2", x)
    assert [probe.latest.value(key, "net.2") for key in KEYS] == pytest.approx(want, rel=1e-6)


def test_a_computed_readout_says_so():
    torch.manual_seed(0)
    head = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), head).double()
    x = torch.randn(9, 6).double()
    probe, _ = train(Returns(net), keys=KEYS, batch=lambda step: x)
    assert {probe.latest.why(key, "net.2") for key in KEYS} == {linearization.NO_MATRIX}


def test_weights_that_are_moved_before_the_first_step_are_seen():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(9, 6)
    model = Returns(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, quantities=KEYS, every_n_steps=3, drift_every=1)
    with torch.no_grad():
        net[0].weight.mul_(2)
    for _ in range(3):
        with training_step(probe, optimizer):
            model(x).backward()
    assert {probe.latest.why(key, "net.2") for key in KEYS} == {linearization.ELSEWHERE}


def test_what_rounding_hides_is_no_number():
    model = made(torch.bfloat16)
    probe, _ = train(model, keys=KEYS, lr=1e-3)
    assert all(math.isnan(probe.latest.value(key, "head")) for key in KEYS)
    assert {probe.latest.why(key, "head") for key in KEYS} == {"its change is too close to the rounding of its outputs"}
