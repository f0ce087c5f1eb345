"""The peak of a schedule: what it comes to, not what its groups name."""

from __future__ import annotations

import math
import re

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, TensorDataset

from spectral_monitor import LRCorrection, SpectralLRCorrector, SpectralMonitorWarning, SpectralProbe
from tests.condition.test_plans import SCHEDULES, STEPS, noam
from tests.one_step import training_step


class Module(pl.LightningModule):
    def __init__(self, lr, make, kind=torch.optim.Adam, interval="step", network=None):
        super().__init__()
        torch.manual_seed(0)
        self.network = network or nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        self.lr, self.make, self.kind, self.interval = lr, make, kind, interval

    def training_step(self, batch, batch_idx):
        loss = (self.network(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss

    def by_the_module(self, step):
        return noam(step)

    def configure_optimizers(self):
        optimizer = self.kind(self.parameters(), lr=self.lr)
        scheduler = self.make(self, optimizer)
        if scheduler is None:
            return optimizer
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval, "monitor": "loss"}]


def fit(*arguments, steps=STEPS, **options):
    """Train with a correction; return it."""
    torch.manual_seed(1)
    x = torch.randn(160, 8)
    corrector = SpectralLRCorrector(verbose=0)
    trainer = pl.Trainer(
        max_steps=steps,
        max_epochs=options.pop("epochs", None),
        callbacks=[corrector],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(*arguments, **options), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 16))
    return corrector


def sizes(corrector):
    return {found.step: found.values["update_natural"].tolist() for found in corrector.measurements}


@pytest.mark.parametrize("make", [lambda m, o: schedules.LambdaLR(o, m.by_the_module)], ids=["Noam"])
def test_a_schedule_that_returns_learning_rates_counts_by_its_shape(make):
    peak = max(map(noam, range(STEPS)))
    corrected = fit(1.0, make)
    shape = fit(peak, lambda module, o: schedules.LambdaLR(o, lambda step: noam(step) / peak))
    for step, expected in sizes(shape).items():
        assert sizes(corrected)[step] == pytest.approx(expected, rel=1e-3)


def test_a_schedule_that_goes_by_a_metric_begins_with_its_peak():
    plateau = fit(1e-3, lambda module, o: schedules.ReduceLROnPlateau(o, patience=1000), steps=3)
    falling = fit(1e-3, lambda module, o: schedules.LambdaLR(o, lambda step: 1.0), steps=3)
    constant = fit(1e-3, lambda module, o: None, steps=3)
    assert sizes(plateau) == sizes(falling)
    assert sizes(constant)[1][0] == pytest.approx(sizes(plateau)[1][0] / 2, rel=1e-3)


def test_epochs_are_counted():
    def make(module, optimizer):
        return schedules.LambdaLR(optimizer, lambda epoch: 1 + epoch)

    rising = fit(1e-3, make, steps=-1, epochs=4, interval="epoch")
    first, last = rising.measurements[0], rising.measurements[-1]
    assert last.step == 40
    assert last.values["update_natural"][0] < 1 / 8
    assert first.values["lr_multiplier"][0] == pytest.approx(last.values["lr_multiplier"][0], rel=0.5)


def probe_of(kind=torch.optim.Adam, lr=1.0):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = kind(network.parameters(), lr=lr)
    rule = LRCorrection()
    probe = SpectralProbe(
        network, optimizer, every_n_steps=1, quantities=rule.quantities, correction=rule, mode="correct"
    )
    return probe, network, optimizer


def run(probe, network, optimizer, scheduler=None, steps=STEPS):
    for _ in range(steps):
        x = torch.randn(32, 8)
        with training_step(probe, optimizer):
            (network(x) - x.sum(1, keepdim=True)).square().mean().backward()
        if scheduler is not None:
            scheduler.step()


def test_a_loop_of_ones_own_can_tell_its_schedule():
    probe, network, optimizer = probe_of()
    scheduler = schedules.LambdaLR(optimizer, noam)
    probe.report_schedule(scheduler, STEPS)
    run(probe, network, optimizer, scheduler)
    largest = max(found.values["update_natural"][0] for found in probe.measurements)
    assert 0.03 < largest < 0.2
    plateau = schedules.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match="ReduceLROnPlateau cannot be looked ahead"):
        probe.report_schedule(plateau, STEPS)


def test_a_peak_that_is_never_reached_is_said():
    probe, network, optimizer = probe_of()
    with pytest.warns(SpectralMonitorWarning, match="reached only 0.014 before it fell, but 1 counts as its peak"):
        run(probe, network, optimizer, schedules.LambdaLR(optimizer, noam))


@pytest.mark.filterwarnings("error::spectral_monitor.SpectralMonitorWarning")
@pytest.mark.parametrize("name", ["warm-up and cosine", "restarts", "one cycle", "constant"])
def test_of_usual_schedules_nothing_is_said(name):
    probe, network, optimizer = probe_of(lr=SCHEDULES[name][0])
    optimizer.defaults.setdefault("momentum", 0.9)
    run(probe, network, optimizer, SCHEDULES[name][1](optimizer), STEPS - 1)
    assert probe._supervisor._corrector.unreached == ""


def test_the_warm_up_of_radam_is_no_part_of_a_size():
    probe, network, optimizer = probe_of(torch.optim.RAdam, lr=1e-3)
    run(probe, network, optimizer, steps=40)
    adam, network, optimizer = probe_of(torch.optim.Adam, lr=1e-3)
    run(adam, network, optimizer, steps=40)
    found, expected = (list(p.measurements)[-3].values["update_natural"][:3:2] for p in (probe, adam))
    assert (found / expected).log().abs().max() < math.log(2)


def test_rates_that_are_taken_over_leave_radam_its_warm_up():
    found = {}
    for kind in (torch.optim.Adam, torch.optim.RAdam):
        probe, network, optimizer = probe_of(kind, lr=1e-3)
        run(probe, network, optimizer, steps=40)
        found[kind] = [float(lr) for lr in re.findall(r'"lr": ([\d.e-]+)', probe.param_groups_code())]
    assert len(found[torch.optim.Adam]) == 4
    assert found[torch.optim.RAdam] == pytest.approx(found[torch.optim.Adam], rel=0.5)


def test_asgd_is_refused():
    with pytest.raises(ValueError, match=r"ASGD cannot be corrected .*; use SGD, Adam or another "):
        probe_of(torch.optim.ASGD)


def test_lazy_modules_train():
    network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.LazyLinear(1))
    corrector = fit(1e-3, lambda module, o: None, network=network)
    assert set(corrector.multipliers) == {"network.0", "network.0.bias"}, "the other has no weight when training begins"
    assert corrector.measurements[-1].step == STEPS
