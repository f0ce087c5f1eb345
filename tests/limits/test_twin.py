"""The twin is the recursion of Algorithm 3, and what wide modules come close to."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.limits import at_infinite_width, infinite_width, twin
from spectral_monitor.limits.neuron_twin import RELATIVE_TO_START
from spectral_monitor.limits.scales import GOES_WITH_WIDTH, OF_ENTRIES
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.scaling import MUP, NTP, SP
from tests.one_step import training_step

D, K, LR = 6, 3, 0.3


def train(module, groups, steps=10, momentum=0.0, tokens=False):
    """Outputs on fixed inputs after steps of SGD on fixed batches."""
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.SGD(groups, lr=0.0, momentum=momentum)
    losses = []
    for _ in range(steps):
        x = torch.randint(D, (8,), generator=generator)
        x = x if tokens else torch.randn(8, D, generator=generator, dtype=torch.float64)
        y = torch.randn(8, K, generator=generator, dtype=torch.float64)
        loss = (module(x) - y).square().sum() / 16
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def pair(n, tokens=False, bias=True):
    first = nn.Embedding(D, n) if tokens else nn.Linear(D, n, bias=bias)
    return nn.Sequential(first, nn.Linear(n, K, bias=False)).double()


def test_the_twin_is_the_recursion():
    limit = twin(pair(64, bias=False), MUP, LR)
    net = infinite_width(D, K, su=1 / math.sqrt(D), dtype=torch.float64)
    losses, generator = [], torch.Generator().manual_seed(2)
    for _ in range(10):
        x = torch.randn(8, D, generator=generator, dtype=torch.float64)
        y = torch.randn(8, K, generator=generator, dtype=torch.float64)
        chi = (net(x) - y) / 8
        losses.append(((net(x) - y).square().sum() / 16).item())
        net = net.step(x, chi, (LR / D, LR * K))
    assert losses[-1] != pytest.approx(losses[0], rel=0.01)
    # Inputs are drawn in the same order there.
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.SGD(limit.param_groups)
    for _ in range(10):
        x = torch.randn(8, D, generator=generator, dtype=torch.float64)
        y = torch.randn(8, K, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        ((limit.module(x) - y).square().sum() / 16).backward()
        optimizer.step()
    torch.testing.assert_close(limit.module[0].weight.detach(), net.U, rtol=0, atol=1e-10)
    torch.testing.assert_close(limit.module[1].weight.detach(), net.V, rtol=0, atol=1e-10)


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_wide_modules_come_close_to_the_twin(tokens, momentum):
    limit = twin(pair(64, tokens), MUP, LR / 10)
    wanted = train(limit.module, limit.param_groups, momentum=momentum, tokens=tokens)
    distances = []
    for n in (256, 16384):
        torch.manual_seed(0)
        module = pair(n, tokens)
        MUP.init_(module)
        got = train(module, MUP.param_groups(module, lr=LR / 10, optimizer="sgd"), momentum=momentum, tokens=tokens)
        distances.append(((got - wanted).norm() / wanted.norm()).item())
    assert distances[1] < 0.02
    assert distances[1] < distances[0] / 3


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)), "Sequential of 3 modules"),
        (nn.Sequential(nn.Conv1d(2, 8, 1), nn.Linear(8, 1)), "'0', a Conv1d"),
        (nn.Sequential(nn.Linear(2, 8), nn.Embedding(8, 1)), "'1', a Embedding"),
        (nn.Linear(2, 8), "Linear has no exact limit"),
        (nn.Sequential(nn.Embedding(4, 8, padding_idx=0), nn.Linear(8, 1)), "padding_idx"),
    ],
)
def test_other_modules_are_refused_by_name(module, message):
    with pytest.raises(ValueError, match=message):
        twin(module, MUP, 0.1)


@pytest.mark.parametrize("parametrization", [SP, NTP])
def test_parametrizations_without_the_limit_are_refused(parametrization):
    with pytest.raises(ValueError, match=f"{parametrization.name} has no feature-learning limit"):
        twin(pair(8), parametrization, 0.1)


def test_values_are_converted_to_those_of_a_wide_module():
    """Of the root mean square of hidden features and of natural norms, at the start."""
    limit, n = twin(pair(8), MUP, LR).module, 2**15
    torch.manual_seed(0)
    wide = pair(n)
    MUP.init_(wide)
    x = torch.randn(4, D, dtype=torch.float64)
    rms = [module[0](x).square().mean().sqrt().item() for module in (limit, wide)]
    assert at_infinite_width("feature_rms", rms[0], layer="hidden", size=D + K) == pytest.approx(rms[1], rel=0.03)
    for index, layer in enumerate(("hidden", "readout")):
        values = []
        for module in (limit, wide):
            W = module[index].weight
            values.append(torch.linalg.matrix_norm(W, 2).item() * math.sqrt(W.shape[1] / W.shape[0]))
        got = at_infinite_width("weight_natural", values[0], layer=layer, size=D + K)
        assert got == pytest.approx(values[1], rel=0.03)
    assert math.isnan(at_infinite_width("weight_fro", 1.0, layer="hidden", size=9))


def measured(module, groups):
    """The third measurement of every quantity, of a training with SGD and momentum."""
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.5)
    probe = SpectralProbe(
        module, optimizer, every_n_steps=1, quantities=list(QUANTITIES), drift_every=1, mode="observe"
    )
    generator = torch.Generator().manual_seed(2)
    target = torch.randn(K, D, generator=generator)
    for _ in range(3):
        x = torch.randn(16, D, generator=generator)
        with training_step(probe, optimizer):
            (module(x) - x @ target.T).square().sum().div(32).backward()
    return probe.measurements[-1]


FOUR_PROBES = 0.3
"""Two standard deviations of the mean eigenvalue of a layer of nine outputs on 16 rows, by four random vectors."""


def test_every_quantity_is_that_of_a_wide_module():
    """What the probe says of the twin, converted, against what it says of width 16,384."""
    n = 2**14
    named = OrderedDict(first=nn.Linear(D, n), second=nn.Linear(n, K, bias=False))
    limit = twin(nn.Sequential(named), MUP, LR)
    torch.manual_seed(1)
    MUP.init_(wide := nn.Sequential(named))
    at_twin = measured(limit.module, limit.param_groups)
    found, wanted = limit.measurement(at_twin), measured(wide, MUP.param_groups(wide, lr=LR, optimizer="sgd"))
    compared, scaled = set(), set()
    for key in wanted.values:
        for layer in ("first", "second", "first.bias"):
            ours, theirs = found.value(key, layer), wanted.value(key, layer)
            if key in GOES_WITH_WIDTH:
                assert math.isnan(ours)
                assert found.why(key, layer) in ("it goes with the width", at_twin.why(key, layer))
            elif key in OF_ENTRIES:
                assert math.isnan(ours)
            elif key in RELATIVE_TO_START and layer == "second":
                assert math.isnan(ours)  # outputs are 0 at the start: what they drift by is without limit
            elif math.isfinite(theirs) and key != "lr_multiplier":
                # 0 but for rounding: of outputs that are linear in the weights, and of fewer inputs than samples
                rounding = {"linearity": 1e-6, "bfk_guarantee": 1e-5}.get(key, 0.0)
                rel = FOUR_PROBES if key == "bfk_peak" else 0.07
                assert ours == pytest.approx(theirs, rel=rel, abs=rounding), (key, layer)
                compared.add(key)
                if at_twin.value(key, layer) != ours:
                    scaled.add(key)
    assert len(compared) >= 25
    natural = {"weight_natural", "update_natural", "gradient_natural", "readout_row"}
    assert scaled == {"feature_rms", "sensitivity", *natural}
    assert {layer for layer in ("first", "second") if found.value("weight_natural", layer) > 1} == {"first", "second"}
