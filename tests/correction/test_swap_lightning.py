"""Multipliers under Lightning: training as with groups of one's own, and no trace of it anywhere else."""

from __future__ import annotations

from itertools import pairwise

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

from spectral_monitor.correction.override.lr_override import LRMultiplierOverride
from tests.correction.native import everything, hooks, native_groups
from tests.noninterference import zoo
from tests.noninterference.recorder import RecordingLogger, Run

MULTIPLIERS = (0.25, 0.25, 8.0, 1.0, 2.0, 2.0)
"""By parameter of the network; powers of two, so that the schedule may be multiplied before or after. Groups made of
them leave the parameters in their order, for in that order Lightning adds up the norm that gradients are clipped by.
"""
BATCHES = 6


class Corrects(pl.Callback):
    """Arms the swap for all of training."""

    def on_train_start(self, trainer, module):
        self.swap = LRMultiplierOverride(
            trainer.optimizers, dict(zip(module.net.parameters(), MULTIPLIERS, strict=True))
        )
        self.swap.arm()

    def on_exception(self, trainer, module, exception):
        self.swap.disarm()

    def teardown(self, trainer, module, stage):
        self.swap.disarm()


class Watches(pl.Callback):
    """What every batch leaves behind, and how many groups there are to be seen."""

    def __init__(self):
        self.records, self.groups = [], set()

    def look(self, trainer, *_):
        self.groups.add(len(trainer.optimizers[0].param_groups))

    on_train_batch_start = on_before_zero_grad = on_before_backward = on_after_backward = look

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.look(trainer)

    def on_train_batch_end(self, trainer, module, *_):
        self.look(trainer)
        self.records.append([everything(module.net, optimizer) for optimizer in trainer.optimizers])


def optimizer_of(kind, native, options):
    """Builds one group, or one for every multiplier."""
    decay = "weight_decay" if kind is torch.optim.AdamW else ""

    def build(parameters):
        groups = native_groups(parameters, MULTIPLIERS, options, decay) if native else parameters
        return kind(groups, **options)

    return build


SGD = (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1})
ADAMW = (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.3})
FUSED = (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.3, "fused": True})


class Net(zoo.Classifier):
    """A schedule that moves with every batch."""

    def __init__(self, kind, options, native=False, schedule=lambda o: ExponentialLR(o, 0.9)):
        super().__init__(zoo.mlp, optimizer_of(kind, native, options), schedule, interval="step")


def fit(module, callbacks, scale=None, logger=False, **trainer):
    torch.manual_seed(1)
    if scale is not None:
        trainer["plugins"] = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))]
    return zoo.fit(module, zoo.loader(count=BATCHES), callbacks, logger, **trainer)


def built(*args, kind=Net, **kwargs):
    torch.manual_seed(0)
    return kind(*args, **kwargs)


