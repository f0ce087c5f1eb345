"""With the monitor or without it, training is the same, bit for bit, after every batch."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import optim
from torch.nn import functional as nnf
from torch.optim import lr_scheduler

from spectral_monitor import SpectralMonitor, SpectralProbe
from spectral_monitor.callbacks import batch_watch as callback
from spectral_monitor.callbacks import loggers as logs
from spectral_monitor.callbacks import training_step_replay as again
from spectral_monitor.capture.hooks import forward as features
from spectral_monitor.capture.hooks import optimizer
from spectral_monitor.capture.replay import replay
from spectral_monitor.capture.replay.loss_flow import loss_in
from spectral_monitor.engine.features import replays
from spectral_monitor.engine.features.step_inputs import StepInputs
from spectral_monitor.state import module_tables
from spectral_monitor.state import rng as randomness
from spectral_monitor.state import snapshot as preserve
from tests.noninterference import zoo
from tests.noninterference.recorder import (
    AFTER,
    BEFORE,
    Recorder,
    RecordingLogger,
    Run,
    differences,
    first_kinds,
    leaves,
    of_module,
    of_optimizer,
    of_random,
)

ROUNDED = "its change is too close to the rounding of its outputs"
UNCALLED = frozenset({"no module call to hook"})


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        module, data: build the module and the training batches.
        trainer, monitor: arguments of either.
        missing: why ``feature_change`` of a matrix may be missing.
    """

    module: Callable[[], Any]
    data: Callable[[], Any]
    trainer: dict[str, Any]
    monitor: dict[str, Any]
    missing: frozenset[str]


def way(
    module, data=zoo.loader, optimizer=None, scheduler=None, interval=None, monitor=None, missing=frozenset(), **trainer
):
    schedule = {"interval": interval} if interval else {}
    if scheduler is lr_scheduler.ReduceLROnPlateau:
        schedule |= {"monitor": "val_loss"}
        scheduler = partial(scheduler, patience=0, factor=0.5)
    build = partial(module, optimizer=optimizer, scheduler=scheduler, **schedule)
    if "bf16" in trainer.get("precision", ""):
        missing = {ROUNDED, *missing}
    return Way(build, data, trainer, monitor or {}, frozenset(missing))


def classifier(net):
    return partial(zoo.Classifier, net)


sgd = partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3)
nesterov = partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True)
adamw = partial(optim.AdamW, lr=0.01)
amsgrad = partial(optim.Adam, lr=0.01, amsgrad=True)
fused = partial(optim.AdamW, lr=0.01, fused=True)
rmsprop = partial(optim.RMSprop, lr=0.003, momentum=0.5, centered=True)
adagrad = partial(optim.Adagrad, lr=0.05)
lbfgs = partial(optim.LBFGS, lr=0.1, max_iter=3)

images, tokens = partial(zoo.loader, "images"), partial(zoo.loader, "tokens")
image_dicts = partial(zoo.loader, "images", as_dict=True)
one_cycle = partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=20)
cosine = partial(lr_scheduler.CosineAnnealingLR, T_max=5)
plateau = lr_scheduler.ReduceLROnPlateau
by_norm = {"gradient_clip_val": 0.1}
by_value = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
validated = {"validate": zoo.loader(count=2), "val_check_interval": 2, "max_epochs": 2}

transformer = partial(way, classifier(zoo.Transformer), tokens, missing=UNCALLED)
reentrant = partial(way, classifier(partial(zoo.Transformer, reentrant=True)), tokens, missing=UNCALLED)
not_reentrant = partial(way, classifier(partial(zoo.Transformer, reentrant=False)), tokens, missing=UNCALLED)
tied = partial(way, classifier(partial(zoo.Transformer, tied=True)), tokens, missing=UNCALLED)
encoder_then_head = partial(way, zoo.EncoderThenHead, images)

