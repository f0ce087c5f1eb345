"""The probe takes what frameworks hand out for the user's own model and optimizer, and nothing else for them."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from lightning.fabric import Fabric
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.capture.unwrap import unwrap_model, unwrap_optimizer
from tests.one_step import training_step


@pytest.fixture(autouse=True)
def forgotten():
    """Accelerate remembers, for the process, the precision and the gradients of whoever trained before."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    Accelerator(cpu=True)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def by_fabric(model, optimizer):
    return Fabric(accelerator="cpu", devices=1).setup(model, optimizer)


def by_accelerate(model, optimizer):
    return Accelerator(cpu=True).prepare(model, optimizer)


def in_parallel(model, optimizer):
    return nn.DataParallel(model), optimizer


def by_both(model, optimizer):
    model, optimizer = by_fabric(model, optimizer)
    return nn.DataParallel(model), AcceleratedOptimizer(optimizer)


WRAPPERS = {"Fabric": by_fabric, "Accelerate": by_accelerate, "DataParallel": in_parallel, "several": by_both}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_wrapped_is_measured_as_if_it_were_not(kind):
    """The same layers under the same names, the same numbers."""
    found = []
    for wrap in (lambda *both: both, WRAPPERS[kind]):
        model = net()
        wrapped, optimizer = wrap(model, sgd(model))
        probe = SpectralProbe(wrapped, optimizer, every_n_steps=1)
        for step in range(2):
            with training_step(probe, optimizer):
                wrapped(torch.linspace(-1, 1, 12 * (step + 1)).reshape(-1, 4)).square().mean().backward()
        found.append([{k: v for k, v in m.scalars().items() if "overhead" not in k} for m in probe.measurements])
    plain, seen = found
    assert len(plain) == 2
    assert plain[1]["spectral/feature_change/0"] > 0
    assert plain[1]["spectral/update_norm/2"] > 0
    assert plain == seen


@pytest.mark.parametrize("kind", WRAPPERS)
def test_it_unwraps_to_the_very_objects(kind):
    model = net()
    optimizer = sgd(model)
    wrapped = WRAPPERS[kind](model, optimizer)
    assert unwrap_model(wrapped[0]) is model
    assert unwrap_optimizer(wrapped[1]) is optimizer


class Holder(nn.Module):
    """A user's child that happens to be called ``module``."""

    def __init__(self):
        super().__init__()
        self.module = net()


class Distorted(nn.Module):
    """A property of that name, beside which there is more to train."""

    def __init__(self):
        super().__init__()
        self.net, self.scale = net(), nn.Parameter(torch.ones(2))

    @property
    def module(self):
        return self.net


@pytest.mark.parametrize("make", [net, Holder, Distorted])
def test_a_users_model_stays_whole(make):
    model = make()
    assert unwrap_model(model) is model


class Lookahead(torch.optim.Optimizer):
    """Steps through another optimizer, then goes half the way back: its own step is the step."""

    def __init__(self, optimizer):
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], {"lr": 0.1})
        self.optimizer = optimizer

    def step(self, closure=None):
        before = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.optimizer.step()
        with torch.no_grad():
            for p, old in zip(self.param_groups[0]["params"], before, strict=True):
                p.lerp_(old, 0.5)


def test_an_optimizer_that_works_through_another_is_measured_itself():
    model = net()
    optimizer = Lookahead(sgd(model))
    assert unwrap_optimizer(optimizer) is optimizer
    probe, before = (
        SpectralProbe(model, optimizer, every_n_steps=1, quantities="light"),
        model[0].weight.detach().clone(),
    )
    with probe.step():
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
    moved = torch.linalg.vector_norm(model[0].weight.detach() - before)
    assert probe.latest.value("update_fro", "0") == pytest.approx(moved.item(), rel=1e-5)


@pytest.mark.parametrize("bad", [None, "sgd", [], [None], {"a": 1}, net()])
def test_what_is_no_optimizer_is_refused(bad):
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer or a list of them"):
        SpectralProbe(net(), bad, every_n_steps=1)