WAYS = {
    "float32": {},
    "accumulated and clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "16-mixed": {"scale": 256.0},
    "16-mixed with steps that are skipped": {"scale": 2.0**24, "max_epochs": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("choice", [SGD, ADAMW, FUSED], ids=["SGD", "AdamW", "fused AdamW"])
def test_training_is_that_of_groups_made_in_configure_optimizers(choice, way):
    corrected, native, plain = Watches(), Watches(), Watches()
    module = built(*choice)
    trainer = fit(module, [Corrects(), corrected], **WAYS[way])
    fit(built(*choice, native=True), [native], **WAYS[way])
    fit(built(*choice), [plain], **WAYS[way])
    assert len(corrected.records) >= BATCHES
    assert corrected.records == native.records
    assert corrected.records != plain.records
    assert corrected.groups == {1}
    assert native.groups == {4}
    assert [hooks(optimizer) for optimizer in trainer.optimizers] == [0]


def test_the_scaler_does_skip_steps():
    """Else the case above would be the one before."""
    watch = Watches()
    fit(built(*ADAMW), [watch], **WAYS["16-mixed with steps that are skipped"])
    weights = [{key: leaf for key, leaf in record[0].items() if key.startswith("weight")} for record in watch.records]
    moved = [one != other for one, other in pairwise(weights)]
    assert {True, False} <= set(moved)


@pytest.mark.parametrize("schedule", ["ExponentialLR", "OneCycleLR"])
def test_the_learning_rate_monitor_sees_what_it_would_see_without(schedule):
    build = {
        "ExponentialLR": lambda o: ExponentialLR(o, 0.9),
        "OneCycleLR": lambda o: OneCycleLR(o, max_lr=0.01, total_steps=20),
    }
    logs = []
    for callbacks in ([Corrects()], []):
        run = Run()
        rates = LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
        module = built(*ADAMW, schedule=build[schedule])
        fit(module, [*callbacks, rates], logger=RecordingLogger(run))
        logs.append([text for kind, text in run.calls if kind == "metrics" and "lr-AdamW" in text])
    assert logs[0] == logs[1]
    assert len(set(logs[0])) == BATCHES
    assert "pg2" not in "".join(logs[0])


def test_a_checkpoint_is_that_of_an_uncorrected_run_and_loads_with_and_without(tmp_path):
    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    fit(built(*ADAMW), [Corrects(), saves], enable_checkpointing=True)
    path = tmp_path / "step=3.ckpt"
    groups = torch.load(path, weights_only=True)["optimizer_states"][0]["param_groups"]
    assert [len(group["params"]) for group in groups] == [6]
    assert groups[0]["weight_decay"] == 0.3
    for callbacks in ([Corrects()], []):
        trainer = fit(built(*ADAMW), callbacks, ckpt_path=path, max_epochs=2)
        assert trainer.global_step == 2 * BATCHES


class Fails(torch.optim.AdamW):
    """In the middle of its n-th step, with some parameters updated."""

    def __init__(self, parameters, at, **options):
        super().__init__(parameters, **options)
        self.at, self.steps = at, 0

    def step(self, closure=None):
        loss = super().step(closure)
        self.steps += 1
        if self.steps == self.at:
            raise RuntimeError("on purpose")
        return loss


def test_killed_and_resumed_is_as_never_killed(tmp_path):
    whole = Watches()
    fit(built(*ADAMW), [Corrects(), whole], max_epochs=3)
    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=BATCHES, save_top_k=-1)
    kind, options = ADAMW
    killed = built(Fails, {**options, "at": 9})
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(killed, [Corrects(), saves], max_epochs=3, enable_checkpointing=True)
    resumed = Watches()
    fit(built(kind, options), [Corrects(), resumed], max_epochs=3, ckpt_path=tmp_path / f"step={BATCHES}.ckpt")
    assert len(resumed.records) == 2 * BATCHES
    assert resumed.records == whole.records[BATCHES:]


@pytest.mark.filterwarnings("ignore:`.fit.ckpt_path=None.` was called", "ignore:.fit.ckpt_path=.last.. is set")
@pytest.mark.parametrize("scale", [None, 256.0])
def test_after_an_exception_in_a_step_the_groups_are_as_they_were(tmp_path, scale):
    """And so Lightning saves them."""
    module = built(Fails, {**ADAMW[1], "at": 3})
    seen = []

    class Sees(pl.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            self.groups = trainer.optimizers[0].param_groups
            seen.append([(id(group), len(group["params"])) for group in self.groups])

        def on_exception(self, trainer, module, exception):  # before the swap is disarmed: it stands later in the list
            seen.append(len(trainer.optimizers[0].param_groups))

    saves, sees = OnExceptionCheckpoint(tmp_path), Sees()
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(module, [sees, Corrects(), saves], scale, enable_checkpointing=True)
    *before, broken = seen
    assert broken == 1
    assert [(id(group), len(group["params"])) for group in sees.groups] == before[-1]
    groups = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)["optimizer_states"][0]["param_groups"]
    assert [len(group["params"]) for group in groups] == [6]


class Manual(Net):
    """Steps by hand, by Lightning's wrapper or by the optimizer itself."""

    def __init__(self, *args, raw=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.automatic_optimization, self.raw = False, raw

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=not self.raw)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.lr_schedulers().step()


@pytest.mark.parametrize(("raw", "scale"), [(False, None), (False, 256.0), (True, None)])
def test_manual_optimization(raw, scale):
    corrected, native = Watches(), Watches()
    fit(built(*ADAMW, kind=Manual, raw=raw), [Corrects(), corrected], scale)
    fit(built(*ADAMW, kind=Manual, raw=raw, native=True), [native], scale)
    assert corrected.records == native.records
    assert corrected.groups == {1}
