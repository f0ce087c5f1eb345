"""Real training: targets that are far too large are named at the first step, in a loop and under Lightning."""

from __future__ import annotations

import warnings
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from spectral_monitor import SpectralConditionWarning, SpectralMonitor, SpectralProbe, check
from spectral_monitor.condition import Judge, SpectralCondition
from tests.condition.synthetic import measured, set_by
from tests.one_step import training_step

X = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
Y = X[:, :1] * X[:, 1:2] + X[:, 2:3].sin()
LOSSES = {"squared": F.mse_loss, "absolute": F.l1_loss, "Huber": F.smooth_l1_loss}


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


class Module(pl.LightningModule):
    def __init__(self, scale, loss=F.mse_loss):
        super().__init__()
        self.net, self.scale, self.loss = perceptron(), scale, loss

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss(self.net(x), self.scale * y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


def fitted(scale, steps=20, loss=F.mse_loss, **options):
    """The monitor after a short fit, and what it warned of."""
    monitor = SpectralMonitor()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "barebones": False}
    trainer = pl.Trainer(
        max_steps=steps, accelerator="cpu", enable_model_summary=False, callbacks=[monitor], **quiet, **options
    )
    data = DataLoader(TensorDataset(X, Y), 32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Module(scale, loss), data)
    return monitor, [str(w.message) for w in caught if issubclass(w.category, SpectralConditionWarning)]


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_under_lightning_one_warning_names_them_at_the_first_step(name, accumulate):
    monitor, said = fitted(1000.0, loss=LOSSES[name], accumulate_grad_batches=accumulate)
    assert len(said) == 1
    assert "step 1" in said[0]
    assert "standardize targets" in said[0]
    (root,) = monitor.latest.roots
    assert root.cause == "target_scale"
    begin = monitor.measurements[0].summary["loss_distance"]
    residual = LOSSES[name](perceptron()(X), 1000 * Y)
    expected = residual.sqrt() / 2 if name == "squared" else residual
    assert begin == pytest.approx(float(expected), rel=0.25), "of a batch of 32"


@pytest.mark.parametrize("name", LOSSES)
def test_under_lightning_nothing_is_said_of_targets_of_usual_size(name):
    monitor, said = fitted(1.0, loss=LOSSES[name])
    assert not said
    assert 0.1 < monitor.measurements[0].summary["loss_distance"] < 2


def in_a_loop(scale, tell):
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe")
    for _ in range(3):
        with training_step(probe, optimizer):
            loss = F.mse_loss(model(X), scale * Y)
            if tell:
                probe.report_loss(loss)
            loss.backward()
    return [verdict.cause for verdict in probe.measurements[0].verdicts]


def test_in_a_loop_that_tells_the_loss_they_are_named():
    assert in_a_loop(1000.0, tell=True) == ["target_scale"]
    assert not in_a_loop(1.0, tell=True)
    assert not in_a_loop(1000.0, tell=False)


def test_a_network_that_scales_its_own_outputs_is_asked_for_nothing_unusual():
    """Outputs are those of the readout; what turns them into large targets afterwards is the remedy itself."""
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe")
    with probe.step():
        loss = F.mse_loss(1000 * model(X), 1000 * Y)
        loss.backward()
        probe.report_loss(loss)
        optimizer.step()
    assert not probe.latest.verdicts
    assert probe.latest.summary["loss_distance"] < 2


def test_the_check_before_a_long_job_finds_them():
    model = perceptron()
    found = check(model, (X, 1000 * Y), torch.optim.Adam(model.parameters(), 1e-3), F.mse_loss)
    assert "standardize targets" in str(found)
    assert "standardize" not in str(check(model, (X, Y), torch.optim.Adam(model.parameters(), 1e-3), F.mse_loss))


def regression(shift):
    """The roots of the first steps of a regression whose targets have variance 1 and this mean."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    probe = SpectralProbe(model, optimizer, mode="observe", max_overhead=None)
    for _ in range(4):
        x = torch.randn(64, 8)
        with training_step(probe, optimizer):
            loss = F.mse_loss(model(x), x[:, :1] + shift)
            probe.report_loss(loss)
            loss.backward()
    return {root.cause for root in probe.latest.roots}


@pytest.mark.parametrize(("shift", "causes"), [(0.0, set()), (4.0, set()), (25.0, {"target_scale"})])
def test_targets_whose_mean_is_far_from_0(shift, causes):
    """Such a regression ends at many times the loss that it reaches with standardized targets."""
    assert regression(shift) == causes


def test_a_loss_with_an_unfit_input_tells_nothing_about_targets():
    far = {"loss": 1.0, "loss_distance": 30.0}
    for fault, cause in ((0.0, "target_scale"), (1.0, "loss_input")):
        (verdict,) = Judge(SpectralCondition()).judge(measured(1, summary=far | {"unfit_loss_input": fault}))
        assert verdict.cause == cause


class ActorAndCritic(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.critic, self.actor = (
            nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, outputs))
            for outputs in (1, 4)
        )

    def forward(self, x):
        return self.critic(x), self.actor(x)


def test_a_loss_with_a_part_without_gradients_tells_nothing_about_targets():
    """The loss of the critic, which is detached by mistake, does not depend on the outputs that are known."""
    model = ActorAndCritic()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    probe = SpectralProbe(model, optimizer, mode="observe", max_overhead=None)
    for _ in range(8):
        x = torch.randn(64, 8)
        with training_step(probe, optimizer):
            values, logits = model(x)
            loss = F.cross_entropy(logits, x[:, :4].argmax(1)) + F.mse_loss(values.detach(), 6 + x[:, :1])
            probe.report_loss(loss)
            loss.backward()
    assert probe.latest.summary["loss_distance"] > 10
    assert {root.cause for root in probe.latest.roots} == {"dead"}


@pytest.mark.parametrize("held", [True, False])
def test_an_output_layer_in_no_optimizer_tells_nothing_about_targets(held):
    """Another layer is then taken for the output layer."""
    far = {"loss": 1.0, "loss_distance": 30.0}
    settings = set_by()
    settings["head"] = replace(settings["head"], owner=0 if held else -1, forgotten=not held)
    found = Judge(SpectralCondition()).judge(measured(1, summary=far), settings)
    assert ("target_scale" in {verdict.cause for verdict in found}) == held
