"""Slips in a model's code that no norm shows, in a plain loop and under Lightning."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from spectral_monitor import SpectralMonitor, SpectralProbe
from tests.one_step import after_one_step, training_step
from tests.resume.resuming import QUIET

CAUSES = {"eval_mode", "dropout", "loss_input"}
X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
Y = (X @ torch.randn(8, 4, generator=torch.Generator().manual_seed(1))).argmax(1)


def network(p=0.1, *after):
    torch.manual_seed(0)
    hidden = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(p))
    return nn.Sequential(hidden, nn.Linear(32, 4), *after)


class Module(pl.LightningModule):
    def __init__(self, network, **options):
        super().__init__()
        self.network, self.options = network, options

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.network(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3, **self.options)


def under_lightning(network):
    monitor = SpectralMonitor(mode="observe", every_n_steps=1)
    trainer = pl.Trainer(max_steps=3, callbacks=[monitor], logger=False, accelerator="cpu", **QUIET)
    trainer.fit(Module(network), DataLoader(TensorDataset(X, Y), batch_size=16))
    return monitor.latest


def in_a_loop(network):
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
    probe = SpectralProbe(network, optimizer, every_n_steps=1, mode="observe")
    for _ in range(3):
        with probe.step():
            loss = F.cross_entropy(network(X), Y)
            probe.report_loss(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return probe.latest


FAULTS = {
    "none": (network, set()),
    "softmax": (lambda: network(0.1, nn.Softmax(-1)), {"loss_input"}),
    "probability to keep": (lambda: network(0.9), {"dropout"}),
    "evaluation mode": (lambda: network().eval(), {"eval_mode"}),
    "all": (lambda: network(0.9, nn.Softmax(-1)).eval(), CAUSES),
}


@pytest.mark.parametrize("train", [under_lightning, in_a_loop])
@pytest.mark.parametrize(("make", "causes"), FAULTS.values(), ids=FAULTS)
def test_it_is_told_at_the_first_measurement(train, make, causes):
    latest = train(make())
    found = [verdict for verdict in latest.roots if verdict.cause in CAUSES]
    assert {verdict.cause for verdict in found} == causes
    assert all(verdict.measurements == 3 for verdict in found)
    assert latest.summary["unfit_loss_input"] == ("loss_input" in causes)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("loss_of", "advice"),
    [
        (lambda logits: F.mse_loss(logits[:, :1], X[:, 0]), "give both the same shape"),
        (lambda logits: F.nll_loss(logits.log_softmax(0), Y), "pass dim=1"),
        (lambda logits: F.nll_loss(logits, Y), "pass logits"),
        (lambda logits: F.mse_loss(logits[:, 0], X[:, 0]), None),
        (lambda logits: F.binary_cross_entropy_with_logits(logits[:, 0], 255.0 * Y.eq(0)), "targets between 0 and 1"),
        (lambda logits: F.binary_cross_entropy_with_logits(logits[:, 0], 1.0 * Y.eq(0)), None),
    ],
)
def test_the_advice_on_a_loss(loss_of, advice):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    probe = SpectralProbe(model, optimizer, mode="observe")
    with training_step(probe, optimizer):
        loss = loss_of(model(X))
        probe.report_loss(loss)
        loss.backward()
    sentences = [verdict.sentence for verdict in probe.latest.roots if verdict.cause == "loss_input"]
    assert [advice in sentence for sentence in sentences] == [True] * (advice is not None)


class Recurrent(nn.Module):
    """Classifies 64 samples of 4 steps."""

    def __init__(self, **options):
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 16, **options), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.lstm(x.view(-1, 4, 2))[0][:, -1])


@pytest.mark.parametrize("train", [under_lightning, in_a_loop])
@pytest.mark.parametrize("options", [{}, {"batch_first": True}])
def test_samples_that_are_taken_for_a_sequence(train, options):
    torch.manual_seed(0)
    found = [verdict for verdict in train(Recurrent(**options)).roots if verdict.cause == "loss_input"]
    assert ["batch_first=True" in verdict.sentence for verdict in found] == [True] * (not options)


def test_a_loss_that_was_not_seen_says_so():
    model = network(0.1, nn.Softmax(-1))
    probe = after_one_step(model, lambda: F.cross_entropy(model(X), Y), mode="observe")
    assert "report_loss" in probe.latest.why("unfit_loss_input", "summary")
    assert not {verdict.cause for verdict in probe.latest.verdicts} & CAUSES


def test_evaluation_that_is_not_left_again_is_told_then():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    probe = SpectralProbe(model, optimizer, mode="observe", every_n_steps=1)
    for step in range(4):
        if step == 2:
            model.eval()
        with training_step(probe, optimizer):
            F.cross_entropy(model(X), Y).backward()
        assert ("eval_mode" in {verdict.cause for verdict in probe.latest.roots}) == (step >= 2)
