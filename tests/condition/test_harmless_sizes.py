"""Weights of unusual size that do no harm, and what would do harm in their place: real networks, a few steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from spectral_monitor import SpectralProbe
from spectral_monitor.condition.causes import History, cause
from spectral_monitor.condition.findings import Finding
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.optimizers.rates import rates
from spectral_monitor.condition.row import columns
from spectral_monitor.condition.verdict import NETWORK
from spectral_monitor.measurement import LayerInfo
from tests.condition.synthetic import LAYERS, judged, measured, set_by
from tests.one_step import training_step

WIDTH = 64


class Equalized(nn.Module):
    """Divides its weights by the root of their number of inputs when it is called, as ProGAN and StyleGAN do."""

    def __init__(self, inputs, outputs, slower=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / slower)
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.scale = slower / math.sqrt(inputs)

    def forward(self, x):
        return functional.linear(x, self.weight * self.scale, self.bias)


class Branch(nn.Module):
    """A residual branch whose last matrix begins small."""

    def __init__(self, size, passed_by=True, bias=True):
        super().__init__()
        self.first, self.last, self.passed_by = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias), passed_by
        nn.init.xavier_uniform_(self.last.weight, gain=size)

    def forward(self, x):
        h = self.last(functional.silu(self.first(x)))
        return x + h if self.passed_by else h


def causes(model, optimizer, x, steps=6, **settings):
    """Causes by layer after a few steps, and all that was warned of."""
    probe = SpectralProbe(model, optimizer, every_n_steps=1, **settings)
    y = torch.randint(4, (len(x),))
    said = set()
    for _ in range(steps):
        with training_step(probe, optimizer):
            functional.cross_entropy(model(x), y).backward()
        said |= {(verdict.layer, verdict.cause) for verdict in probe.verdicts}
    return said


def equalized(layer):
    torch.manual_seed(0)
    mapping = [layer(WIDTH, WIDTH, 0.01), nn.LeakyReLU(), layer(WIDTH, WIDTH, 0.01), nn.LeakyReLU()]
    body = [layer(WIDTH, 4 * WIDTH), nn.LeakyReLU(), layer(4 * WIDTH, 4 * WIDTH), nn.LeakyReLU()]
    return nn.Sequential(*mapping, *body, layer(4 * WIDTH, 4))


def test_sizes_tell_nothing_where_modules_multiply_their_weights():
    model = equalized(Equalized)
    assert not causes(model, torch.optim.Adam(model.parameters(), 2e-3, (0.0, 0.99)), torch.randn(64, WIDTH))


def test_the_same_weights_are_told_where_they_count():
    def linear(inputs, outputs, slower=1.0):
        made = nn.Linear(inputs, outputs)
        with torch.no_grad():
            made.weight.copy_(Equalized(inputs, outputs, slower).weight)
        return made

    model = equalized(linear)
    said = causes(model, torch.optim.Adam(model.parameters(), 2e-3, (0.0, 0.99)), torch.randn(64, WIDTH))
    assert "weights_too_large" in {cause for _, cause in said}


@pytest.mark.parametrize(("optimizer", "lr"), [(torch.optim.SGD, 1e-4), (torch.optim.Adam, 1e-5)])
@pytest.mark.parametrize("passed_by", [True, False])
def test_small_weights_that_a_residual_stream_passes_by_are_no_fault(optimizer, lr, passed_by):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Branch(1.0), Branch(1e-3, passed_by), Branch(1.0))
    model.append(nn.Linear(WIDTH, 4))
    said = causes(model, optimizer(model.parameters(), lr), torch.randn(64, WIDTH))
    assert (("2.last", "weights_too_small") in said) is not passed_by


@pytest.mark.parametrize("passed_by", [True, False])
def test_features_do_not_vanish_where_a_residual_stream_passes_by(passed_by):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Branch(1e-5, passed_by, bias=False), Branch(1.0))
    model.append(nn.Linear(WIDTH, 4))
    said = causes(model, torch.optim.Adam(model.parameters(), 1e-5), torch.randn(64, WIDTH))
    assert ((NETWORK, "weights_too_small") in said) is not passed_by


@pytest.mark.parametrize(("std", "normed", "told"), [(2e-3, True, False), (2e-3, False, True), (2e-5, True, True)])
def test_a_small_embedding_that_a_norm_brings_to_size_is_no_fault(std, normed, told):
    """Layer normalization has an eps, below which it is as good as none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, WIDTH), nn.LayerNorm(WIDTH) if normed else nn.Identity(), nn.Flatten())
    model.extend([nn.Linear(4 * WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4)])
    nn.init.normal_(model[0].weight, std=std)
    said = causes(model, torch.optim.Adam(model.parameters(), 1e-5), torch.randint(50, (64, 4)))
    assert (("0", "embedding_scale") in said) is told


