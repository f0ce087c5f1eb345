"""Loss scaling: what is reported is of the loss, not of the scaled one; a step the scaler skips is a skipped update."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import nn, optim

from spectral_monitor import SpectralMonitor
from tests.loops.ways import Cast, Manual
from tests.noninterference import zoo
from tests.noninterference.recorder import RecordingLogger, Run


def narrow():
    return nn.Sequential(nn.Linear(8, 96), nn.Tanh(), nn.Linear(96, 4))


def fit(module, monitor, scale, *callbacks, **trainer):
    torch.manual_seed(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    return zoo.fit(module, zoo.loader(), [monitor, *callbacks], RecordingLogger(Run()), plugins=[plugin], **trainer)


def built(kind=Cast, **kwargs):
    torch.manual_seed(0)
    return kind(narrow, **kwargs)


@pytest.mark.parametrize("kind", [Cast, Manual])
def test_nothing_reported_contains_the_scale(kind):
    """Gradients in half precision are coarse, so the runs agree to about 1e-3, not to the last bit."""
    runs = []
    for scale in (1.0, 1024.0):
        runs.append(SpectralMonitor(every_n_steps=1))
        fit(built(kind), runs[-1], scale)
    for one, other in zip(*(run.measurements for run in runs), strict=True):
        for key in ("contribution", "update_norm", "sensitivity", "feature_rms", "backward_stable_rank"):
            for name in ("net.0", "net.2"):
                a, b = one.value(key, name), other.value(key, name)
                assert (math.isnan(a) and math.isnan(b)) or a == pytest.approx(b, rel=0.02), (key, name)
        assert one.summary["loss_change_predicted"] == pytest.approx(other.summary["loss_change_predicted"], rel=0.02)
    seen = [m.value("sensitivity", "net.2") for m in runs[1].measurements]
    assert any(math.isfinite(value) for value in seen)


def test_the_sensitivity_is_that_of_full_precision():
    half, full = SpectralMonitor(every_n_steps=1), SpectralMonitor(every_n_steps=1)
    fit(built(optimizer=lambda p: optim.SGD(p, lr=1.0)), half, 4096.0, accumulate_grad_batches=2)
    torch.manual_seed(0)
    module = built(optimizer=lambda p: optim.SGD(p, lr=1.0))
    torch.manual_seed(0)
    zoo.fit(module, zoo.loader(), [full], RecordingLogger(Run()), accumulate_grad_batches=2)
    assert half.measurements[0].value("sensitivity", "net.2") == pytest.approx(
        full.measurements[0].value("sensitivity", "net.2"), rel=0.05
    )


class Steps(Callback):
    """Steps Lightning counts, and whether the weights moved."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, module, *_):
        self.before = [p.detach().clone() for p in module.parameters()]

    def on_train_batch_end(self, trainer, module, *_):
        moved = any(not torch.equal(a, b) for a, b in zip(self.before, module.parameters(), strict=True))
        self.seen.append((trainer.global_step, moved))


def test_a_step_that_the_scaler_skips_is_counted_and_training_goes_on():
    monitor, steps = SpectralMonitor(every_n_steps=1), Steps()
    fit(built(), monitor, 2.0**40, steps, max_epochs=5)
    skipped = [step for step, moved in steps.seen if not moved]
    assert skipped  # halved until the gradients fit
    assert len(skipped) < len(steps.seen)
    assert [m.step for m in monitor.measurements] == [step for step, _ in steps.seen]
    for m in monitor.measurements:
        missed = m.step in skipped
        assert math.isnan(m.value("update_norm", "net.0")) == missed
        assert math.isfinite(m.value("weight_norm", "net.0"))
        if missed:
            assert m.why("update_norm", "net.0") == "no optimizer made a step"
        assert m.summary["skipped_updates"] == sum(step <= m.step for step in skipped)


class Promises(Callback):
    """-<g, dW> of the first layer, with the gradients as they are after the step."""

    def __init__(self):
        self.promised = []

    def on_train_batch_start(self, trainer, module, *_):
        self.before = module.net[0].weight.detach().clone()

    def on_train_batch_end(self, trainer, module, *_):
        weight = module.net[0].weight
        self.promised.append(-float((weight.grad * (weight - self.before)).sum()))


@pytest.mark.parametrize("fused", [False, True])
def test_contributions_with_a_fused_optimizer_under_scaling(fused):
    """Which takes the scale out of the gradients by itself, during its step."""
    module = built(optimizer=lambda p: optim.AdamW(p, lr=0.01, fused=fused))
    monitor = SpectralMonitor(every_n_steps=1)

    check = Promises()
    fit(module, monitor, 512.0, check)
    for m, promised in zip(monitor.measurements, check.promised, strict=True):
        assert m.value("contribution", "net.0") == pytest.approx(promised, rel=1e-4)
    assert all(promised > 0 for promised in check.promised)
