"""A scalar that a model returns is the loss only if the backward pass began there, and nowhere else."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spectral_monitor import SpectralProbe
from spectral_monitor.engine.results.loss import OTHER_LOSS


class Model(nn.Module):
    """Returns a scalar and other outputs, as ``form`` says."""

    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.form = nn.Linear(8, 16), nn.Linear(16, 4), form

    def forward(self, x, y):
        h = self.first(x).tanh()
        out = self.last(h)
        loss = F.mse_loss(out, y)
        if self.form == "dict":
            return {"loss": loss, "logits": out, "hidden": (x, h)}
        if self.form == "views":  # logits reach the loss by two ways
            shifted, rest = out.view(-1, 2)[:-1], out[:, 2:]
            return {"loss": shifted.square().mean() + rest.mean(), "logits": out, "shifted": shifted}
        return (loss, out) if self.form == "tuple" else (out, h.square().mean())


def of_dict(out, y):
    return out["loss"]


def distilled(out, y):
    return out["loss"] + F.mse_loss(out["logits"], y.roll(1, 0))


def own(out, y):
    return F.l1_loss(out["logits"], y)


def vq_vae(out, y):
    return F.mse_loss(out[0], y) + out[1]


WHOLE = {
    "dict": ("dict", of_dict, 1),
    "two ways": ("views", of_dict, 1),
    "tuple": ("tuple", lambda out, y: out[0], 1),
    "micro-batches": ("dict", lambda out, y: out["loss"] / 3, 3),
}
OTHER = {
    "VQ-VAE": ("part", vq_vae, 1),
    "mixture of experts": ("part", lambda out, y: F.mse_loss(out[0], y) + 0.01 * out[1], 1),
    "returned but not used": ("part", lambda out, y: F.mse_loss(out[0], y), 1),
    "distilled": ("dict", distilled, 1),
    "own loss of the logits": ("dict", own, 1),
    "weighted": ("dict", lambda out, y: 0.3 * out["loss"], 1),
    "twice": ("views", lambda out, y: out["loss"] + out["shifted"].sum(), 1),
}


def measured(form, loss_of, accumulated, scale=1.0):
    """Return the summary of a step, its reasons, and what the scalar really changed by."""
    model = Model(form)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities="standard", replay_samples=None)
    x, y = torch.randn(32, 8), torch.randn(32, 4)

    def value():
        with torch.no_grad():
            out = model(x, y)
        return float(out["loss"] if isinstance(out, dict) else out[0] if form == "tuple" else out[1])

    before = value()
    with probe.step(accumulated=accumulated):
        (loss_of(model(x, y), y) * scale).backward()
        for parameter in model.parameters():
            parameter.grad /= scale
        optimizer.step()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return probe.latest, before, value() - before


@pytest.mark.parametrize("case", WHOLE)
def test_a_loss_that_is_trained_on_is_known(case):
    latest, before, change = measured(*WHOLE[case])
    assert latest.summary["loss"] == pytest.approx(before, rel=1e-6)
    assert latest.summary["loss_change"] == pytest.approx(change, rel=1e-4)


def test_a_scaled_loss_of_half_precision_is_known():
    latest, _, change = measured("dict", of_dict, 1, scale=65536.0)
    assert latest.summary["loss_change"] == pytest.approx(change, rel=1e-4)


@pytest.mark.parametrize("case", OTHER)
def test_a_scalar_that_is_not_or_not_all_of_the_loss_is_no_loss(case):
    latest, *_ = measured(*OTHER[case])
    for key in ("loss", "loss_change", "edge", "critical_lr"):
        assert math.isnan(latest.summary[key]), key
        assert latest.why(key, "summary") == OTHER_LOSS


def test_samples_of_the_batch_have_no_loss_for_all_of_it():
    model = Model("dict")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, replay_samples=4)
    for _ in range(3):
        with probe.step():
            model(torch.randn(32, 8), torch.randn(32, 4))["loss"].backward()
            optimizer.step()
    assert math.isnan(probe.latest.summary["loss_change"])
    assert "replay_samples=None" in probe.latest.why("loss_change", "summary")
