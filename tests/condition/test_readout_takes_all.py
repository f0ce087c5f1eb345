"""A readout that takes nearly all of the loss's decrease, and updates in proportion to Frobenius norms."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.condition import NETWORK, Judge, SpectralCondition
from spectral_monitor.condition.causes import layers
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.optimizers.recipe import describe
from spectral_monitor.condition.row import columns
from spectral_monitor.condition.trends.readout import ReadoutTrend
from tests.condition.synthetic import LAYERS, judged, measured, only_verdict, set_by, verdicts_on
from tests.one_step import training_step


def told(shares, settings=None, judge=None, every=20, first=1, **changed):
    """The causes after each measurement with a readout that has these shares."""
    judge, found = judge or Judge(SpectralCondition()), []
    for k, share in enumerate(shares, first):
        summary = {} if share is None else {"readout_share": share}
        found.append({v.cause: v for v in judge.judge(measured(every * k, summary=summary, **changed), settings)})
    return found


def test_it_must_last():
    found = told([0.5, *[0.97] * 10])
    assert [len(some) for some in found] == [0] * 8 + [1] * 3
    verdict = found[-1]["readout_takes_all"]
    assert (verdict.layer, verdict.quantity, verdict.value, verdict.band) == (
        NETWORK,
        "readout_share",
        0.97,
        (0.0, 0.95),
    )
    assert "97 % of the loss's decrease has come from the output layer" in verdict.sentence


@pytest.mark.parametrize(
    "shares", [[0.97] * 7, [*[0.97] * 7, 0.8] * 3, [0.94] * 20, [0.97, None] * 7, [math.nan] * 20, [-3.0] * 20]
)
def test_for_a_while_or_unknown_is_no_verdict(shares):
    assert not any(told(shares))


def test_a_few_steps_are_no_verdict():
    """Such as the first ones of a readout that begins at zero."""
    assert not any(told([0.99] * 50, every=2))
    assert told([0.99] * 52, every=2)[-1]


def test_a_state_of_before_there_were_shares_is_a_fresh_one():
    trend = ReadoutTrend()
    trend.load_state_dict({})
    assert trend.state_dict() == ReadoutTrend().state_dict()


def test_it_ends():
    for after in (0.5, 0.0, -0.4):  # negative where the readout's step alone raises the loss
        assert [len(some) for some in told([*[0.97] * 8, after, after])] == [0] * 7 + [1, 0, 0]


def frozen(*names):
    return {name: replace(of, frozen=name in names) for name, of in set_by().items()}


def test_where_hidden_layers_are_not_to_learn_it_is_meant():
    rates = {"head": 0.08}
    assert told([0.99] * 12, frozen())[-1]
    assert not any("readout_takes_all" in some for some in told([0.99] * 12, frozen("a"), contribution={"a": 0.0}))
    stopped = {"a": 0.0}
    assert not any("readout_takes_all" in some for some in told([0.99] * 12, set_by(lr=stopped), lr=stopped))
    assert not any(told([0.99] * 12, set_by(lr=rates), lr=rates)), "a head with a rate of its own"


def test_networks_that_were_trained_before_are_left_alone():
    low_rank = dict.fromkeys(("a", "b", "c", "head"), 3.0)
    assert not any(told([0.99] * 12, weight_natural=low_rank, weight_fro=low_rank))


def test_another_cause_comes_first():
    found = told([0.99] * 12, set_by(lr={"b": 1.0}), lr={"b": 1.0})
    verdicts = list(found[-1].values())
    assert [v.cause for v in verdicts if v.is_root] == ["lr_too_large"]


def test_it_goes_on_from_its_state():
    first, second = Judge(SpectralCondition()), Judge(SpectralCondition())
    told([0.97] * 7, judge=first)
    state = first.state_dict()
    second.load_state_dict(state)
    assert told([0.97], judge=second, first=8)[-1]
    del state["readout"]  # of a judge that knew no shares
    second.load_state_dict(state)
    assert not told([0.97], judge=second, first=8)[-1]


def train(hidden, readout, steps=10):
    """Of plain gradient descent, whose contributions are lr |g|^2; the shares by hand, and the verdicts."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    rates = [hidden] * 4 + [readout] * 2
    optimizer = torch.optim.SGD([{"params": [p], "lr": lr} for p, lr in zip(network.parameters(), rates, strict=True)])
    x, shares = torch.randn(32, 16), []
    probe = SpectralProbe(network, optimizer, every_n_steps=1, quantities="light", mode="observe")
    for _ in range(steps):
        with training_step(probe, optimizer):
            (network(x) - x[:, :1]).square().mean().backward()
            parts = [lr * float(p.grad.square().sum()) for p, lr in zip(network.parameters(), rates, strict=True)]
            shares.append(sum(parts[4:]) / sum(parts))
    return probe, shares


