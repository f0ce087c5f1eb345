"""Schedules looked ahead: where they take learning rates, and warm-ups that are longer than training."""

from __future__ import annotations

import copy
import re

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from spectral_monitor import SpectralCondition, SpectralMonitor, SpectralMonitorWarning, SpectralProbe
from spectral_monitor.condition.optimizers.plans import LookAhead

WARMUP, STEPS = 20, 60


def noam(step):
    """The schedule of the first transformer (Vaswani and others, 2017), which returns learning rates."""
    return 256**-0.5 * min((step + 1) ** -0.5, (step + 1) * WARMUP**-1.5)


class Owner:
    """Has the function of a schedule, and cannot be copied."""

    def rate(self, step):
        return noam(step)

    def __deepcopy__(self, memo):
        raise AssertionError("it would be copied with all that it holds")


def optimizer_of(lr, kind=torch.optim.SGD, **options):
    return kind(nn.Linear(3, 3).parameters(), lr=lr, **options)


OWNER = Owner()
SCHEDULES = {
    "Noam": (1.0, lambda o: schedules.LambdaLR(o, noam)),
    "a method": (1.0, lambda o: schedules.LambdaLR(o, OWNER.rate)),
    "cyclic": (0.1, lambda o: schedules.CyclicLR(o, 0.005, 0.08, 15)),
    "one cycle": (0.1, lambda o: schedules.OneCycleLR(o, 0.3, STEPS)),
    "one cycle that ends": (0.1, lambda o: schedules.OneCycleLR(o, 0.3, STEPS // 2)),
    "warm-up and cosine": (
        0.1,
        lambda o: schedules.SequentialLR(
            o, [schedules.LinearLR(o, 0.1, 1.0, WARMUP), schedules.CosineAnnealingLR(o, STEPS)], [WARMUP]
        ),
    ),
    "gradual": (0.0125, lambda o: schedules.LambdaLR(o, lambda step: 1 + 7 * min(step / WARMUP, 1))),
    "restarts": (0.1, lambda o: schedules.CosineAnnealingWarmRestarts(o, 10)),
    "constant": (0.1, lambda o: schedules.ConstantLR(o, 0.5, 10)),
}


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning", "ignore:.*lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_planned_is_what_comes(name):
    lr, make = SCHEDULES[name]
    optimizer = optimizer_of(lr, momentum=0.9)
    scheduler = make(optimizer)
    before = copy.deepcopy((optimizer.state_dict(), optimizer.param_groups[0]["lr"], scheduler.last_epoch))
    calls = STEPS // 2 - 1 if "ends" in name else STEPS - 1
    (planned,) = LookAhead(scheduler, [OWNER]).plans(STEPS - 1)
    assert (optimizer.state_dict(), optimizer.param_groups[0]["lr"], scheduler.last_epoch) == before
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(calls):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert planned[:3] == (rates[0], max(rates), rates[0] < rates[-1] == max(rates))


def test_each_group_has_a_peak_of_its_own():
    optimizer = torch.optim.Adam([{"params": [nn.Parameter(torch.zeros(2))], "lr": lr} for lr in (0.1, 0.4)])
    scheduler = schedules.LambdaLR(optimizer, [lambda step: step / 10, lambda step: 1 - step / 10])
    plans = LookAhead(scheduler).plans(5)
    assert [plan.highest for plan in plans] == pytest.approx([0.05, 0.4])
    assert [plan.rises for plan in plans] == [True, False]


class Module(pl.LightningModule):
    """A perceptron whose learning rate warms up."""

    def __init__(self, make, interval="step", frequency=1, manual=False):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
        self.make, self.config = make, {"interval": interval, "frequency": frequency}
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        loss = (self.network(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss)
        if self.automatic_optimization:
            return loss
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        self.lr_schedulers().step()
        return None

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [{"scheduler": self.make(optimizer), **self.config}]


class CallsItself(Module):
    """Steps its schedule as it likes."""

    def lr_scheduler_step(self, scheduler, metric):
        for _ in range(WARMUP):
            scheduler.step()


class Endless(IterableDataset):
    """Samples without a number."""

    def __iter__(self):
        while True:
            yield torch.randn(8), torch.randn(1)


def warm_up(steps):
    return lambda optimizer: schedules.LambdaLR(optimizer, lambda step: min(1.0, step / steps))


def said(module, data=None, condition=None, cause="warmup_too_long", **options):
    """The sentences with a cause at the first measurement of a fit of 2 epochs of 10 batches."""
    data = data if data is not None else DataLoader(TensorDataset(torch.randn(160, 8), torch.randn(160, 1)), 16)
    monitor = SpectralMonitor(condition=condition or SpectralCondition(), quantities="light", mode="observe", verbose=0)
    trainer = pl.Trainer(
        callbacks=[monitor, *options.pop("callbacks", ())],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"max_epochs": 2} | options),
    )
    trainer.fit(module, data)
    return [v.sentence for v in monitor.measurements[0].verdicts if v.cause == cause]


quiet = pytest.mark.filterwarnings("ignore:Detected call of", "ignore:.*`lr_scheduler.step")


@quiet
def test_a_warm_up_in_steps_that_counts_epochs_is_told_at_once():
    (sentence,) = said(Module(warm_up(100), "epoch"))
    assert sentence.startswith("the learning rate will only reach 1e-05 by the end of training (0.001 is set)")


@quiet
@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Module(warm_up(50)), {}),
        (Module(warm_up(50)), {"max_steps": 20, "max_epochs": -1}),
        (Module(warm_up(12)), {"accumulate_grad_batches": 5}),
        (Module(warm_up(20), frequency=5), {}),
        (Module(warm_up(10), "epoch"), {"max_steps": 20, "max_epochs": -1}),
        (Module(lambda o: schedules.LinearLR(o, 0.1, 1.0, 5), "epoch"), {"max_epochs": 1}),
        (Module(lambda o: schedules.OneCycleLR(o, 1e-3, total_steps=1000)), {}),
        (Module(lambda o: schedules.LinearLR(o, 0.01, 1.0, 100)), {}),
    ],
)
def test_longer_than_training_however_that_is_counted(module, options):
    assert len(said(module, **options)) == 1


