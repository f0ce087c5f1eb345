"""The twin with an activation: losses of the specification, expectations by quadrature, and wide modules."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.limits import WeightedNeurons, neuron_twin
from spectral_monitor.limits.neuron_twin import RELATIVE_TO_START
from spectral_monitor.limits.scales import GOES_WITH_WIDTH, OF_ENTRIES
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.scaling import MUP, NTP, reference_run

from .test_twin import LR, D, K, measured, train

KEYS = ("feature_change", "feature_rms", "weight_natural", "update_natural", "alignment", "feature_drift")


def perceptron(n, activation=None, bias=False, d=1, k=1):
    names = ("first", "act", "second")
    layers = nn.Linear(d, n, bias=bias), activation or nn.Tanh(), nn.Linear(n, k, bias=bias)
    return nn.Sequential(OrderedDict(zip(names, layers, strict=True)))


def test_losses_are_those_of_the_specification():
    limit = neuron_twin(perceptron(64).double(), MUP, 0.5)
    optimizer, found = torch.optim.SGD(limit.param_groups), []
    for y in (1.0, 1.0, -1.0, 1.0, -1.0, 1.0):
        loss = (limit.module(torch.ones(1, 1, dtype=torch.float64)) - y).square().sum() / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    assert found == pytest.approx([0.5, 0.1794, 1.303, 0.4203, 0.899, 0.515], abs=1e-3)


def test_features_are_those_of_the_quadrature():
    """The mean square of hidden features after six steps, against 3,600 nodes of the Gauss-Hermite rule."""
    neurons, one = WeightedNeurons(1, 1, torch.tanh, lr=0.5), torch.ones(1, 1, dtype=torch.float64)
    limit = neuron_twin(perceptron(64).double(), MUP, 0.5)
    optimizer = torch.optim.SGD(limit.param_groups)
    for y in (1.0, 1.0, -1.0, 1.0, -1.0, 1.0):
        neurons.step(one, lambda f, y=y: f - y)
        optimizer.zero_grad()
        ((limit.module(one) - y).square().sum() / 2).backward()
        optimizer.step()
    kernel = limit.module[:2](one).square().mean().item()
    assert kernel == pytest.approx(neurons.feature_kernel(one, one).item(), rel=2e-3)
    start = neuron_twin(perceptron(64).double(), MUP, 0.5).module[:2](one).square().mean().item()
    assert abs(start / kernel - 1) > 0.02


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU()])
@pytest.mark.parametrize("bias", [False, True])
def test_wide_modules_come_close_to_the_twin(activation, bias):
    limit = neuron_twin(perceptron(8, activation, bias, D, K).double(), MUP, LR / 10)
    wanted = train(limit.module, limit.param_groups, momentum=0.9)
    distances = []
    for n in (256, 16384):
        torch.manual_seed(0)
        module = perceptron(n, activation, bias, D, K).double()
        MUP.init_(module)
        got = train(module, MUP.param_groups(module, lr=LR / 10, optimizer="sgd"), momentum=0.9)
        distances.append(((got - wanted).norm() / wanted.norm()).item())
    assert distances[1] < 0.02
    assert distances[1] < distances[0] / 3


FOUR_PROBES = 0.3
"""Two standard deviations of the mean eigenvalue of a layer of nine outputs on 16 rows, by four random vectors."""


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("bias", [False, True])
def test_every_quantity_is_that_of_a_wide_module(bias):
    """What the probe says of the twin, against what it says of width 16,384."""
    limit = neuron_twin(perceptron(8, None, bias, D, K), MUP, LR)
    torch.manual_seed(1)
    MUP.init_(wide := perceptron(2**14, None, bias, D, K))
    at_twin = measured(limit.module, limit.param_groups)
    found, wanted = limit.measurement(at_twin), measured(wide, MUP.param_groups(wide, lr=LR, optimizer="sgd"))
    compared = set()
    for key in wanted.values:
        for layer in (info.name for info in wanted.layers):
            ours, theirs = found.value(key, layer), wanted.value(key, layer)
            if key in GOES_WITH_WIDTH and layer != "second.bias":
                assert math.isnan(ours)
                assert found.why(key, layer) in ("it goes with the width", at_twin.why(key, layer))
            elif key in OF_ENTRIES:
                assert math.isnan(ours)
            elif key in RELATIVE_TO_START and layer == "second":
                assert math.isnan(ours)
                assert found.why(key, layer) == "outputs are 0 at the start"
            elif math.isfinite(theirs) and key != "lr_multiplier":
                # 0 but for rounding: of outputs that are linear in the weights, and of fewer inputs than samples
                rounding = {"linearity": 1e-6, "bfk_guarantee": 1e-5}.get(key, 0.0)
                rel = FOUR_PROBES if key == "bfk_peak" else 0.07
                assert ours == pytest.approx(theirs, rel=rel, abs=rounding), (key, layer)
                compared.add(key)
    assert len(compared) >= 25
    assert not found.verdicts


def test_what_is_relative_to_outputs_that_are_zero_is_not_a_number():
    limit = neuron_twin(perceptron(8, None, False, D, K), MUP, LR)
    optimizer = torch.optim.SGD(limit.param_groups)
    probe = SpectralProbe(limit.module, optimizer, every_n_steps=1, quantities=list(QUANTITIES), mode="observe")
    x = torch.randn(16, D, generator=torch.Generator().manual_seed(2))
    with probe.step():
        (limit.module(x) - x[:, :K]).square().mean().backward()
        optimizer.step()
    found = limit.measurement(probe.measurements[0])
    assert probe.measurements[0].value("feature_change", "second") > 1e3, "the twin's are zero to rounding"
    for key in ("feature_change", "feature_change_local", "sensitivity", "kernel_change"):
        assert math.isnan(found.value(key, "second")), key
        assert math.isfinite(found.value(key, "first")), key
    for key in ("feature_rms", "update_natural", "bfa_cos"):
        assert math.isfinite(found.value(key, "second")), key


class Net(nn.Module):
    """A perceptron and its loss."""

    def __init__(self, width):
        super().__init__()
        self.net = perceptron(width, None, True, 4, 2)

    def forward(self, x, y):
        return (self.net(x) - y).square().sum(1).mean() / 2


def test_the_reference_line_of_a_perceptron():
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    settings = {"parametrization": MUP, "lr": 0.3, "steps": 3, "quantities": KEYS, "measured": [3]}
    (line,) = reference_run(Net, [(x, x[:, :2])] * 3, **settings)
    torch.manual_seed(0)
    MUP.init_(wide := Net(2**13))
    optimizer = torch.optim.SGD(MUP.param_groups(wide, lr=0.3, optimizer="sgd"))
    start = wide.net.first.weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        wide(x, x[:, :2]).backward()
        optimizer.step()
    weight = wide.net.first.weight.detach()
    assert (weight - start).norm() > 0.1 * start.norm()
    natural = torch.linalg.matrix_norm(weight, 2).item() * math.sqrt(weight.shape[1] / weight.shape[0])
    assert line.value("weight_natural", "net.first") == pytest.approx(natural, rel=0.06)


def test_few_neurons_where_inputs_are_many():
    limit = neuron_twin(perceptron(8, None, False, 3000, 2), MUP, 0.1)
    assert limit.size == 2**24 // 3002 // 2 * 2
    assert limit.module.first.weight.shape == (limit.size, 3000)


def test_parametrizations_without_the_limit_are_refused():
    with pytest.raises(ValueError, match="NTP has no feature-learning limit"):
        neuron_twin(perceptron(8), NTP, 0.1)
    with pytest.raises(ValueError, match="lr must be a finite number > 0, got 0"):
        neuron_twin(perceptron(8), MUP, 0)


def test_other_modules_are_refused():
    for other in (nn.Softmax(1), nn.Identity()):
        with pytest.raises(ValueError, match=rf"Sequential\(Linear, {type(other).__name__}, Linear\) has no limit by"):
            neuron_twin(perceptron(8, other), MUP, 0.1)
