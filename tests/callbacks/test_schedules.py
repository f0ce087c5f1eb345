"""Lightning: an interval for each quantity, and intervals that a budget of time stretches."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from spectral_monitor import SpectralCondition, SpectralMonitor
from spectral_monitor.callbacks import batch_watch as callback
from spectral_monitor.engine import guards
from spectral_monitor.engine import overhead_budget as budget
from spectral_monitor.quantities import QUANTITIES
from tests.callbacks.quickfit import fit, leftovers
from tests.noninterference import zoo

INTERVALS = {"light": 2, "standard": 3}
LIGHT, STANDARD = ({key for key, row in QUANTITIES.items() if row.tier == tier} for tier in INTERVALS)


class Looks(pl.Callback):
    """What is registered in each step, when its backward pass is over."""

    def __init__(self):
        self.hooks = {}

    def on_after_backward(self, trainer, module):
        self.hooks[trainer.global_step + 1] = bool(leftovers(module.net))


def measured(monitor):
    return {m.step: set(m.values) for m in monitor.measurements}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_measures_what_is_due_and_pays_for_that(monkeypatch, accumulate):
    made = []

    class Noted(callback.TrainingStepReplay):
        def __init__(self, module, *given):
            made.append(module.trainer.global_step + 1)
            super().__init__(module, *given)

    monkeypatch.setattr(callback, "TrainingStepReplay", Noted)
    monitor, looks, module = SpectralMonitor(every_n_steps=INTERVALS), Looks(), zoo.Classifier()
    fit(monitor, module, zoo.loader(count=6 * accumulate), callbacks=[looks], accumulate_grad_batches=accumulate)
    assert measured(monitor) == {2: LIGHT, 3: STANDARD, 4: LIGHT, 6: LIGHT | STANDARD}
    assert made == [1, 3, 6], "a copy of the batch is for a forward after the step"
    assert looks.hooks == {step: step in (1, 3, 6) for step in range(1, 7)}
    assert not leftovers(module, module.trainer.optimizers[0])


def test_with_manual_optimization_what_was_due_is_measured_when_a_step_is_made():
    class EverySecond(zoo.Classifier):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            if batch_idx % 4 == 3:
                self.optimizers().zero_grad()
                self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
                self.optimizers().step()

    monitor = SpectralMonitor(every_n_steps=INTERVALS)
    fit(monitor, EverySecond(), zoo.loader(count=12))
    assert measured(monitor) == {4: LIGHT | STANDARD, 8: LIGHT | STANDARD, 12: LIGHT | STANDARD}
    assert monitor.latest.value("update_norm", "net.0") > 0


def weights_after(monitor, **trainer):
    module = zoo.Classifier(lambda: zoo.mlp(dropout=0.3))
    fit(monitor, module, **trainer) if monitor else zoo.fit(module, zoo.loader(), [], None, **trainer)
    return [*(p.detach().clone() for p in module.state_dict().values()), torch.get_rng_state()]


@pytest.mark.parametrize("settings", [{"every_n_steps": INTERVALS}, {"every_n_steps": 1, "max_overhead": 0.5}])
def test_training_is_the_same(settings):
    torch.manual_seed(0)
    plain = weights_after(None)
    torch.manual_seed(0)
    watched = weights_after(SpectralMonitor(**settings))
    assert all(map(torch.equal, plain, watched))


# A budget: time is made up.


class Pace(pl.Callback):
    """A second for each batch, and some more for a measured one; validation takes a minute."""

    def __init__(self, monitor, monkeypatch, cost=0.5):
        self.now, self.monitor, self.cost, self.steps = 0.0, monitor, cost, 0
        monkeypatch.setattr(budget, "perf_counter", lambda: self.now)
        monkeypatch.setattr(guards, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def on_train_batch_end(self, trainer, module, *rest):
        stepped, self.steps = trainer.global_step > self.steps, trainer.global_step
        self.now += 1.0 + self.cost * (stepped and self.monitor._engine.armed)

    def on_validation_end(self, trainer, module):
        self.now += 60.0

    def on_save_checkpoint(self, trainer, module, checkpoint):
        self.now += 60.0


def paced(monkeypatch, module=None, batches=60, callbacks=(), every=2, **trainer):
    monitor = SpectralMonitor(every_n_steps=every, quantities="light", max_overhead=0.05)
    fit(monitor, module, zoo.loader(count=batches), callbacks=[Pace(monitor, monkeypatch), *callbacks], **trainer)
    return monitor


def test_a_budget_stretches_the_interval_and_says_so(monkeypatch, caplog):
    """Half a batch's time at 5 %: 10 steps apart; 30 for the first three, which are 3 apart at least."""
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.spectral_monitor"):
        monitor = paced(monkeypatch)
    steps = [m.step for m in monitor.measurements]
    assert steps == [2, 6, 10, 32, 42, 52]
    assert [m.summary.get("interval") for m in monitor.measurements] == [None, 4, 4, 22, 10, 10]
    assert monitor.latest.scalars()["spectral/summary/interval"] == 10
    said = [record.getMessage().split(",")[0] for record in caplog.records]
    assert said.pop(0).startswith("spectral monitor: one SGD rate for all matrices")
    assert said.pop().startswith("spectral monitor: measuring took")
    assert said == [
        "step 12: measured steps are now at least 22 steps apart",
        "step 34: measured steps are now at least 10 steps apart",
    ]