@quiet
@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Module(warm_up(20)), {}),
        (Module(warm_up(35)), {}),
        (Module(warm_up(4)), {"accumulate_grad_batches": 5}),
        (Module(warm_up(4), frequency=5), {}),
        (Module(warm_up(2), "epoch"), {"max_steps": 20, "max_epochs": -1}),
        (Module(lambda o: schedules.LambdaLR(o, lambda step: 0.1)), {}),
        (Module(lambda o: schedules.LambdaLR(o, lambda step: 1.0 + step)), {}),
        (Module(lambda o: schedules.CosineAnnealingWarmRestarts(o, 5)), {}),
        (Module(lambda o: schedules.LambdaLR(o, lambda step: noam(step) / noam(WARMUP))), {}),
        (Module(lambda o: schedules.LambdaLR(o, lambda step: 0.1), "epoch"), {"max_epochs": 1}),
        (Module(lambda o: schedules.LinearLR(o, 0.6, 1.0, 5), "epoch"), {"max_epochs": 1}),
        (Module(lambda o: schedules.CosineAnnealingLR(o, 10), "epoch"), {"max_epochs": 1}),
        (Module(warm_up(20), "epoch", manual=True), {}),
        (CallsItself(warm_up(40), "epoch"), {}),
        (Module(warm_up(50)), {"data": DataLoader(Endless(), 16), "limit_train_batches": 10, "max_epochs": 8}),
        (Module(warm_up(100), "epoch"), {"condition": SpectralCondition(ignore=["schedule"])}),
    ],
)
def test_others_are_not(module, options):
    assert said(module, **options) == []