WAYS = {
    "mlp": way(zoo.Classifier, optimizer=sgd),
    "mlp, 64, amsgrad, by value": way(
        classifier(partial(zoo.mlp, dropout=0.3)), optimizer=amsgrad, precision="64-true", **by_value
    ),
    "mlp, bf16": way(zoo.Classifier, optimizer=sgd, precision="bf16-true", **by_norm),
    "mlp, lbfgs, light": way(zoo.Classifier, optimizer=lbfgs, monitor={"quantities": "light"}),
    "cnn, accumulate 2, one cycle": way(
        classifier(zoo.cnn), images, adamw, one_cycle, "step", accumulate_grad_batches=2, **by_norm
    ),
    "cnn, bf16-mixed, cosine": way(
        classifier(zoo.cnn), images, nesterov, cosine, "epoch", precision="bf16-mixed", max_epochs=2, **by_value
    ),
    "transformer, fused, accumulate 3": transformer(fused, cosine, "step", accumulate_grad_batches=3, **by_norm),
    "transformer, bf16-mixed, fused": transformer(fused, one_cycle, "step", precision="bf16-mixed", max_epochs=2),
    "transformer, bf16, accumulate 2": transformer(adamw, precision="bf16-true", accumulate_grad_batches=2),
    "transformer, tied, 64, accumulate 4": tied(amsgrad, precision="64-true", accumulate_grad_batches=4),
    "checkpointing, reentrant": reentrant(adamw, **by_norm),
    "checkpointing, reentrant, bf16-mixed": reentrant(sgd, precision="bf16-mixed", accumulate_grad_batches=2),
    "checkpointing": not_reentrant(adagrad),
    "checkpointing, bf16-mixed": not_reentrant(rmsprop, precision="bf16-mixed"),
    "metrics, plateau": way(zoo.WithMetrics, optimizer=rmsprop, scheduler=plateau, interval="epoch", **validated),
    "metrics, two calls, bf16-mixed": way(
        zoo.WithMetricsInParts, zoo.loader, adagrad, plateau, "epoch", precision="bf16-mixed", **validated
    ),
    "restless": way(zoo.RestlessStep, optimizer=adagrad, max_epochs=2),
    "restless, two calls, accumulate 2": way(
        zoo.RestlessStepInParts, optimizer=sgd, accumulate_grad_batches=2, max_epochs=2
    ),
    "encoder then head, cosine": encoder_then_head(adamw, cosine, "step", **by_norm),
    "encoder then head, bf16-mixed": encoder_then_head(sgd, precision="bf16-mixed", accumulate_grad_batches=2),
    "popper, by value": way(zoo.Popper, image_dicts, amsgrad, accumulate_grad_batches=2, **by_value),
    "teacher": way(zoo.Teacher, optimizer=adamw),
    "teacher, bf16": way(zoo.Teacher, optimizer=sgd, precision="bf16-true"),
    "hidden teacher": way(zoo.HiddenTeacher, optimizer=adamw),
    "in place": way(classifier(zoo.InPlace), optimizer=sgd, **by_norm),
    "no loss now and then": way(
        zoo.NowAndThen, optimizer=adamw, accumulate_grad_batches=2, missing={"not called in this step"}
    ),
    "logs in forward": way(zoo.LogsInForward, optimizer=sgd),
    "user's hooks": way(zoo.WithHooks, optimizer=sgd),
    "hooks itself up": way(classifier(zoo.Collecting), optimizer=sgd),
    "max norm": way(classifier(zoo.constrained), optimizer=sgd),
    "spectral normalization": way(classifier(zoo.parametrized), optimizer=sgd),
    "gradient penalty": way(zoo.GradientPenalty, optimizer=sgd, precision="64-true"),
    "sets rates": way(zoo.SetsRates, images, sgd),
    "steps its scheduler": way(zoo.StepsScheduler, images, sgd, cosine, "epoch"),
    "clears gradients": way(zoo.ClearsGradients, images, sgd),
    "experts": way(
        classifier(zoo.Experts),
        optimizer=adamw,
        missing={"not called in this step"},
    ),
    "recurrent": way(classifier(zoo.Recurrent), optimizer=rmsprop, missing={"no module call to hook"}, **by_norm),
}


def seed():
    torch.manual_seed(1)
    np.random.seed(2)  # noqa: NPY002
    random.seed(3)


def train(name: str, *monitors: SpectralMonitor) -> Run:
    seed()
    way, run = WAYS[name], Run()
    callbacks = [Recorder(run, "before", BEFORE, hooks=False), *monitors, Recorder(run, "after", AFTER, hooks=True)]
    zoo.fit(way.module(), way.data(), callbacks, RecordingLogger(run), **way.trainer)
    return run


@cache
def reference(name: str) -> Run:
    return train(name)