@pytest.mark.parametrize("what", ["validation", "checkpoint"])
def test_what_comes_right_after_measured_steps_costs_the_monitor_nothing(monkeypatch, tmp_path, what):
    """A minute, after every other step."""
    if what == "validation":
        monitor = paced(monkeypatch, val_check_interval=2, validate=zoo.loader(count=1))
    else:
        keep = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
        monitor = paced(monkeypatch, callbacks=[keep], enable_checkpointing=True)
    assert [m.step for m in monitor.measurements] == [2, 6, 10, 32, 42, 52]


@pytest.mark.slow
def test_accumulated_batches_are_one_step(monkeypatch):
    """Four seconds, half a second more: 2.5 steps apart, which with an interval of 2 are 4."""
    monitor = paced(monkeypatch, accumulate_grad_batches=4, batches=80)
    assert [m.step for m in monitor.measurements] == [2, 6, 10, 14, 18]


class Manual(zoo.Classifier):
    """Steps at every other batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


def test_manual_optimization_counts_batches(monkeypatch):
    """Due at every third batch; if no step is made there, the next one is measured."""
    monitor = paced(monkeypatch, Manual(), every=3)
    assert [m.step for m in monitor.measurements] == [4, 10, 16, 36, 48, 60]


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize(
    "settings", [{"every_n_steps": {"light": 2, "standard": 7}}, {"every_n_steps": 2, "max_overhead": 0.05}]
)
def test_a_resumed_run_measures_the_same(monkeypatch, tmp_path, settings, at):
    def run(name, ckpt=None):
        condition = SpectralCondition(band=(0.99, 1.01), persistence=1)  # mostly some layer is outside
        monitor = SpectralMonitor(**settings, drift_every=2, condition=condition, mode="observe")
        keep = ModelCheckpoint(tmp_path / name, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
        torch.manual_seed(0)
        callbacks = [Pace(monitor, monkeypatch), keep]
        trainer = {"enable_checkpointing": True, "ckpt_path": ckpt, "max_epochs": 10}
        fit(monitor, zoo.Classifier(), callbacks=callbacks, **trainer)
        return [
            replace(m, summary={k: v for k, v in m.summary.items() if k != "overhead_ms"}) for m in monitor.measurements
        ]

    whole = run("whole")
    rest = run("rest", tmp_path / "whole" / f"epoch={at}.ckpt")
    expected = [m for m in whole if m.step > 6 * (at + 1)]
    assert len(expected) > 1
    assert [(m.step, list(m.values)) for m in rest] == [(m.step, list(m.values)) for m in expected]
    assert any(m.verdicts for m in expected)
    for ours, theirs in zip(rest, expected, strict=True):
        assert (ours.verdicts, ours.flags) == (theirs.verdicts, theirs.flags)
        assert ours.summary == pytest.approx(theirs.summary, nan_ok=True, rel=0, abs=0)
        for key, values in ours.values.items():
            torch.testing.assert_close(values, theirs.values[key], rtol=0, atol=0, equal_nan=True)