class Data(pl.LightningDataModule):
    """Knows how long to warm up, and must not be copied."""

    def __deepcopy__(self, memo):
        raise AssertionError("all data would be copied")

    def rate(self, step):
        return min(1.0, step / 100)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(160, 8), torch.randn(160, 1)), 16)


class Finds(pl.Callback):
    """Changes the learning rate after the monitor has begun, as a learning rate finder does."""

    def on_fit_start(self, trainer, module):
        for group in trainer.optimizers[0].param_groups:
            group["initial_lr"] = 0.02
        trainer.lr_scheduler_configs[0].scheduler.base_lrs = [0.02]


@quiet
def test_a_learning_rate_that_is_found_before_training_counts():
    (sentence,) = said(Module(warm_up(100)), callbacks=[Finds()])
    assert "will only reach 0.0038 by the end of training (0.02 is set)" in sentence


class Spoils(pl.Callback):
    """Leaves something in a parameter group that is no learning rate."""

    def on_fit_start(self, trainer, module):
        trainer.optimizers[0].param_groups[0]["initial_lr"] = None


def test_what_goes_wrong_while_looking_ahead_does_not_stop_training():
    with pytest.warns(SpectralMonitorWarning, match="schedules could not be looked ahead"):
        assert said(Module(lambda o: schedules.LambdaLR(o, lambda step: 1.0)), callbacks=[Spoils()]) == []


@quiet
def test_a_schedule_may_ask_the_data(recwarn):
    data = Data()
    assert len(said(Module(lambda optimizer: schedules.LambdaLR(optimizer, data.rate)), data)) == 1


STEP_DECAY = [
    lambda o: schedules.StepLR(o, 1, 0.5),
    lambda o: schedules.ExponentialLR(o, 0.8),
    lambda o: schedules.LambdaLR(o, lambda step: max(0.01, 1 - step / 20)),
]


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("make", STEP_DECAY)
def test_a_decay_in_epochs_that_counts_batches_is_told_at_once(make):
    (sentence,) = said(Module(make), cause="schedule_too_short", max_epochs=8)
    seen = r"the learning rate will have fallen below 2 % of its highest value after (7.5|22|25) % of training: its"
    assert re.match(seen, sentence)
    assert not said(Module(make, "epoch"), cause="schedule_too_short", max_epochs=8)
    assert not said(Module(make, "epoch"), cause="schedule_too_short", max_epochs=60), "as many as there may be"
    stops = pl.callbacks.EarlyStopping("loss")
    assert not said(Module(make), cause="schedule_too_short", max_epochs=8, callbacks=[stops])
    assert not said(Module(make), cause="schedule_too_short", max_epochs=3), "so short a fit may be a trial"


@quiet
@pytest.mark.parametrize(
    "make",
    [
        lambda o: schedules.CosineAnnealingLR(o, 20),
        lambda o: schedules.CosineAnnealingWarmRestarts(o, 20),
        lambda o: schedules.OneCycleLR(o, 1e-3, total_steps=80),
        lambda o: schedules.MultiStepLR(o, [30, 60], 0.03),
        lambda o: schedules.LambdaLR(o, lambda step: max(0.01, 1 - step / 60)),
        lambda o: schedules.LambdaLR(o, lambda step: 1.0),
    ],
)
def test_other_decays_are_not(make):
    assert said(Module(make), cause="schedule_too_short", max_epochs=8) == []


@pytest.mark.filterwarnings("ignore:Detected call of", "ignore:.*`lr_scheduler.step")
@pytest.mark.parametrize(("steps", "told"), [(100, True), (400, False)])
def test_a_loop_of_ones_own_can_tell_its_schedule(steps, told):
    network = Module(None).network
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    probe = SpectralProbe(network, optimizer, every_n_steps=1, mode="observe")
    probe.report_schedule(warm_up(400)(optimizer), steps)
    optimizer.param_groups[0]["lr"] = 1e-5
    with probe.step():
        network(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
    assert ("warmup_too_long" in {verdict.cause for verdict in probe.verdicts}) == told
