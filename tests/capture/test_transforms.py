"""Layers called inside transforms of torch.func, whose tensors are none of those outside."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from spectral_monitor import SpectralProbe

HIDDEN = "called inside a torch.func transform, where its features cannot be seen"

BORROWED = "called with parameters other than its own, as by torch.func.functional_call"


class Mapped(nn.Module):
    """One layer under vmap, one outside, one in both places."""

    def __init__(self):
        super().__init__()
        self.inside, self.both, self.outside = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.both(vmap(lambda row: self.both(torch.tanh(self.inside(row))))(x))
        return self.outside(h)


def by_backward(model, x):
    model(x).square().mean().backward()


def by_transform(model, x):
    parameters = dict(model.named_parameters())
    gradients = grad(lambda p: functional_call(model, p, (x,)).square().mean())(parameters)
    for name, p in parameters.items():
        p.grad = gradients[name]


def with_others(model, x):
    others = {name: (2 * p).detach().requires_grad_() for name, p in model.named_parameters()}
    loss = functional_call(model, others, (x,)).square().mean()
    for p, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(others.values())), strict=True):
        p.grad = gradient


def beside_others(model, x):
    others = {name: (2 * p).detach() for name, p in model.named_parameters()}
    with torch.no_grad():
        aim = functional_call(model, others, (x,))
    (model(x) - aim).square().mean().backward()


def with_its_own(model, x):
    functional_call(model, dict(model.named_parameters()), (x,)).square().mean().backward()


def plain():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


CASES = {
    "vmap": (Mapped, by_backward, {"inside": HIDDEN, "both": HIDDEN, "outside": ""}),
    "grad": (plain, by_transform, {"0": HIDDEN, "2": HIDDEN}),
    "other parameters": (plain, with_others, {"0": BORROWED, "2": BORROWED}),
    "a teacher's parameters": (plain, beside_others, {"0": "", "2": ""}),
    "its own parameters": (plain, with_its_own, {"0": "", "2": ""}),
}


def trained(make, step, monitored):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe") if monitored else None
    for x in torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1)):
        optimizer.zero_grad()
        with nullcontext() if probe is None else probe.step():
            step(model, x)
            optimizer.step()
    return model, probe


@pytest.mark.parametrize("case", CASES)
def test_weights_are_measured_and_features_say_why_not(case):
    make, step, reasons = CASES[case]
    model, probe = trained(make, step, True)
    plain_model, _ = trained(make, step, False)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain_model.parameters(), strict=True))
    assert [m.step for m in probe.measurements] == [1, 2, 3]
    for layer, reason in reasons.items():
        assert probe.latest.value("update_norm", layer) > 0
        assert probe.latest.why("feature_rms", layer) == reason
        assert math.isnan(probe.latest.value("feature_change", layer)) == bool(reason)