class Gated(nn.Module):
    """A residual branch that a gain of 0 leaves out at first, as in ReZero and SkipInit."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.alpha = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.alpha * self.body(x)


def gated():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Gated() for _ in range(4)), nn.Linear(WIDTH, 4))


def test_layers_behind_gains_that_began_at_zero_are_not_compared_before_these_have_grown():
    model = gated()
    assert not causes(model, torch.optim.SGD(model.parameters(), 0.02, momentum=0.9), torch.randn(64, WIDTH), steps=8)
    probe = SpectralProbe(model := gated(), torch.optim.SGD(model.parameters(), 0.02), every_n_steps=1)
    with probe.step():
        functional.cross_entropy(model(torch.randn(64, WIDTH)), torch.randint(4, (64,))).backward()
        probe._supervisor._engine.optimizers.optimizers[0].step()
    waits = "waits until 1.alpha, 2.alpha and 2 more have grown from zero"
    assert {state.reason for state in probe.latest.states.values()} == {waits}


def test_networks_that_are_frozen_in_turns_are_judged():
    """As a critic is while its generator is trained: it is frozen when the step ends, and has been trained in it."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {name: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4)) for name in "ab"}
    )
    optimizers = [torch.optim.Adam(part.parameters(), 1e-3) for part in model.values()]
    probe = SpectralProbe(model, optimizers, every_n_steps=1)
    x, y = torch.randn(64, WIDTH), torch.randint(4, (64,))
    for _ in range(4):
        with probe.step():
            for name, optimizer in zip("ab", optimizers, strict=True):
                model.requires_grad_(False)
                model[name].requires_grad_(True)
                optimizer.zero_grad()
                functional.cross_entropy(model[name](x), y).backward()
                optimizer.step()
    assert {state.state for state in probe.latest.states.values()} == {"healthy"}


@pytest.mark.slow
def test_weights_that_began_next_to_zero_do_not_tell_how_fast_a_network_moves():
    """They are told by themselves; most of these move by many times their size, and are in order then."""
    torch.manual_seed(0)
    sizes = (WIDTH,) * 5
    model = nn.Sequential(*(part for _ in sizes for part in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU())))
    model.append(nn.Linear(WIDTH, 4))
    for layer in (layer for layer in model if isinstance(layer, nn.Linear)):
        nn.init.normal_(layer.weight, std=1e-4)
    said = causes(model, torch.optim.Adam(model.parameters(), 1e-3), torch.randn(64, WIDTH), steps=40)
    assert "rates_too_large" not in {cause for _, cause in said}


def test_the_fastest_layer_limits_what_slow_networks_are_advised():
    """Where gates hold back most layers, a hundredfold rate for all ruins those in front."""
    slow = Finding("rates_too_small", NETWORK, "update_natural", 1e-4, 1e-2, (1.0, math.inf))
    network = Network.read(measured(40), columns(measured(40)), set_by("AdamW"))
    factor = {f: cause(slow, network, History(fastest=f)).remedy.value for f in (0.0, 1e-4, 0.01, 0.09)}
    assert factor == {0.0: 100.0, 1e-4: 100.0, 0.01: 10.0, 0.09: 2.0}


