"""Where the model returns its loss, a correction looks at it after the step without being told anything."""

from __future__ import annotations

import copy
import math
from types import MethodType

import pytest
import torch
from torch import nn

from spectral_monitor import LRCorrection, SpectralProbe
from spectral_monitor.measurement import SUMMARY
from tests.one_step import training_step


class Noisy(nn.Module):
    """Draws numbers and keeps statistics."""

    def __init__(self, noise=0.2, part=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(noise), nn.Linear(16, 2)
        ).double()
        self.part = part

    def forward(self, x, y):
        out = self.net(x)
        loss = (out - y).square().mean()
        return {"loss": 0.1 * loss if self.part else loss, "logits": out}


def data(count=12):
    generator = torch.Generator().manual_seed(1)
    draw = {"generator": generator, "dtype": torch.float64}
    return [(torch.randn(32, 6, **draw), 3 * torch.randn(32, 2, **draw)) for _ in range(count)]


def looped(micro_batches=1, tell=False, told=None, clip=None, part=False, scale=None, inner=None):
    """Train in a loop of one's own; return the probe, the model, and of each step the losses and the weights."""
    model = Noisy(part=part)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    probe = SpectralProbe(
        model, optimizer, every_n_steps=1, mode="correct", correction=LRCorrection(), quantities="light", tol=1e-6
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    torch.manual_seed(3)
    batches, steps = data(), []
    for first in range(0, len(batches), micro_batches):
        before = copy.deepcopy(model)
        states = []
        with probe.step(accumulated=told or micro_batches):
            optimizer.zero_grad()
            for x, y in batches[first : first + micro_batches]:
                states.append(torch.get_rng_state())
                found = model(x, y)
                loss = found["loss"] + ((found["logits"] - y).square().mean() if part else 0.0)
                if tell:
                    probe.report_loss(loss, lambda x=x, y=y: model(x, y)["loss"])
                scaler.scale(loss / micro_batches).backward()
            if inner is not None:
                inner(model, batches[first])
            scaler.unscale_(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
        steps.append((before, copy.deepcopy(model), states, batches[first : first + micro_batches]))
    return probe, model, steps


def along(before, after, states, batches):
    """The change of the loss in a step and what its gradient predicts, by autograd."""
    losses = []
    for weights in (before, after):
        model = copy.deepcopy(before)
        model.load_state_dict({**model.state_dict(), **dict(weights.named_parameters())})
        model.zero_grad()
        now = torch.get_rng_state()
        total = torch.zeros((), dtype=torch.float64)
        for state, (x, y) in zip(states, batches, strict=True):
            torch.set_rng_state(state)
            total = total + model(x, y)["loss"] / len(batches)
        torch.set_rng_state(now)
        losses.append(total)
        if weights is before:
            total.backward()
            moves = zip(model.parameters(), before.parameters(), after.parameters(), strict=True)
            predicted = sum(float((p.grad * (new - old)).detach().sum()) for p, old, new in moves)
    return float((losses[1] - losses[0]).detach()), predicted


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(("clip", "scale"), [(None, None), (0.05, None), (0.05, 1024.0)])
def test_the_edge_is_that_of_all_micro_batches(micro_batches, clip, scale):
    probe, _, steps = looped(micro_batches, clip=clip, scale=scale)
    found = {m.step: m for m in probe.measurements if "edge" in m.summary}
    assert len(found) >= 4
    for step, measured in found.items():
        change, predicted = along(*steps[step - 1])
        assert measured.summary["loss_change"] == pytest.approx(change, rel=1e-4)
        if predicted < 0:
            assert measured.summary["edge"] == pytest.approx(2 * (1 - change / predicted), rel=1e-3, abs=1e-5)


def test_training_is_that_of_a_loop_that_tells():
    """Random states, statistics and weights, to the last bit."""
    (_, silent, _), (_, telling, _) = looped(), looped(tell=True)
    for key, value in silent.state_dict().items():
        assert torch.equal(value, telling.state_dict()[key]), key


def test_a_part_of_the_loss_is_not_taken_for_the_loss():
    probe, _, _ = looped(part=True)
    assert math.isnan(probe.latest.summary["edge"])
    assert probe.latest.why("edge", SUMMARY)


def test_losses_that_were_divided_by_a_number_nobody_told_are_left_alone():
    probe, _, _ = looped(3, told=1)
    assert math.isnan(probe.latest.summary["edge"])


class Decorated(Noisy):
    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, *batch):
        return super().forward(*batch)


def accelerated(model):
    """Hugging Face's Trainer decorates the method of its model."""
    model.forward = MethodType(torch.autocast("cpu", torch.bfloat16)(Noisy.forward), model)
    return model


HALVES = {"around the call": Noisy, "of the class": Decorated, "of the model": lambda **kw: accelerated(Noisy(**kw))}


@pytest.mark.parametrize("where", HALVES)
def test_under_autocast_the_loss_is_looked_at_in_full_precision(where):
    """In half precision a small change of it is rounding."""
    torch.manual_seed(0)
    model = HALVES[where](noise=0.0).float()
    space = dict(vars(model))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    probe = SpectralProbe(
        model, optimizer, every_n_steps=1, mode="correct", correction=LRCorrection(size=1 / 1024), quantities="light"
    )
    for x, y in data(4):
        x, y = x.float(), y.float()
        before, after = Noisy(noise=0.0), Noisy(noise=0.0)
        before.load_state_dict(model.state_dict())
        with training_step(probe, optimizer):
            with torch.autocast("cpu", torch.bfloat16, enabled=where == "around the call"):
                loss = model(x, y)["loss"]
            loss.backward()
        after.load_state_dict({**before.state_dict(), **dict(model.named_parameters())})
        losses = [float(net.double()(x.double(), y.double())["loss"].detach()) for net in (before, after)]
        assert probe.latest.summary["loss_change"] == pytest.approx(losses[1] - losses[0], rel=0.02)
    assert vars(model) == space, "nothing is left on it"


def test_what_is_called_without_gradients_is_no_micro_batch():
    @torch.no_grad()
    def validate(model, batch):
        model.eval()
        model(*batch)
        model.train()

    probe, _, steps = looped(inner=validate)
    change, _ = along(*steps[0])
    assert probe.measurements[0].summary["loss_change"] == pytest.approx(change, rel=1e-4)


def test_no_hook_remains():
    probe, model, _ = looped()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not probe._engine.step_loss.returned
