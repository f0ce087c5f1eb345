"""On a device that works by itself the host waits for nothing, and what was measured is there a step later.

There is no such device here: the CPU is taken for one, and whoever asks one of its tensors for a number is noted.
"""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from test_no_waiting import Watch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from spectral_monitor import LRCorrection, SpectralMonitor, SpectralProbe
from spectral_monitor.engine import patience, scalars
from spectral_monitor.engine.rows import IN_DOUBT
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.snapshot import devices


@pytest.fixture
def asynchronous(monkeypatch):
    monkeypatch.setattr(devices, "asynchronous", lambda device: True)


def network(width=130, seed=0):
    torch.manual_seed(seed)
    hidden = [nn.Linear(width, width), nn.GELU(), nn.BatchNorm1d(width), nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(nn.Linear(96, width), *hidden, nn.Linear(width, 80))


def trained(steps, **settings):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    probe = SpectralProbe(model, optimizer, mode="observe", **settings)
    for x in torch.randn(steps, 32, 96, generator=torch.Generator().manual_seed(1)):
        with probe.step():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        yield model, probe


def after(steps, **settings):
    *_, last = trained(steps, **settings)
    return last


@pytest.mark.parametrize("quantities", ["light", "standard"])
def test_a_measured_step_waits_for_nothing(monkeypatch, asynchronous, quantities):
    watch = Watch(monkeypatch)
    for step, _ in enumerate(trained(6, quantities=quantities, drift_every=2)):
        watch.phase = "" if step == 5 else f"step {step + 2}"
    asked = {phase: dict(names) for phase, names in watch.seen.items() if phase != "step 2"}
    # The first measured step finds out which outputs last; later ones only ask for numbers that were sent a step ago.
    assert asked == {f"step {step}": {"get": 1} for step in (3, 4, 5, 6)}


def test_whoever_waits_is_noted(monkeypatch):
    watch = Watch(monkeypatch)
    for step, _ in enumerate(trained(3, quantities="light")):
        watch.phase = "" if step == 2 else "a step"
    assert set(watch.seen["a step"]) > {"get"}


def test_one_copy_crosses_in_a_measured_step_and_none_in_others(monkeypatch, asynchronous):
    crossings = []
    monkeypatch.setattr(scalars.devices, "Crossing", lambda values: crossings.append(values) or Kept(values))
    counts = []
    for _ in trained(6, every_n_steps=2, drift_every=1):
        counts.append(len(crossings))
    assert [count - counts[0] for count in counts] == [0, 1, 1, 2, 2, 3]  # one more crosses before the first step


class Kept:
    def __init__(self, values: Tensor) -> None:
        self.values = values

    def get(self):
        return self.values.tolist()


def test_a_measurement_is_there_after_the_next_step(asynchronous):
    seen = [[m.step for m in probe._measurements] for _, probe in trained(5, every_n_steps=2)]
    assert seen == [[], [], [2], [2], [2, 4]]


def test_who_asks_sooner_gets_it_sooner(asynchronous):
    assert [probe.latest and probe.latest.step for _, probe in trained(3, every_n_steps=2)] == [None, 2, 2]
    _, probe = after(2, every_n_steps=2)
    assert probe.state_dict()["state"]["measured"] == 1
    assert [m.step for m in probe._measurements] == [2]


@pytest.mark.parametrize("quantities", ["light", "standard"])
def test_the_numbers_are_those_of_a_device_that_is_waited_for(monkeypatch, quantities):
    model, probe = after(4, quantities=quantities, drift_every=2)
    monkeypatch.setattr(devices, "asynchronous", lambda device: True)
    late_model, late = after(4, quantities=quantities, drift_every=2)
    for p, q in zip(model.parameters(), late_model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert [m.step for m in late.measurements] == [1, 2, 3, 4]
    for here, there in zip(probe.measurements, late.measurements, strict=True):
        assert set(here.values) == set(there.values)
        for key, values in here.values.items():
            # Norms are within 1 %, what is squared or divided by another one is within twice that.
            torch.testing.assert_close(there.values[key], values, rtol=0.025, atol=1e-7, equal_nan=True, msg=key)
        assert here.reasons == there.reasons
        for name, value in here.summary.items():
            if name != "overhead_ms":
                assert there.summary[name] == pytest.approx(value, rel=0.025, nan_ok=True), name


def test_a_norm_that_is_in_doubt_is_nan_with_its_reason_and_known_from_then_on(monkeypatch, asynchronous):
    monkeypatch.setattr(patience, "FIRST_STEPS", 3)
    _, probe = after(6, quantities="light")
    first, *_, last = probe.measurements
    assert first.value("weight_norm", "0") != first.value("weight_norm", "0")
    assert first.why("weight_norm", "0") == IN_DOUBT
    assert first.value("weight_fro", "0") > 0
    assert first.summary["skipped_updates"] == 0
    assert last.values["weight_norm"].isfinite().sum() == 4
    assert QUANTITIES["weight_norm"].needs == {"W"}


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch):
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fitted(monitor, steps=5):
    data = DataLoader(torch.randn(32 * steps, 96, generator=torch.Generator().manual_seed(1)), batch_size=32)
    module = Module()
    seen = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *args):
            seen.append([m.step for m in monitor._measurements])

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "barebones": False}
    trainer = pl.Trainer(max_steps=steps, accelerator="cpu", callbacks=[monitor, Look()], **quiet)
    trainer.fit(module, data)
    return module, seen


@pytest.mark.filterwarnings("ignore:no logger")
def test_under_lightning_too_and_nothing_is_lost_at_the_end(monkeypatch):
    alone, _ = fitted(SpectralMonitor(every_n_steps=100, mode="observe"))
    monkeypatch.setattr(devices, "asynchronous", lambda device: True)
    monitor = SpectralMonitor(every_n_steps=2, mode="observe")
    _, seen = fitted(monitor, 6)
    assert seen == [[], [], [2], [2], [2, 4], [2, 4]]
    assert [m.step for m in monitor.measurements] == [2, 4, 6]
    watched, _ = fitted(SpectralMonitor(every_n_steps=2, mode="observe"))
    for (name, p), q in zip(alone.state_dict().items(), watched.state_dict().values(), strict=True):
        assert torch.equal(p, q), name


def corrected(look, every_n_steps):
    """A network whose learning rates are put right, and its probe; ``look``: at every measurement as soon as it can."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    rule = LRCorrection("target")
    settings = {"quantities": [*rule.quantities, "lr_multiplier"], "correction": rule, "mode": "correct"}
    probe = SpectralProbe(model, optimizer, every_n_steps=every_n_steps, **settings)
    for x in torch.randn(12, 32, 96, generator=torch.Generator().manual_seed(1)):
        with probe.step():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        if look:
            probe.table()
    return model, probe


@pytest.mark.parametrize("every_n_steps", [1, 3])
def test_who_looks_at_the_numbers_changes_nothing(asynchronous, every_n_steps):
    """Of several processes only one may; and a correction has to be the same in all."""
    (alone, probe), (watched, looked) = (corrected(look, every_n_steps) for look in (False, True))
    assert set(probe.multipliers.values()) != {1.0}
    assert probe.multipliers == looked.multipliers
    for p, q in zip(alone.parameters(), watched.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_multiplier_is_that_of_the_step_it_is_measured_at(asynchronous):
    _, probe = corrected(look=False, every_n_steps=1)
    assert len(probe.measurements) == 12
    for m in probe.measurements:
        torch.testing.assert_close(m.values["lr_multiplier"] * 0.05, m.values["lr"], rtol=1e-5, atol=0)
