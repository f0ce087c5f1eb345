"""``summary/edge`` and ``summary/critical_lr`` against the exact curvature along the step: a Hessian-vector product."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from spectral_monitor import SpectralMonitor, SpectralProbe
from spectral_monitor.measurement import SUMMARY
from tests.one_step import after_one_step, training_step


class Returns(nn.Module):
    """Returns its loss, as nanoGPT does."""

    def __init__(self, dtype=torch.float64, width=24):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(10, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)
        )
        self.to(dtype)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.net(x), y)


def batch(k=0, size=64, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 + k)
    x = torch.randn(size, 10, generator=generator, dtype=torch.float64)
    return x.to(dtype), (x[:, :4] + torch.randn(size, 4, generator=generator).double()).argmax(1)


def exact(before, after, x, y):
    """dW^T H dW / <-g, dW> at the weights before the step, in float64."""
    before, after = before.double(), after.double()
    parameters = list(before.parameters())
    step = [q.detach() - p.detach() for p, q in zip(parameters, after.parameters(), strict=True)]
    gradient = torch.autograd.grad(before(x.double(), y), parameters, create_graph=True)
    slope = sum((g * d).sum() for g, d in zip(gradient, step, strict=True))
    product = torch.autograd.grad(slope, parameters)
    return float(sum((h * d).sum() for h, d in zip(product, step, strict=True)) / -slope)


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 3e-4, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_edge_is_the_curvature_along_the_step(kind):
    model = Returns()
    cls, settings = OPTIMIZERS[kind]
    optimizer = cls(model.parameters(), **settings)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, replay_samples=None)
    for k in range(8):
        before = copy.deepcopy(model)
        x, y = batch(k)
        with training_step(probe, optimizer):
            model(x, y).backward()
        want = exact(before, copy.deepcopy(model), x, y)
        found = probe.latest.summary
        assert want > 0
        assert found["edge"] == pytest.approx(want, rel=0.05)
        assert found["critical_lr"] == pytest.approx(2 * settings["lr"] / want, rel=0.05)


def chord(before, after, x, y):
    """Twice 1 less the change of the loss over the predicted one, in float64."""
    before, after, x = before.double(), after.double(), x.double()
    loss = before(x, y)
    loss.backward()
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    return 2 * (1 - float((after(x, y) - loss) / sum((p.grad * (q - p)).sum() for p, q in pairs)))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("factor", [0.001, 0.01, 0.1, 1, 10])
def test_what_is_known_in_float32_is_right_to_two_digits(kind, factor):
    model = Returns(torch.float32)
    cls, settings = OPTIMIZERS[kind]
    optimizer = cls(model.parameters(), **settings | {"lr": factor * settings["lr"]})
    probe = SpectralProbe(model, optimizer, every_n_steps=1, replay_samples=None)
    known = 0
    for k in range(8):
        before = copy.deepcopy(model)
        x, y = batch(k, dtype=torch.float32)
        with training_step(probe, optimizer):
            model(x, y).backward()
        found = probe.latest.summary["edge"]
        if math.isnan(found):
            assert "rounding" in probe.latest.why("edge", SUMMARY)
        else:
            known += 1
            assert found == pytest.approx(chord(before, copy.deepcopy(model), x, y), rel=0.015)
    assert known == {0.001: 0, 10: 8}.get(factor, known)


def quadratic(factor):
    """One step of SGD on a square: the loss after it is known."""
    model = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(1.0)

    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return 0.5 * self.inner(x).square().mean()

    square = Square()
    probe = after_one_step(square, lambda: square(torch.ones(1, 1).double()), lr=factor)
    return probe.latest.summary


@pytest.mark.parametrize("lr", [0.01, 1.0, 2.0, 3.0])
def test_on_a_square_it_is_the_rate_itself(lr):
    found = quadratic(lr)
    assert found["edge"] == pytest.approx(lr, rel=1e-6)
    assert found["critical_lr"] == pytest.approx(2.0, rel=1e-6)


def why(change, lr=0.05, dtype=torch.float64, accumulated=1, **settings):
    """Edge, and the reasons there are, of one step of a model that was changed."""
    model = Returns(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, maximize=change == "uphill")
    probe = SpectralProbe(
        model, optimizer, every_n_steps=1, replay_samples=settings.pop("replay_samples", None), **settings
    )
    x, y = batch(dtype=dtype)
    with probe.step(accumulated=accumulated):
        (model(x, y) / accumulated).backward()
        optimizer.step()
    return probe.latest.summary["edge"], probe.latest.why("edge"), probe.latest.why("critical_lr", SUMMARY)


def test_what_is_not_known_is_nan_and_says_why():
    value, *reasons = why("")
    assert value > 0
    assert reasons == ["", ""]
    for found, said in (
        (why("", accumulated=2), "accumulated"),
        (why("uphill"), "downhill"),
        (why("", lr=1e-6, dtype=torch.float32), "rounding"),
        (why("", lr=0.0), "no change"),
    ):
        assert math.isnan(found[0])
        assert said in found[1]
        assert said in found[2]


def test_of_a_call_that_returns_no_loss_it_is_not_known():
    model = nn.Linear(4, 1)
    probe = after_one_step(model, lambda: model(torch.randn(16, 4)).square().mean(), lr=0.05, replay_samples=None)
    assert math.isnan(probe.latest.summary["edge"])
    assert "the call that is run again does not return the loss" in probe.latest.why("edge", SUMMARY)


def test_of_some_samples_it_is_not_known():
    model = Returns()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, replay_samples=8)
    for k in range(2):
        with training_step(probe, optimizer):
            model(*batch(k)).backward()
    assert math.isnan(probe.latest.summary["edge"])
    assert "replay_samples=None" in probe.latest.why("edge", SUMMARY)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Returns()
        self.kept = [copy.deepcopy(self.model)]

    def training_step(self, batch, batch_idx):
        return self.model(*batch)

    def on_train_batch_end(self, *_):
        self.kept.append(copy.deepcopy(self.model))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_under_clipping_it_is_that_of_the_clipped_step(tmp_path):
    module, watch = Module(), SpectralMonitor(every_n_steps=1, replay_samples=None, verbose=0)
    pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[watch],
        logger=CSVLogger(tmp_path),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=0.05,
    ).fit(module, torch.utils.data.DataLoader([batch(k) for k in range(3)], batch_size=None))
    for k, measured in enumerate(watch.measurements):
        want = exact(module.kept[k], copy.deepcopy(module.kept[k + 1]), *batch(k))
        assert 0 < want < 0.2
        assert measured.summary["edge"] == pytest.approx(want, rel=0.05)


STEPS = 30
RATES = [0.1 * 2**k for k in range(9)]


def swept(lr, steps=STEPS):
    """Gradient descent on one batch: the mean decrease of the loss in a step, the median edge, the model."""
    model = Returns()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    probe = SpectralProbe(
        model, optimizer, every_n_steps=1, replay_samples=None, quantities=["contribution", "feature_change"]
    )
    x, y = batch()
    for _ in range(steps):
        with training_step(probe, optimizer):
            model(x, y).backward()
    edges = sorted(m.summary["edge"] for m in probe.measurements if not math.isnan(m.summary["edge"]))
    decrease = sum(-m.summary["loss_change"] for m in probe.measurements) / steps
    return decrease, edges[len(edges) // 2], model


def test_of_one_step_from_the_same_weights_the_one_near_edge_one_is_best():
    """Rates that are a tenth apart, from where 20 steps have led."""
    found = []
    start = swept(0.8, 20)[2]
    x, y = batch(1)
    for k in range(40):
        lr = 0.1 * 1.1**k
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        probe = SpectralProbe(
            model, optimizer, every_n_steps=1, replay_samples=None, quantities=["contribution", "feature_change"]
        )
        with training_step(probe, optimizer):
            model(x, y).backward()
        loss = float(model(x, y).detach() - start(x, y).detach())
        found.append((-loss, probe.latest.summary["edge"]))
    assert max(found)[1] == pytest.approx(1, abs=0.35)
    assert all((decrease < 0) == (edge > 2) for decrease, edge in found)
    assert found[0][1] < 0.2
    assert found[-1][1] > 2


@pytest.mark.slow
def test_in_a_sweep_the_loss_falls_most_near_edge_one_and_rises_beyond_two():
    found = [swept(lr)[:2] for lr in RATES]
    best = max(found)
    assert 0.3 < best[1] < 2
    assert all(later > earlier for (_, earlier), (_, later) in pairwise(found) if later < 1)
    assert any(edge > 2 for _, edge in found)
    assert all(decrease < 0.2 * best[0] for decrease, edge in found if edge > 2)
