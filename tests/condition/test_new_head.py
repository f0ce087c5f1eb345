"""A new head on a trained backbone: its learning rate may be far larger."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spectral_monitor import SpectralProbe
from spectral_monitor.condition import Judge, SpectralCondition

from .synthetic import measured, set_by

TRAINED = {"weight_natural": dict.fromkeys("abc", 20.0)}
"""Few directions of the backbone hold most of it, as training leaves weights; the head is as it was drawn."""
DRAWN = {"weight_natural": {"head": (1 + math.sqrt(10 / 64)) / math.sqrt(10 / 64) / 3.2}}


def roots(rate, trained=TRAINED, layer="head"):
    """Of a network whose learning rate is 0.00001, but for one layer."""
    lr = dict.fromkeys(("tok", "a", "a.bias", "b", "b.bias", "c", "c.bias", "head"), 1e-05) | {layer: rate}
    values = {"weight_natural": DRAWN["weight_natural"] | trained.get("weight_natural", {})}
    values |= {"lr": lr, "update_natural": {layer: 1.0}, "update_ratio": {layer: 0.1}}
    judge = Judge(SpectralCondition())
    for step in (1, 2, 4):
        found = judge.judge(measured(step, **values), set_by(lr=lr))
        judge_state = judge.state_dict()
        judge = Judge(SpectralCondition())
        judge.load_state_dict(judge_state)
    return {verdict.layer for verdict in found if verdict.is_root}


def test_a_new_head_may_have_a_thousand_times_the_rate():
    assert roots(1e-3) == set()
    assert roots(0.9e-2) == set()
    assert roots(2e-2) == {"head"}


def test_a_trained_head_may_not_nor_one_in_a_new_network():
    trained = {"weight_natural": TRAINED["weight_natural"] | {"head": 20.0}}
    assert roots(1e-3, trained) == {"head"}
    assert roots(1e-3, {}) == {"head"}


def test_nor_a_trained_layer_beside_it():
    assert roots(1e-3, layer="b") == {"b"}


@pytest.mark.parametrize(("factor", "cause"), [(100.0, "readout_init"), (3.0, None), (0.01, None)])
@pytest.mark.parametrize("drawn", [True, False])
def test_a_new_head_that_began_too_large_is_told(factor, cause, drawn):
    """The weights of one that was trained may be of any size."""
    head = factor * DRAWN["weight_natural"]["head"] * (1.0 if drawn else 20.0)
    values = {"weight_natural": TRAINED["weight_natural"] | {"head": head}, "weight_fro": {"head": 3.2 * factor}}
    judge = Judge(SpectralCondition())
    for step in (1, 2, 4):
        found = judge.judge(measured(step, **values), set_by())
    assert [(verdict.layer, verdict.cause) for verdict in found] == ([("head", cause)] if cause and drawn else [])


@pytest.mark.parametrize("rate", [1e-3, 1e-2])
def test_fine_tuning_as_people_do_is_silent(rate):
    """A backbone at a hundredth, or a thousandth, of the rate of its new head."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(512, 64, generator=g), torch.randn(64, 10, generator=g)
    y = (x @ w).relu().argmax(1)
    torch.manual_seed(0)
    body = nn.Sequential(*(module for _ in range(3) for module in (nn.Linear(64, 64), nn.ReLU())))

    def fit(model, optimizer, steps, step):
        for k in range(steps):
            rows = torch.randint(512, (64,), generator=torch.Generator().manual_seed(k))
            with step():
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()

    before = nn.Sequential(body, nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(before.parameters(), 1e-2)
    fit(before, optimizer, 500, torch.enable_grad)
    model = nn.Sequential(body, nn.Linear(64, 10))
    groups = [{"params": model[0].parameters(), "lr": 1e-5}, {"params": model[1].parameters(), "lr": rate}]
    optimizer = torch.optim.AdamW(groups)
    probe = SpectralProbe(model, optimizer, every_n_steps=5)
    fit(model, optimizer, 60, probe.step)
    assert not [str(verdict) for verdict in probe.measurements[-1].verdicts]
