"""A shift that begins at zero holds back no gradient, so nobody waits for it; a factor does: real networks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from spectral_monitor import SpectralProbe
from tests.one_step import training_step

WIDTH = 32


class Norm(nn.Module):
    """A norm that is written by hand, with names of its own for gain and shift."""

    def __init__(self, gain=1.0, *ahead):
        """``ahead``: sizes of the axes ahead of the channels, with which gain and shift are taken for tables."""
        super().__init__()
        shape = (*ahead, WIDTH)
        self.gamma, self.beta = nn.Parameter(torch.full(shape, gain)), nn.Parameter(torch.zeros(shape))

    def forward(self, x):
        return functional.layer_norm(x, x.shape[1:]) * self.gamma + self.beta


class Affine(nn.Module):
    """A linear layer that is written by hand."""

    def __init__(self, outputs=WIDTH, factor=1.0):
        super().__init__()
        self.w = nn.Parameter(factor * torch.randn(WIDTH, outputs) / WIDTH**0.5)
        self.b = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return x @ self.w + self.b


class Block(nn.Module):
    """A residual block; its factor ``beta`` begins at zero, as in NAFNet, or it has none."""

    def __init__(self, gated=True):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.beta = nn.Parameter(torch.zeros(WIDTH)) if gated else 1.0

    def forward(self, x):
        return x + self.beta * self.last(functional.gelu(self.first(x)))


def normed(*ahead):
    layers = (layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), Norm(1.0, *ahead), nn.ReLU()))
    return nn.Sequential(*layers)


def with_zero_readout(body, readout=None):
    readout = readout or nn.Linear(WIDTH, 4)
    for parameter in readout.parameters():
        nn.init.zeros_(parameter)
    return body.append(readout)


def measurements(model, lr=1e-3, steps=24, every=1, optimizer=torch.optim.Adam):
    optimizer = optimizer(model.parameters(), lr)
    probe = SpectralProbe(model, optimizer, every_n_steps=every, quantities="light", mode="observe")
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randn(64, WIDTH, generator=generator)
        with training_step(probe, optimizer):
            functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
    return probe.measurements


def waiting(measurement):
    """Return the reasons why layers wait."""
    return {state.reason for state in measurement.states.values() if state.reason.startswith("waits")}


def body_of(kind):
    torch.manual_seed(0)
    if kind in ("norms", "tables"):
        return with_zero_readout(normed(*[1] * (kind == "tables")))
    if kind == "layers":
        body = nn.Sequential(*(part for _ in range(3) for part in (Affine(), nn.ReLU())))
        return with_zero_readout(body, Affine(4))
    return with_zero_readout(nn.Sequential(nn.Linear(WIDTH, WIDTH), Norm(), Block(gated=False), Block(gated=False)))


KINDS = ["norms", "tables", "layers", "residual"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("optimizer", "lr"), [(torch.optim.Adam, 1e-3), (torch.optim.SGD, 0.05)])
def test_nobody_waits_for_shifts_and_nothing_is_told_of_a_healthy_network(kind, optimizer, lr):
    taken = measurements(body_of(kind), lr, optimizer=optimizer)
    assert waiting(taken[-1]) == set()
    assert not any(measurement.verdicts for measurement in taken)
    named = " ".join(reason for measurement in taken[1:] for reason in waiting(measurement))
    assert "beta" not in named
    assert ".b" not in named


@pytest.mark.parametrize("kind", KINDS)
def test_behind_shifts_rates_that_are_too_small_are_told(kind):
    taken = measurements(body_of(kind), 1e-5, steps=40, every="1, 2, 4, ..., every 100")
    assert {verdict.cause for verdict in taken[-1].roots} == {"rates_too_small"}


def test_nobody_waits_for_the_shift_of_a_norm_where_the_second_step_is_not_measured():
    taken = measurements(body_of("norms"), every="1, every 8")
    assert waiting(taken[-1]) == set()


@pytest.mark.parametrize("readout_at_zero", [True, False])
def test_factors_are_waited_for_whatever_their_name(readout_at_zero):
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(4)))
    model = with_zero_readout(body) if readout_at_zero else body.append(nn.Linear(WIDTH, 4))
    taken = measurements(model, steps=4, optimizer=torch.optim.SGD)
    assert waiting(taken[2]) == {"waits until 1.beta, 2.beta and 2 more have grown from zero"} or readout_at_zero
    assert all("1.beta" in reason for measurement in taken for reason in waiting(measurement))
    assert all(waiting(measurement) for measurement in taken)


def test_the_gain_of_a_norm_is_waited_for():
    """Its shift is not, where the gain is not zero: both are alone in their module."""
    torch.manual_seed(0)

    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.norm = nn.Linear(WIDTH, WIDTH), Norm(gain=0.0)

        def forward(self, x):
            return x + self.norm(self.body(x))

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Branch(), Branch(), Norm(), nn.Linear(WIDTH, 4))
    taken = measurements(model, steps=3, optimizer=torch.optim.SGD)
    assert waiting(taken[0]) == {"waits until 1.norm.beta, 1.norm.gamma and 2 more have grown from zero"}
    assert waiting(taken[2]) == waiting(taken[0])
