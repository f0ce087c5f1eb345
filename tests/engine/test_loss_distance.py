"""``summary/loss_distance`` against what is known of residuals, and against gradients in double precision."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spectral_monitor import SpectralProbe
from spectral_monitor.engine.results.loss import loss_distance
from spectral_monitor.engine.results.reasons import StepContext
from spectral_monitor.layers import dissect

OUTPUTS = 3
SQUARED = {  # every way to reduce a squared error
    "mean": lambda r: r.square().mean(),
    "sum": lambda r: r.square().sum(),
    "per sample": lambda r: r.square().sum(1).mean(),
    "half": lambda r: 0.5 * r.square().mean(),
    "weighted": lambda r: 1e-4 * r.square().mean(),
}


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, OUTPUTS))


def measured(model, loss_of, *, tell=True, accumulated=1, **options):
    """The measurement of a step, and the outputs before it in double precision."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe", **options)
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    with probe.step(accumulated=accumulated):
        out = model(x)
        loss = loss_of(out) / accumulated
        loss.backward()
        if tell:
            probe.report_loss(loss)
        optimizer.step()
    outputs = [some.detach().double() for some in (out if isinstance(out, tuple) else (out,))]
    return probe.latest, outputs


def targets(scale):
    return scale * torch.randn(40, OUTPUTS, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("accumulated", [1, 4])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize("how", SQUARED)
def test_it_is_half_the_residuals_of_squared_errors_however_they_are_reduced(how, scale, accumulated):
    latest, (out,) = measured(perceptron(), lambda h: SQUARED[how](h - targets(scale)), accumulated=accumulated)
    residuals = (out - targets(scale).double()).square().mean().sqrt()
    assert latest.summary["loss_distance"] == pytest.approx(float(residuals) / 2, rel=1e-5)


def test_it_is_the_mean_residual_of_absolute_errors():
    latest, (out,) = measured(perceptron(), lambda h: (h - targets(50.0)).abs().mean())
    residuals = (out - targets(50.0).double()).abs().mean()
    assert latest.summary["loss_distance"] == pytest.approx(float(residuals), rel=1e-5)


def test_of_classes_it_is_the_loss_over_the_length_of_its_gradient():
    classes = torch.arange(40) % OUTPUTS
    latest, (out,) = measured(perceptron(), lambda h: F.cross_entropy(5 * h, classes))
    h = out.clone().requires_grad_()
    loss = F.cross_entropy(5 * h, classes)
    (b,) = torch.autograd.grad(loss, h)
    assert latest.summary["loss_distance"] == pytest.approx(float(loss / b.norm() / math.sqrt(h.numel())), rel=1e-5)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, x):
        h = self.body(x).tanh()
        return self.one(h), self.two(h)


def test_outputs_of_several_heads_count_together():
    roles = {"one": "readout", "two": "readout"}
    latest, outputs = measured(
        TwoHeads(), lambda hs: hs[0].square().mean() + (hs[1] - 300).square().mean(), roles=roles
    )
    one, two = (h.clone().requires_grad_() for h in outputs)
    loss = one.square().mean() + (two - 300).square().mean()
    b = torch.cat([some.flatten() for some in torch.autograd.grad(loss, (one, two))])
    expected = float(loss / b.norm() / math.sqrt(b.numel()))
    assert latest.summary["loss_distance"] == pytest.approx(expected, rel=1e-5)


def test_of_an_image_every_pixel_counts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 2, 1))
    latest, (out,) = measured(model, lambda h: (h - 700).square().mean())
    assert latest.summary["loss_distance"] == pytest.approx(float((out - 700).square().mean().sqrt()) / 2, rel=1e-5)


def test_of_many_rows_some_are_taken_for_all():
    latest, (out,) = measured(perceptron(), lambda h: (h - targets(1000.0)).square().mean(), max_rows=16)
    residuals = (out - targets(1000.0).double()).square().mean().sqrt()
    assert latest.summary["loss_distance"] == pytest.approx(float(residuals) / 2, rel=0.3)


@pytest.mark.parametrize(
    ("loss_of", "tell", "why"),
    [
        (lambda h: h.square().mean(), False, "probe.report_loss"),
        (lambda h: -h.square().mean(), True, "not above 0"),
        (lambda h: 0 * h.sum() + 1, True, "are 0"),
    ],
)
def test_where_it_is_not_known_there_is_a_reason(loss_of, tell, why):
    latest, _ = measured(perceptron(), loss_of, tell=tell)
    assert math.isnan(latest.summary["loss_distance"])
    assert why in latest.why("loss_distance", "summary")


def test_the_loss_is_known_where_it_is_told_although_few_samples_are_run_again():
    latest, (out,) = measured(perceptron(), lambda h: (h - 2).square().mean())
    assert latest.summary["loss"] == pytest.approx(float((out - 2).square().mean()), rel=1e-6)
    assert math.isnan(latest.summary["loss_change"])


def test_a_loss_that_is_no_scalar_is_refused_and_one_of_an_abandoned_step_forgotten():
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe")
    with pytest.raises(ValueError, match="scalar"):
        probe.report_loss(torch.zeros(2))
    probe.begin_step()
    probe.report_loss(torch.tensor(7.0))
    probe.abandon_step()
    with probe.step():
        model(torch.randn(40, 8)).square().mean().backward()
        optimizer.step()
    assert math.isnan(probe.latest.summary["loss"])


def test_a_loss_that_is_changed_afterwards_is_the_one_that_was_told():
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe")
    with probe.step():
        loss = model(torch.randn(40, 8)).square().mean()
        loss.backward()
        probe.report_loss(loss)
        before = float(loss.detach())
        loss.data.mul_(100)
        optimizer.step()
    assert probe.latest.summary["loss"] == pytest.approx(before)


@pytest.mark.parametrize(("scale", "accumulated"), [(1.0, 1), (1024.0, 1), (1.0, 8), (1024.0, 8)])
def test_what_the_loss_was_multiplied_by_or_divided_by_is_taken_out(scale, accumulated):
    """Ten rows of three outputs; half of the rows are measured."""
    layer = dissect(nn.Linear(4, 3)).layers[0]
    layer = replace(layer, info=replace(layer.info, role="readout"))
    b = 3.0 * scale / accumulated  # of each row
    raw = {0: {"b.fro": [b * math.sqrt(5)], "b.rows": [5.0], "h.rows": [10.0], "h.size": [30.0]}}
    facts = StepContext({}, set(), set(), called={0}, with_gradients={0}, loss_scale=scale, accumulated=accumulated)
    value, why = loss_distance(60.0, [layer], raw, facts)
    assert not why
    assert value == pytest.approx(60 / (math.sqrt(10 * 9) * math.sqrt(30)))