def monitor_of(name: str, every: int, quantities: str = "standard") -> SpectralMonitor:
    return SpectralMonitor(every_n_steps=every, **{"quantities": quantities, **WAYS[name].monitor})


@pytest.mark.few(14)
# torch refuses to take gradients of chosen tensors through this kind of checkpointing: said once, and NaN.
@pytest.mark.filterwarnings("ignore:the forward could not be run again with a graph .RuntimeError. When use_reentrant")
@pytest.mark.parametrize(
    ("every", "quantities"),
    [(1, "standard"), (2, "standard"), pytest.param(1, "full", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", WAYS)
def test_training_is_the_same(name, every, quantities):
    monitor = monitor_of(name, every, quantities)
    run = train(name, monitor)
    found = differences(reference(name), run)
    assert not found, f"{len(found)} differences, first {found[:5]}"
    for kind in ("parameter", "grad", "optimizer", "random", "log"):
        assert run.tensors(kind) > 0
    assert run.tensors() == reference(name).tensors()
    assert_measured(monitor, every, WAYS[name].missing, steps=run.records[-1][1]["progress/step"])


PARTS = {  # whether some samples can be run alone
    "mlp": True,
    "mlp, bf16": True,
    "cnn, accumulate 2, one cycle": False,
    "transformer, fused, accumulate 3": False,
    "checkpointing": False,
    "metrics, plateau": True,
    "restless, two calls, accumulate 2": False,
    "metrics, two calls, bf16-mixed": True,
    "encoder then head, cosine": False,
    "popper, by value": False,
    "teacher": False,
    "in place": True,
    "experts": True,
    "user's hooks": True,
    "recurrent": False,
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", PARTS)
def test_training_is_the_same_where_only_the_first_samples_are_run_again(name):
    monitor = SpectralMonitor(every_n_steps=1, replay_samples=2, **WAYS[name].monitor)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = train(name, monitor)
    found = differences(reference(name), run)
    assert not found, f"{len(found)} differences, first {found[:5]}"
    assert_measured(monitor, 1, WAYS[name].missing, steps=monitor.latest.step)
    assert any("replay_samples has no effect" in str(one.message) for one in said) != PARTS[name]


@pytest.mark.parametrize(
    "name", ["cnn, accumulate 2, one cycle", "restless, two calls, accumulate 2", "popper, by value"]
)
def test_two_monitors_do_not_disturb_each_other(name):
    monitors = [monitor_of(name, 1), monitor_of(name, 2)]
    assert not differences(reference(name), train(name, *monitors))
    for monitor, every in zip(monitors, (1, 2), strict=True):
        steps = monitors[0].latest.step
        assert_measured(monitor, every, WAYS[name].missing, steps)


def assert_measured(monitor, every, missing, steps):
    """Every step that was due, all quantities; what is missing is missing for the reasons given."""
    assert [m.step for m in monitor.measurements] == list(range(every, steps + 1, every))
    finite = 0
    for m in monitor.measurements:
        for info in m.layers:
            assert math.isfinite(m.value("weight_natural", info.name))
            if "feature_change" in m.values and info.role != "vector":
                seen = math.isfinite(m.value("feature_change", info.name))
                assert seen or m.why("feature_change", info.name) in missing, m.why("feature_change", info.name)
                finite += seen
    assert finite or "feature_change" not in m.values


ROUNDS = {"recurrent"}  # without gradients torch runs the LSTM by another kernel
MOVES_ITSELF = {"mlp, lbfgs, light", "sets rates", "steps its scheduler"}


@pytest.mark.few(8)
@pytest.mark.parametrize("name", [name for name in WAYS if name not in MOVES_ITSELF])
def test_the_forward_after_a_step_of_length_zero_is_the_same(name):
    """So what ``feature_change`` shows is due to the step: the same batch, randomness, precision, state."""
    way, monitor = WAYS[name], monitor_of(name, 1, "full")
    module = way.module()
    module._optimizer, module._scheduler = partial(module._optimizer, lr=0.0), None
    seed()
    zoo.fit(module, way.data(), [monitor], RecordingLogger(Run()), **way.trainer)
    allowed = way.missing - {ROUNDED} | ({ROUNDED} if name in ROUNDS else set())
    seen, drifts, speeds = 0, 0, 0
    for m in monitor.measurements:
        for info in m.layers:
            if info.role == "vector" or info.name.startswith("teacher"):  # which follows by rounding errors
                continue
            assert_no_change(m, info.name, allowed)
            seen += m.value("feature_change", info.name) == 0
            drifts += m.value("feature_drift", info.name) == 0
            speeds += m.value("backward_speed", info.name) == 0
    assert seen
    assert speeds or "reentrant" in name
    assert drifts or name == "no loss now and then"  # its first batch


def assert_no_change(m, layer, allowed=frozenset()):
    """Neither by this step nor, where that was looked at, since the first batch; and the gradients neither."""
    change, drift = m.value("feature_change", layer), m.value("feature_drift", layer)
    assert change == 0 or m.why("feature_change", layer) in allowed
    assert drift == 0 or math.isnan(drift)
    if "backward_speed" in m.values:
        speed = m.value("backward_speed", layer)
        assert speed == 0 or math.isnan(speed), speed


# What each guard is for: without it the comparison above fails, and in this kind of thing first.


@contextmanager
def not_put_back(self):
    self.restore()
    yield


@contextmanager
def not_even_set(self):
    yield


def trust_versions(states):
    return [state.tensor._version != state.version for state in states]


def only_tensors(self):
    for state, changed in zip(self._tensors, preserve._changed(self._tensors), strict=True):
        if changed:
            with torch.no_grad():
                state.tensor.copy_(state.values)


def anything_but_tensors(self):
    for undo in self._undo:
        undo()


def evaluated(self):
    self.module.eval()
    return loss_in(self.module(*self._args, **self._kwargs))


def scaled(self, i, call, gradient):
    return gradient * 1.0001


def logs_itself(self, trainer, place):
    self.write = lambda measurement: trainer.lightning_module.log("monitor", 1.0)


def measure_early(self, trainer, module, loss):
    if self._engine.armed:
        self._engine.finish(trainer.global_step, StepInputs(context=partial(again.logging_suppressed, trainer, module)))


def quietly_nothing(*args, **kwargs):
    return nullcontext()


def unchanged(value):
    return value


REPLAYED = (randomness.RandomState, "replayed")
RATES = {"group", "scheduler", "log"}
NAIVE = {
    "random states not put back": ("restless", *REPLAYED, not_put_back, {"random"}),
    "random states not even set": ("mlp, 64, amsgrad, by value", *REPLAYED, not_even_set, {"random"}),
    "random states not set, step": ("restless, two calls, accumulate 2", *REPLAYED, not_even_set, {"random"}),
    "nothing put back": ("cnn, accumulate 2, one cycle", replays, "preserved", quietly_nothing, {"buffer"}),
    "nothing put back, metrics": ("metrics, two calls, bf16-mixed", replays, "preserved", quietly_nothing, {"plain"}),
    "nothing put back, teacher": ("teacher", replays, "preserved", quietly_nothing, {"parameter", "plain"}),
    "nothing put back, max norm": ("max norm", replays, "preserved", quietly_nothing, {"parameter"}),
    "nothing put back, hooks": ("user's hooks", replays, "preserved", quietly_nothing, {"plain"}),
    "versions trusted": ("encoder then head, cosine", preserve, "_changed", trust_versions, {"buffer"}),
    "attributes not put back": ("restless", preserve.Snapshot, "restore", only_tensors, {"plain"}),
    "tensors not put back": ("hidden teacher", preserve.Snapshot, "restore", anything_but_tensors, {"plain"}),
    "gradients not put back": ("clears gradients", preserve._TensorState, "reattach", unchanged, {"grad"}),
    "generators not put back": ("restless", preserve.objects, "generator_types", tuple, {"plain"}),
    "log not muted": ("popper, by value", again, "_muted", quietly_nothing, {"log"}),
    "log not muted, forward": ("logs in forward", again, "_muted", quietly_nothing, {"log"}),
    "rates not kept": ("sets rates", callback, "logging_suppressed", quietly_nothing, {"group", "log"}),
    "schedules not kept": ("steps its scheduler", callback, "logging_suppressed", quietly_nothing, RATES),
    "arguments not copied": ("in place", replay, "clone_tree", unchanged, {"batch"}),
    "replay in evaluation mode": ("mlp", replay.RootCall, "__call__", evaluated, {"flag"}),
    "hooks left": ("mlp", features.FeatureCapture, "disarm", features.FeatureCapture.begin, {"hooks"}),
    "optimizer hooks left": ("mlp", optimizer.OptimizerCapture, "disarm", unchanged, {"hooks"}),
    "hook changes gradients": ("mlp", features.FeatureCapture, "_gradient", scaled, {"grad"}),
    "logs through the module": ("mlp", logs.SinkManager, "begin", logs_itself, {"log"}),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("guard", NAIVE)
def test_without_a_guard_it_is_not(guard, monkeypatch):
    name, owner, attribute, naive, kinds = NAIVE[guard]
    monkeypatch.setattr(owner, attribute, naive)
    if guard == "replay in evaluation mode":
        monkeypatch.setattr(module_tables, "TORCH_OWN", module_tables.TORCH_OWN | {"training"})
    found = differences(reference(name), train(name, monitor_of(name, 1)))
    assert found, "the comparison sees nothing"
    assert first_kinds(found) == kinds, found[:5]


def test_replay_between_forward_and_backward_breaks_the_graph(monkeypatch):
    monkeypatch.setattr(SpectralMonitor, "on_before_backward", measure_early)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train("cnn, accumulate 2, one cycle", monitor_of("cnn, accumulate 2, one cycle", 1))


BARE = {  # model, batches, optimizer, micro-batches per step, under autocast
    "mlp": (zoo.mlp, "rows", sgd, 1, False),
    "mlp, autocast": (zoo.mlp, "rows", sgd, 1, True),
    "cnn": (zoo.cnn, "images", adamw, 2, False),
    "restless": (zoo.Restless, "rows", adagrad, 1, False),
    "hooks itself up": (zoo.Collecting, "rows", sgd, 1, False),
}


def loop(name: str, every: int = 0, quantities: str = "standard", **options: Any) -> tuple[Run, SpectralProbe | None]:
    """A plain training loop, with a probe or without."""
    seed()
    build, kind, optimize, accumulated, autocast = BARE[name]
    model, run = build(), Run()
    optimizer = optimize(model.parameters(), **options)
    scheduler = cosine(optimizer)
    probe = SpectralProbe(model, optimizer, every_n_steps=every, quantities=quantities) if every else None
    optimizer.zero_grad()
    for index, (x, y) in enumerate(zoo.Batches(kind, count=12)):
        steps = index % accumulated == accumulated - 1
        with probe.step(accumulated=accumulated) if probe is not None and steps else nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = nnf.cross_entropy(model(x).float(), y) / accumulated
            loss.backward()
            if steps:
                optimizer.step()
        record = {**of_module(model), **of_optimizer(optimizer), **of_random(), **dict(leaves("batch", [x, y, loss]))}
        run.add(f"batch {index}", record)
        if steps:
            optimizer.zero_grad()
            scheduler.step()
    return run, probe


@pytest.mark.few(4)
@pytest.mark.parametrize(("every", "quantities"), [(1, "standard"), (2, "standard"), (1, "full")])
@pytest.mark.parametrize("name", BARE)
def test_a_bare_loop_is_the_same(name, every, quantities):
    bare, _ = loop(name)
    run, probe = loop(name, every, quantities)
    assert not differences(bare, run)
    assert len(run.records) == 12
    for kind in ("parameter", "grad", "optimizer", "random", "batch"):
        assert run.tensors(kind) > 0
    assert_measured(probe, every, {ROUNDED}, steps=12 // BARE[name][3])


@pytest.mark.parametrize("name", BARE)
def test_the_forward_after_a_step_of_length_zero_is_the_same_in_a_bare_loop(name):
    _, probe = loop(name, 1, lr=0.0)
    for m in probe.measurements:
        for info in m.layers:
            if info.role != "vector":
                assert_no_change(m, info.name)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("cnn", {"buffer", "random"}), ("restless", {"plain", "buffer", "random"})],
    ids=["cnn", "restless"],
)
def test_a_bare_loop_without_guards_is_not(name, kinds, monkeypatch):
    monkeypatch.setattr(replays, "preserved", quietly_nothing)
    monkeypatch.setattr(*REPLAYED, not_even_set)
    found = differences(loop(name)[0], loop(name, 1)[0])
    assert first_kinds(found) == kinds, found[:5]
