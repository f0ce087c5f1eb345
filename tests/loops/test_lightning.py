"""Beside Lightning's own callbacks and in every shape of a fit: bit for bit the same, and measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    ModelPruning,
    StochasticWeightAveraging,
)
from torch import optim
from torch.optim import lr_scheduler

from spectral_monitor import SpectralMonitor
from spectral_monitor.engine.results.reasons import REPLACED
from spectral_monitor.quantities import TIERS
from tests.noninterference import zoo
from tests.noninterference.recorder import AFTER, BEFORE, Recorder, RecordingLogger, Run, differences, leaves

try:
    from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
except ImportError:  # lightning < 2.6
    EMAWeightAveraging = WeightAveraging = None

# After the last epoch Lightning runs another one without backward passes, for the averages of batch normalization, and
# steps once at its end, with the gradients left from before.
WITHOUT_BACKWARD = "stochastic weight averaging, batch norm"

adamw = partial(optim.AdamW, lr=0.01)
sgd = partial(optim.SGD, lr=0.05, momentum=0.9)
cosine = partial(lr_scheduler.CosineAnnealingLR, T_max=12)
LATER = "measured at every 5th measured step"
TAPS = "the taps of a convolution overlap, so one may cancel what another adds"
NO_BACKWARD = "no gradient arrived at its output, or more than one, or it was overwritten"
FROZEN = "no optimizer updates it"
NETS = {"mlp": (partial(zoo.mlp, dropout=0.2), "rows"), "cnn": (zoo.cnn, "images")}


@dataclass(frozen=True)
class Shape:
    """One shape of a fit: a net, what stands beside the monitor, how the trainer is set up."""

    net: str = "mlp"
    beside: Callable[[], pl.Callback] | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    optimizer: Any = sgd
    scheduler: Any = None
    validate: bool = False
    fits: int = 1


def averaged_each_epoch():
    class EachEpoch(WeightAveraging):
        def should_update(self, step_idx=None, epoch_idx=None):
            return epoch_idx is not None

    return EachEpoch()


class Unfreezing(BaseFinetuning):
    """The first layer is trained from the second epoch on."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.01)


def ema():
    return EMAWeightAveraging(decay=0.9, update_every_n_steps=2)


def trainable_sgd(parameters):
    return sgd([p for p in parameters if p.requires_grad])


swa = partial(StochasticWeightAveraging, swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=1)
accumulation = partial(GradientAccumulationScheduler, scheduling={0: 1, 1: 4, 2: 2})
pruning = partial(ModelPruning, "l1_unstructured", amount=0.3, make_pruning_permanent=False)
between = {"val_check_interval": 2, "num_sanity_val_steps": 2}

SHAPES = {
    "stochastic weight averaging": Shape(beside=swa, trainer={"max_epochs": 4}),
    WITHOUT_BACKWARD: Shape("cnn", swa, {"max_epochs": 4}),
    "stochastic weight averaging, schedule": Shape(
        beside=swa, trainer={"max_epochs": 3}, scheduler=cosine, validate=True
    ),
    "weight averaging": Shape("cnn", averaged_each_epoch, {"max_epochs": 3}, adamw, validate=True),
    "moving average": Shape("cnn", ema, {"max_epochs": 2}, adamw, validate=True),
    "moving average, validation in between": Shape(beside=ema, trainer={"max_epochs": 2, **between}, validate=True),
    "fast_dev_run": Shape("cnn", trainer={"fast_dev_run": True}, optimizer=adamw, validate=True),
    "fast_dev_run, 3": Shape(trainer={"fast_dev_run": 3}, scheduler=cosine, validate=True),
    "validation in between": Shape("cnn", trainer={"max_epochs": 2, **between}, optimizer=adamw, validate=True),
    "validation in between, accumulated": Shape(
        "cnn", trainer={"max_epochs": 2, "accumulate_grad_batches": 3, **between}, optimizer=adamw, validate=True
    ),
    "accumulation scheduler": Shape("cnn", accumulation, {"max_epochs": 3}, adamw, cosine),
    "accumulation scheduler, clipped": Shape(beside=accumulation, trainer={"max_epochs": 3, "gradient_clip_val": 0.1}),
    "fit twice": Shape("cnn", trainer={"max_epochs": 1}, optimizer=adamw, scheduler=cosine, fits=2),
    "fit twice, validation": Shape(trainer={"max_epochs": 1, **between}, validate=True, fits=2),
    "fit twice, moving average": Shape(beside=ema, trainer={"max_epochs": 1}, validate=True, fits=2),
    "pruning": Shape(beside=pruning, trainer={"max_epochs": 3}),
    "unfreezing": Shape(beside=Unfreezing, trainer={"max_epochs": 3}, optimizer=trainable_sgd),
    "limited batches": Shape(trainer={"limit_train_batches": 0.5, "max_epochs": 3}),
    "at most so many steps": Shape(trainer={"max_steps": 8, "max_epochs": -1, "accumulate_grad_batches": 2}),
}
LEFT_OUT = {
    WITHOUT_BACKWARD: lambda step: [NO_BACKWARD] if step == 25 else [],
    "pruning": lambda step: [REPLACED] if step > 6 else [],
    "unfreezing": lambda step: [FROZEN, NO_BACKWARD] if step <= 6 else [],
}
"""Shape -> step -> reasons for which a value may be missing besides; epochs have six steps."""
WARNS = {"pruning": ("not measured any more", "the probe batch could not be run again")}
NEEDS_2_6 = {name for name in SHAPES if "moving average" in name or name == "weight averaging"}
CASES = [
    pytest.param(
        *(name, last),
        id=f"{name}{'' if last else ', monitor first'}",
        marks=[
            pytest.mark.skipif(name in NEEDS_2_6 and WeightAveraging is None, reason="lightning < 2.6"),
            *(pytest.mark.filterwarnings(f"ignore:{warning}") for warning in WARNS.get(name, ())),
        ],
    )
    for name, shape in SHAPES.items()
    for last in ((True, False) if shape.beside else (True,))
]