def test_the_share_of_a_real_network():
    probe, shares = train(0.01, 0.01)
    assert [m.summary["readout_share"] for m in probe.measurements] == pytest.approx(shares, rel=1e-3)
    assert 0.2 < min(shares) < max(shares) < 0.95
    assert not probe.latest.verdicts


@pytest.mark.parametrize(("scale", "expected"), [(1.0, False), (300.0, True)])
def test_a_real_network_whose_readout_takes_all(scale, expected):
    """Of targets far larger than outputs begin: at an ordinary rate the readout is at it for long, and nothing else."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    probe = SpectralProbe(network, optimizer, every_n_steps=20, quantities="light", mode="observe")
    x = torch.randn(64, 4)
    targets = scale * (1 + (2 * x[:, :1]).sin() * x[:, 1:2])
    for _ in range(400):
        with training_step(probe, optimizer):
            (network(x) - targets).square().mean().backward()
    causes = {verdict.cause for m in probe.measurements for verdict in m.roots}
    assert ("readout_takes_all" in causes) == expected


def frobenius(part=0.01, **natural):
    """Updates that are the same part of the weights in all layers, of which some have other natural norms."""
    fros = {name: 8.0 * (1 + 0.3 * k) for k, name in enumerate(LAYERS)}
    return {
        "weight_fro": fros,
        "update_fro": {name: part * fro for name, fro in fros.items()},
        "update_natural": {"a": 0.11, "c": 0.12, **natural},
    }


@pytest.mark.parametrize("size", [1.0, 0.01])
def test_updates_like_those_of_lars_are_named_where_one_stands_out(size):
    """Whatever the size of the weights."""
    changed = frobenius(b=5.0)
    changed |= {key: {n: size * x for n, x in changed[key].items()} for key in ("weight_fro", "update_fro")}
    verdict = only_verdict(settings=set_by("LARS"), **changed)
    assert (verdict.layer, verdict.cause) == ("b", "frobenius_rule")
    assert "each step is 0.01 of the Frobenius norm of the weights in every layer" in verdict.sentence
    assert verdict.remedy.value == pytest.approx(1 / verdict.ratio)


def test_they_are_no_verdict_by_themselves():
    assert not verdicts_on(20, settings=set_by("LARS"), **frobenius())


@pytest.mark.parametrize("size", [0.2, 20.0])
@pytest.mark.parametrize(("factor", "expected"), [(1.02, False), (1.1, True)])
def test_updates_of_one_natural_norm_too_are_another_rule(size, factor, expected):
    """Then nothing tells that they follow the Frobenius norm."""
    measurement = measured(1, **frobenius(**dict.fromkeys(LAYERS, size) | {"b": factor * size}))
    network = Network.read(measurement, columns(measurement), set_by("LARS"))
    assert layers._is_frobenius(network) == expected


def test_five_percent_apart_is_another_rule():
    changed = frobenius(b=5.0)
    changed["update_fro"]["c"] *= 1.08
    assert only_verdict(settings=set_by("LARS"), **changed).cause == "unknown"


def test_as_many_inputs_everywhere_tell_no_rule():
    """As in the first step of Adam."""
    layers = {name: replace(info, fan_in=64) for name, info in LAYERS.items()}
    assert only_verdict(settings=set_by("LARS"), layers=layers, **frobenius(b=5.0)).cause == "unknown"


@pytest.mark.parametrize(
    ("names", "expected"), [("c head", False), ("b c head", True), ("a b c", False), ("a b head", False)]
)
def test_it_takes_three_layers_of_different_shapes(names, expected):
    """The shorter side of a, b and c is the same; a, b and head have as many inputs."""
    some = {name: LAYERS[name] for name in names.split()}
    last = names.split()[-1]
    measurement = measured(1, layers=some, **frobenius(**{last: 5.0}))
    network = Network.read(measurement, columns(measurement), set_by("LARS"))
    assert layers._is_frobenius(network) == expected


@pytest.mark.parametrize("name", ["LARS", "FusedLAMB"])
def test_the_recipe_says_so(name):
    assert describe(LAYERS.values(), set_by(name)).startswith(f"{name} updates proportional to the Frobenius norm")


def test_nothing_of_this_is_asked_for_if_ignored():
    judge = Judge(SpectralCondition(ignore=["readout_takes_all"]))
    assert not any(told([0.97] * 12, judge=judge))
    assert not judged([])[1]
