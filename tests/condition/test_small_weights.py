"""Networks whose weights all begin so small that nothing of the samples reaches the output layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from spectral_monitor import SpectralCondition, SpectralProbe
from spectral_monitor.condition.whole_network import TINY_WEIGHTS
from tests.one_step import training_step

WIDTH = 32


class Sine(nn.Module):
    """A sine of 30 times its inputs, as in SIREN."""

    def forward(self, x):
        return torch.sin(30 * x)


def network(factor, depth=5, between=nn.ReLU, norms=False):
    """Layers whose weights, but not biases, are multiplied by a factor."""
    torch.manual_seed(0)
    parts = []
    for _ in range(depth - 1):
        parts += [nn.Linear(WIDTH, WIDTH), *([nn.LayerNorm(WIDTH)] if norms else []), between()]
    model = nn.Sequential(*parts, nn.Linear(WIDTH, 10))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(factor)
    return model


def causes(model, lr=0.1, steps=4, **condition):
    """The roots on the network at each step, and the probe."""
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    condition = SpectralCondition(**condition)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe", condition=condition)
    found = []
    for _ in range(steps):
        x = torch.randn(64, WIDTH)
        with training_step(probe, optimizer):
            functional.cross_entropy(model(x), x[:, :10].argmax(1)).backward()
        found.append({root.cause for root in probe.latest.roots if root.layer == "network"})
    return found, probe


def test_weights_that_are_ten_times_too_small_are_the_root():
    found, probe = causes(network(0.1))
    assert found == [{"weights_too_small"}] * 4
    (root,) = probe.latest.roots
    assert root.sentence == (
        "initial weights multiply features by only 0.057 in each layer, so outputs hardly differ between samples: "
        "multiply initial weights by about 10"
    )
    assert (root.remedy.action, root.remedy.layers) == ("scale_weights", ())
    assert root.remedy.value == pytest.approx(10.3, abs=0.2)


def test_the_check_is_one_of_features():
    assert causes(network(0.1), ignore=["features"])[0][0] == set()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"factor": 1.0}, "usual weights"),
        ({"factor": 1.0, "depth": 12}, "so deep that outputs hardly differ although each layer is usual"),
        ({"factor": 0.1, "norms": True}, "norms make up for it"),
        ({"factor": 0.1, "depth": 2}, "the first layer leaves enough of the samples"),
        ({"factor": 0.08, "between": Sine}, "the forward pass multiplies by 30"),
    ],
)
def test_small_or_deep_networks_that_lose_nothing_or_are_usual(options, why):
    assert not any("weights_too_small" in found for found in causes(network(**options))[0]), why


def test_a_usual_deep_network_does_lose_its_samples():
    """So that the case above is decided by the size of its weights."""
    model = network(1.0, depth=12)
    assert model[:-1](torch.randn(64, WIDTH)).std(0).max() < 1e-3


def test_the_verdict_ends_when_outputs_differ():
    model = network(0.1)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps=20, mode="observe", condition=SpectralCondition())
    found = []
    for _ in range(200):
        x = torch.randn(64, WIDTH)
        with training_step(probe, optimizer):
            functional.cross_entropy(model(x), x[:, :10].argmax(1)).backward()
        if probe.latest is not None:
            found.append("weights_too_small" in {root.cause for root in probe.latest.roots})
    assert not found[-1]


def test_samples_that_are_all_alike_are_not_the_weights_fault():
    model = network(0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe")
    for _ in range(3):
        with training_step(probe, optimizer):
            functional.cross_entropy(model(torch.ones(64, WIDTH)), torch.arange(64) % 10).backward()
        roots = {root.cause for root in probe.latest.roots if root.layer == "network"}
        assert "weights_too_small" not in roots


def roots_of(factor, optimizer, lr, **options):
    """The roots on the network over 100 steps in a shallow network, which lets the samples through."""
    model = network(factor, depth=3)
    optimizer = getattr(torch.optim, optimizer)(model.parameters(), lr, **options)
    probe = SpectralProbe(model, optimizer, mode="observe", max_overhead=None)
    for _ in range(100):
        x = torch.randn(64, WIDTH)
        with training_step(probe, optimizer):
            functional.cross_entropy(model(x), x[:, :10].argmax(1)).backward()
    return [root for latest in probe.measurements for root in latest.roots if root.layer == "network"]


@pytest.mark.parametrize(
    ("factor", "optimizer", "lr", "causes", "symptom"),
    [
        (0.1, "Adam", 0.01, {"weights_too_small"}, "weights have moved by"),
        (1.0, "Adam", 0.01, set(), None),
        (0.1, "SGD", 0.01, {"weights_too_small"}, "steps are small"),
        (1.0, "SGD", 0.01, {"rates_too_small"}, "largest steps so far"),
        (0.1, "Adam", 3.0, {"rates_too_large", "diverged"}, "steps are too large"),
    ],
)
def test_steps_that_do_not_suit_small_weights_are_the_weights_fault(factor, optimizer, lr, causes, symptom):
    """Unless steps are too large for usual weights as well."""
    roots = roots_of(factor, optimizer, lr)
    assert bool(roots) == bool(causes)
    assert {root.cause for root in roots} <= causes
    assert symptom is None or any(symptom in root.sentence for root in roots)
    for root in roots:
        if root.cause == "weights_too_small":
            assert root.remedy.value == pytest.approx(10, rel=0.1)
            assert "by about 10" in root.sentence


@pytest.mark.parametrize(("factor", "named"), [(0.03, True), (0.04, False), (0.005, True)])
@pytest.mark.parametrize("depth", [2, 5])
def test_norms_do_not_make_up_for_tiny_weights(factor, named, depth):
    """Usual weights of PyTorch multiply features by 0.58."""
    found, probe = causes(network(factor, depth=depth, norms=True), ignore=["features"])
    assert ["weights_too_small" in roots for roots in found] == [named] * 4
    sentences = [root.sentence for root in probe.latest.roots if root.cause == "weights_too_small"]
    assert all("unless a factor in the forward pass makes up for it" in sentence for sentence in sentences)
    ignored = causes(network(factor, depth=depth, norms=True), ignore=["features", "weights"])[0]
    assert not any("weights_too_small" in roots for roots in ignored)


@pytest.mark.parametrize("rescaled", [False, True])
def test_tiny_weights_that_a_module_rescales_are_left_alone(rescaled):
    model = network(0.005)
    for layer in model:
        if rescaled and isinstance(layer, nn.Linear):
            nn.utils.parametrizations.weight_norm(layer).parametrizations.weight.original0.data.fill_(1.0)
    assert any("weights_too_small" in roots for roots in causes(model)[0]) != rescaled


def test_layers_that_begin_at_zero_do_not_count():
    model = network(1.0)
    for layer in (model[2], model[4], model[6]):
        nn.init.zeros_(layer.weight)
    assert not any("weights_too_small" in roots for roots in causes(model, lr=1e-3)[0])


def test_the_stated_limit_of_tiny_weights():
    page = (Path(__file__).parents[2] / "docs" / "verdicts.md").read_text()
    (line,) = (line for line in page.splitlines() if "the same factor by itself" in line)
    assert float(line.strip("| ").rpartition(" | ")[2]) == TINY_WEIGHTS