@pytest.mark.parametrize(("std", "said"), [(1.0, ("weights_too_large", 8.0)), (0.1, ("rates_too_small", 0.0))])
def test_small_steps_are_the_fault_of_weights_that_all_began_large(std, said):
    """Norms keep features in order. Where weights are of usual size, learning rates are."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for _ in range(5):
        model.extend([nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU()])
    model.append(nn.Linear(WIDTH, 4))
    for layer in (layer for layer in model if isinstance(layer, nn.Linear)):
        nn.init.normal_(layer.weight, std=std)
    x, y = torch.randn(64, WIDTH), torch.randint(4, (64,))
    optimizer = torch.optim.Adam(model.parameters(), 1e-4 if std == 1.0 else 1e-5)
    probe = SpectralProbe(model, optimizer, every_n_steps=4)
    for _ in range(40):
        with training_step(probe, optimizer):
            functional.cross_entropy(model(x), y).backward()
    (verdict,) = (verdict for verdict in probe.verdicts if verdict.layer == NETWORK)
    assert verdict.cause == said[0]
    assert said[1] == 0 or verdict.remedy.value == pytest.approx(0.6 / said[1], rel=0.1), "the gain is the root of 64"


def test_layers_keep_their_states_when_a_schedule_ends_at_zero():
    judge, _ = judged([measured(step, drift_ratio=dict.fromkeys(LAYERS, 0.1)) for step in range(1, 5)])
    before = dict(judge.states)
    assert {state.state for state in before.values()} == {"healthy"}
    still = {key: dict.fromkeys(LAYERS, 0.0) for key in ("lr", "update_natural", "update_ratio")}
    judge.judge(measured(5, drift_ratio=dict.fromkeys(LAYERS, 0.1), **still))
    assert judge.states == before


@pytest.mark.parametrize(("decay", "cause"), [(0.0, "nothing_trains"), (5e-3, "dead")])
def test_a_dead_network_is_dead_with_weight_decay_too(decay, cause):
    """Decay moves its weights, but no gradient ever has: the loss is not 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())
    model.append(nn.Linear(WIDTH, 4, bias=False))
    nn.init.constant_(model[0].bias, -50.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=decay)
    probe = SpectralProbe(model, optimizer, every_n_steps=1)
    for _ in range(30):
        with training_step(probe, optimizer):
            functional.cross_entropy(model(torch.randn(32, WIDTH)), torch.randint(4, (32,))).backward()
    assert {verdict.cause for verdict in probe.verdicts if verdict.is_root} == {cause}


@pytest.mark.parametrize(("loss", "told"), [(2.3, True), (0.0, False), (math.nan, False)])
def test_a_network_that_has_died_in_training_is_told_from_one_that_has_learnt_all(loss, told):
    """No gradient arrives at either, after many that did; the readout's bias alone may still learn."""
    dense = [name for name, info in LAYERS.items() if info.role in ("operator", "readout")]
    dead = {"contribution": dict.fromkeys(dense, 0.0), "drift_ratio": dict.fromkeys(LAYERS, 0.5)}
    taught = [measured(step, drift_ratio=dead["drift_ratio"]) for step in range(1, 4)]
    died = [measured(step, summary={"loss": loss}, **dead) for step in range(4, 10)]
    assert ("dead" in {verdict.cause for verdict in judged([*taught, *died])[1]}) is told


@pytest.mark.parametrize("how", ["frozen", "no rate", "not held"])
def test_where_vectors_alone_are_trained_it_is_not_said_that_nothing_moves(how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    groups = [{"params": [p for p in model.parameters() if p.ndim == 1]}]
    if how == "frozen":
        for p in matrices:
            p.requires_grad_(False)
    elif how == "no rate":
        groups.append({"params": matrices, "lr": 0.0})
    optimizer = torch.optim.SGD(groups, 0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1)
    for _ in range(3):
        with training_step(probe, optimizer):
            functional.cross_entropy(model(torch.randn(32, WIDTH)), torch.randint(4, (32,))).backward()
    assert probe.verdicts[0].sentence.startswith("no matrix moves, only biases and gains do: ")


def test_biases_that_move_are_no_network_that_stands_still():
    """As a network whose matrices get no gradient while a bias does."""
    still = {"update_natural": dict.fromkeys(("tok", "a", "b", "c", "head"), 0.0)}
    _, verdicts = judged([measured(step, **still) for step in (1, 2, 3)])
    assert "nothing_trains" not in {verdict.cause for verdict in verdicts}
    _, verdicts = judged([measured(step, update_natural=dict.fromkeys(LAYERS, 0.0)) for step in (1, 2, 3)])
    assert "nothing_trains" in {verdict.cause for verdict in verdicts}


@pytest.mark.parametrize("hidden", [1, 2, 3])
def test_without_biases_ends_that_share_a_larger_rate_are_those_of_mup(hidden):
    names = ["first", *(f"h{k}" for k in range(hidden)), "head"]
    infos = [LayerInfo(name, "readout" if name == "head" else "operator", 64, 64, (64, 64)) for name in names]
    rated = [(info, 2e-3 if info.name in ("first", "head") else 2.5e-4) for info in infos]
    assert all(rate.factor == pytest.approx(1) for rate in rates(rated).values())
    if hidden > 2:
        slow = [(info, 2.5e-6 if info.name == "h1" else lr) for info, lr in rated]
        assert rates(slow)["h1"].factor == pytest.approx(0.01)