def train(name: str, monitor: SpectralMonitor | None = None, last: bool = True) -> tuple[Run, int]:
    """The record, and the optimizer steps taken. The monitor stands after what is beside it, or before."""
    shape, run = SHAPES[name], Run()
    torch.manual_seed(1)
    build, kind = NETS[shape.net]
    module = zoo.Classifier(build, shape.optimizer, shape.scheduler)
    beside = [] if shape.beside is None else [shape.beside()]
    ours = [] if monitor is None else [monitor]
    middle = [*beside, *ours] if last else [*ours, *beside]
    callbacks = [Recorder(run, "before", BEFORE, hooks=False), *middle, Recorder(run, "after", AFTER, hooks=True)]
    trainer = None
    for fit in range(shape.fits):
        data, validate = zoo.loader(kind), zoo.loader(kind, count=2) if shape.validate else None
        if trainer is None:
            trainer = zoo.fit(module, data, callbacks, RecordingLogger(run), validate, **shape.trainer)
        else:
            trainer.fit_loop.max_epochs += 1
            trainer.fit(module, data, validate)
        averages = [
            leaves(f"average/{fit}", b._average_model.state_dict()) for b in beside if hasattr(b, "_average_model")
        ]
        run.add("end", dict(leaves(f"parameter/{fit}", module.state_dict())), *map(dict, averages))
    return run, trainer.global_step


@cache
def reference(name: str) -> tuple[Run, int]:
    return train(name)


@pytest.mark.slow
@pytest.mark.few(8)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("name", "last"), CASES)
def test_training_is_the_same(name, last, every):
    monitor = SpectralMonitor(every)
    alone, steps = reference(name)
    run, seen = train(name, monitor, last)
    found = differences(alone, run)
    assert not found, f"{len(found)} differences, first {found[:5]}"
    assert seen == steps
    for kind in ("parameter", "grad", "optimizer", "random"):
        assert run.tensors(kind) > 0
    assert (run.tensors("average") > 0) == ("averag" in name)
    assert_measured(name, monitor, every, steps)


def assert_measured(name, monitor, every, steps):
    """Every step that was due; everything of every matrix, but for drift, which has a slower clock."""
    assert [m.step for m in monitor.measurements] == list(range(every, steps + 1, every))
    assert monitor.measurements or (name, every) == ("fast_dev_run", 2), "of the one step none is due"
    for m in monitor.measurements:
        assert m.summary["skipped_updates"] == 0
        for info in m.layers:
            for key in (
                TIERS["standard"] if info.role != "vector" else ("weight_natural", "update_natural", "contribution")
            ):
                there = math.isfinite(m.value(key, info.name))
                allowed = {LATER, TAPS, *LEFT_OUT.get(name, lambda step: ())(m.step)}
                assert there or m.why(key, info.name) in allowed, (m.step, key, info.name, m.why(key, info.name))
                if REPLACED in allowed:
                    assert not there, (m.step, key, info.name)


@pytest.mark.slow
def test_shapes_are_what_they_are_called():
    """Weights are averaged, accumulation changes, fits follow each other: else there is nothing to prove."""
    taken = {name: reference(name)[1] for name in SHAPES if name not in NEEDS_2_6 or WeightAveraging is not None}
    assert taken["accumulation scheduler"] == 6 + 2 + 3
    assert taken["fast_dev_run"] == 1
    assert taken["fast_dev_run, 3"] == 3
    assert taken["validation in between, accumulated"] == 4
    assert taken["fit twice"] == 12
    assert taken["limited batches"] == 9
    assert taken["at most so many steps"] == 8
    assert taken["stochastic weight averaging"] == 24
    for name in taken:
        records = [record for _, record in reference(name)[0].records]
        validated = any("validation" in when for when, _ in reference(name)[0].records)
        assert validated == SHAPES[name].validate, name
        assert records[0] != records[-1]


def test_a_disturbed_average_would_be_seen(monkeypatch):
    """The comparison above can fail: a monitor that touches what is averaged."""
    original = SpectralMonitor.on_train_batch_end

    def touches(self, trainer, module, *rest):
        original(self, trainer, module, *rest)
        with torch.no_grad():
            module.net[0].weight.add_(1e-7)

    monkeypatch.setattr(SpectralMonitor, "on_train_batch_end", touches)
    found = differences(
        reference("stochastic weight averaging")[0], train("stochastic weight averaging", SpectralMonitor(1))[0]
    )
    assert {"parameter", "average"} <= {path.partition("/")[0] for _, path in found}
