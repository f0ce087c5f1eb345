"""Weights that an earlier training left take smaller steps; oracle: the stable ranks of what is put into the layers."""

import math

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.correction.policies import TRAINED_SHARE
from spectral_monitor.correction.settings import LRCorrection
from tests.one_step import training_step

WIDTH = 48


def trained_(module):
    """Give a matrix the spectrum that training leaves: a few large singular values over a bulk."""
    with torch.no_grad():
        u, s, v = torch.linalg.svd(module.weight)
        s[:4] *= torch.tensor([6.0, 4.0, 3.0, 2.0])[: len(s[:4])]
        module.weight.copy_(u[:, : len(s)] * s @ v[: len(s)])
    return module


class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def network(first, second, head):
    return nn.Sequential(first, nn.LayerNorm(WIDTH), nn.ReLU(), second, nn.ReLU(), head)


def linear(out=WIDTH):
    return nn.Linear(WIDTH, out)


def corrector(model, steps=1, **settings):
    torch.manual_seed(1)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="correct", correction=LRCorrection(**settings))
    for _ in range(steps):
        with probe.step():
            loss = model(torch.randn(32, WIDTH)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return probe


CASES = {
    "new": (lambda: network(linear(), linear(), linear(5)), set()),
    "loaded": (
        lambda: network(trained_(linear()), trained_(linear()), trained_(linear(5))),
        {"0", "0.bias", "1", "1.bias", "3", "3.bias", "5", "5.bias"},
    ),
    "a new head": (
        lambda: network(trained_(linear()), trained_(linear()), linear(5)),
        {"0", "0.bias", "1", "1.bias", "3", "3.bias", "5.bias"},
    ),
    "adapters": (
        lambda: network(Adapter(trained_(linear())), Adapter(trained_(linear())), linear(5).requires_grad_(False)),
        {"0.up", "3.up", "0.base", "0.base.bias", "1", "1.bias", "3.base", "3.base.bias", "5.bias"},
    ),
    "a target network, frozen from the start": (
        lambda: network(linear().requires_grad_(False), linear(), linear(5)),
        set(),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_which_weights_an_earlier_training_left(case):
    torch.manual_seed(0)
    make, expected = CASES[case]
    found = corrector(make())._supervisor._corrector.wanted.trained
    assert {name.replace(".weight", "") for name in found} == expected


def test_their_steps_are_smaller():
    """Oracle: an exact SVD of what one late step changes, over what the same layer is given where it is new."""
    sizes = {}
    for kind in (trained_, lambda layer: layer):
        torch.manual_seed(0)
        model = network(kind(linear()), kind(linear()), kind(linear(5)))
        probe = corrector(model, steps=12)
        before = model[3].weight.detach().clone()
        began = probe._supervisor._corrector.wanted.began["3"]
        optimizer = probe._supervisor._corrector._optimizers[0]
        with training_step(probe, optimizer):
            model(torch.randn(32, WIDTH)).square().mean().backward()
        update = float(torch.linalg.matrix_norm(model[3].weight.detach() - before, 2))
        sizes[kind is trained_] = update / math.sqrt(began)
    assert sizes[True] / sizes[False] == pytest.approx(TRAINED_SHARE, rel=0.35)


def test_the_first_step_does_not_write_over_a_table():
    """Oracle: the entries of the table before and after; Adam moves each by its learning rate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20))
    nn.init.normal_(model[0].weight, std=0.02)
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="correct")
    tokens = torch.arange(20)
    moved = []
    for _ in range(2):
        with training_step(probe, optimizer):
            nn.functional.cross_entropy(model(tokens), tokens).backward()
        moved.append(float((model[0].weight.detach() - before).abs().max()))
        before = model[0].weight.detach().clone()
    constant = 0.5 / 8  # a constant learning rate counts as half
    assert moved[0] == pytest.approx(constant * TRAINED_SHARE * 0.02 ** (1 / 3), rel=1e-3)
    assert moved[1] > 3 * moved[0], "as soon as it is known to be new"


def test_it_is_said_once(capsys):
    torch.manual_seed(0)
    corrector(CASES["a new head"][0](), steps=3)
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("weights of 2 of 3 matrices look pretrained: their steps are multiplied by 0.25") == 1
    corrector(CASES["new"][0](), steps=3)
    assert "look trained" not in capsys.readouterr().out


def test_a_resumed_run_knows_them():
    torch.manual_seed(0)
    model = CASES["a new head"][0]()
    state = corrector(model)._supervisor._corrector.state_dict()
    fresh = corrector(network(linear(), linear(), linear(5)))._supervisor._corrector
    assert not fresh.wanted.trained
    fresh.load_state_dict(state)
    assert fresh.wanted.trained == set(state["trained"])
    del state["trained"]
    fresh.load_state_dict(state)
    assert not fresh.wanted.trained, "a run of before went by new weights, and goes on so"
