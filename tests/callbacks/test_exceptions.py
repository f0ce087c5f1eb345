"""After an exception nothing of ours is left; an error of our own costs a measurement and no more."""

from __future__ import annotations

import math
import warnings
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from torch import nn, optim

from spectral_monitor import SpectralMonitor, SpectralMonitorWarning
from spectral_monitor.callbacks import batch_watch as callback
from spectral_monitor.capture.hooks import forward as features
from spectral_monitor.capture.hooks import recording as rows
from spectral_monitor.capture.replay import replay
from spectral_monitor.engine import state as memory
from spectral_monitor.engine.features import changes
from spectral_monitor.engine.features import stage as activations
from spectral_monitor.engine.results import measurement as measured
from spectral_monitor.engine.weights import norms
from spectral_monitor.engine.weights import stage as matrices
from spectral_monitor.state import rng as randomness
from spectral_monitor.state import snapshot as preserve
from tests.callbacks.quickfit import attributes, fit, leftovers, recording
from tests.noninterference import zoo
from tests.noninterference.recorder import AFTER, BEFORE, Recorder, RecordingLogger, Run, differences, of_module

# Exceptions: no hook, no attribute, no changed group is left.


class BoomError(Exception):
    pass


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.module.fail("backward")
        return gradient, None


class Net(nn.Module):
    """Keeps its activations, fails inside."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, zoo.CLASSES)
        self.kept, self.owner = [], []

    def forward(self, x):
        h = self.middle(self.first(x))
        self.kept.append(h)
        self.owner[0].fail("forward")
        self.kept.append(self.last(FailsInBackward.apply(h, self.owner[0]).relu()))
        return self.kept[-1]


class Optimizer(optim.SGD):
    def step(self, closure=None):
        loss = super().step(closure)
        self.module.fail("optimizer's step")
        return loss


class Fails(zoo.Classifier):
    """Fails at one place in the second batch, the step of which is measured."""

    def __init__(self, place, error):
        super().__init__(Net)
        self.net.owner.append(_Hidden(self))
        self.place, self.error, self.batches = place, error, 0

    def fail(self, place):
        if place == self.place and self.batches == 2:
            raise self.error("boom")

    def training_step(self, batch, batch_idx):
        self.batches += 1
        self.fail("start of the training step")
        loss = super().training_step(batch, batch_idx)
        self.fail("training step")
        return loss

    def on_before_zero_grad(self, optimizer):
        self.fail("zero_grad")

    def on_after_backward(self):
        self.fail("after backward")

    def on_before_optimizer_step(self, optimizer):
        self.fail("before the optimizer's step")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.fail("end of the batch")

    def on_train_batch_start(self, batch, batch_idx):
        if self.place == "start of the batch" and batch_idx == 1:
            raise self.error("boom")

    def configure_optimizers(self):
        optimizer = Optimizer(self.parameters(), lr=0.1, momentum=0.9)
        optimizer.module = _Hidden(self)
        return optimizer


class _Hidden:
    """Hides a module from those who walk through attributes."""

    def __init__(self, module):
        self._module = module

    def fail(self, place):
        self._module.fail(place)


class FailingLogger(RecordingLogger):
    """Fails where Lightning logs, not where we do."""

    def log_metrics(self, metrics, step=None):
        if step == 1 and "loss_step" in metrics:
            raise self.error("boom")
        super().log_metrics(metrics, step)


PLACES = [
    "start of the batch",
    "start of the training step",
    "forward",
    "training step",
    "zero_grad",
    "backward",
    "after backward",
    "before the optimizer's step",
    "optimizer's step",
    "end of the batch",
    "logger",
]


def run_into(module, logger, error, every):
    monitor, trainers = SpectralMonitor(every_n_steps=every), []

    class Keep(pl.Callback):
        def on_fit_start(self, trainer, module):
            trainers.append(trainer)

    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        fit(monitor, module, callbacks=[Keep()], logger=logger)
    return monitor, trainers[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("error", [BoomError, KeyboardInterrupt])
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_leaves_nothing_behind(place, error):
    module, logger = Fails(place, error), FailingLogger(Run())
    logger.error = error if place == "logger" else None
    if place != "logger":
        logger = recording()
    before = attributes(module)
    monitor, trainer = run_into(module, logger, error, every=2)
    assert module.batches == 2 - (place == "start of the batch")
    assert not leftovers(module, *trainer.optimizers)
    assert attributes(module) == before
    assert not any(h._backward_hooks for h in module.net.kept)
    (group,) = trainer.optimizers[0].param_groups
    assert (group["lr"], group["momentum"], len(group["params"])) == (0.1, 0.9, 6)
    assert trainer.loggers == [logger]
    measured = place in ("end of the batch", "logger")
    assert [m.step for m in monitor.measurements] == [2] * measured
    # The same monitor and the same module go on.
    module.place = "nowhere"
    fit(monitor, module, zoo.loader(count=4))
    assert monitor.latest.step == 4


class FailsInReplay(zoo.Classifier):
    """Fails in the second forward of a batch, which is the monitor's."""

    def __init__(self, error, parts):
        super().__init__(partial(zoo.mlp, 0.2))
        self.net.append(nn.BatchNorm1d(zoo.CLASSES))
        self.net[0].register_forward_pre_hook(fails_when_seen_before(error))
        self.parts = parts

    def loss(self, batch):
        x, y = batch
        logits = self.net[3:](self.net[:3](x)) if self.parts else self.net(x)
        return nn.functional.cross_entropy(logits, y)


def fails_when_seen_before(error):
    """A hook that knows batches, out of the monitor's reach."""
    seen = set()

    def hook(module, args):
        key = float(args[0].detach().sum())
        if key in seen:
            raise error("boom")
        seen.add(key)

    return hook


def recorded(module, *monitors):
    """Train the module; what was recorded around the monitors and what they said."""
    run = Run()
    around = [Recorder(run, "before", BEFORE, hooks=False), *monitors, Recorder(run, "after", AFTER, hooks=True)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zoo.fit(module, zoo.loader(), around, RecordingLogger(run))
    return run, [str(w.message) for w in caught if w.category is SpectralMonitorWarning]


@pytest.mark.parametrize("parts", [False, True], ids=["one call", "several"])
def test_a_forward_that_cannot_be_repeated_costs_what_needs_it(parts):
    monitor = SpectralMonitor(every_n_steps=1)
    torch.manual_seed(0)
    alone, _ = recorded(FailsInReplay(RuntimeError, parts))
    torch.manual_seed(0)
    watched, said = recorded(FailsInReplay(RuntimeError, parts), monitor)
    assert not differences(alone, watched)
    assert len(said) == 1
    assert "could not be run again (RuntimeError: boom)" in said[0]
    assert len(monitor.measurements) == 6
    for m in monitor.measurements:
        assert math.isnan(m.value("feature_change", "net.3"))
        assert "RuntimeError: boom" in m.why("feature_change", "net.3")
        assert math.isfinite(m.value("feature_rms", "net.3"))
        assert math.isfinite(m.value("update_norm", "net.3"))


def test_an_interrupt_in_the_replay_puts_everything_back():
    module = FailsInReplay(KeyboardInterrupt, False)
    names, logger, states = attributes(module), recording(), []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, module, *rest):
            states.append((of_module(module), torch.get_rng_state()))

    monitor = SpectralMonitor(every_n_steps=2)
    with pytest.raises(SystemExit):
        fit(monitor, module, callbacks=[Look()], logger=logger)
    (before, randomness), after = states[-1], of_module(module)
    assert len(states) == 1, "the first step is where feature_drift starts"
    assert torch.equal(randomness, torch.get_rng_state())
    assert attributes(module) == names
    for path, leaf in after.items():
        if path.startswith("hooks/"):
            assert leaf in (0, None) or path == "hooks/net.0"
        elif not path.startswith("plain/._"):  # Lightning takes its own attributes back
            assert leaf == before[path], path


# Errors of the monitor's own.


def fails(*args, **kwargs):
    fails.count += 1
    raise RuntimeError(f"ours, the {fails.count}th")


OURS = {  # where it happens, and how many of six steps are measured all the same
    "estimate, weights": (norms, "spectral_estimates", 0),
    "estimate, features": (activations, "spectral_estimates", 0),
    "weights at the start": (memory, "start_norms", 6),
    "copy of the weights": (matrices, "matrix_batches", 0),
    "remembering a call": (replay, "iterators_in", 0),
    "rows": (rows, "rows_of", 0),
    "random states": (randomness.RandomState, "now", 0),
    "loss of a call": (replay.RootCall, "keep_loss", 0),
    "snapshot": (preserve.Snapshot, "__init__", 0),
    "change of the features": (changes.ChangeStage, "measure", 0),
    "rows of the table": (measured, "layer_row", 0),
    "summary": (measured, "summarize", 0),
    "arming": (features.FeatureCapture, "arm", 0),
    "batch": (callback, "TrainingStepReplay", 0),
    "muting": (callback, "logging_suppressed", 6),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("what", OURS)
def test_an_error_of_ours_costs_the_measurement(what, monkeypatch):
    (owner, name, measured), monitor = OURS[what], SpectralMonitor(every_n_steps=1)
    torch.manual_seed(0)
    alone, _ = recorded(zoo.WithMetrics())
    fails.count = 0
    monkeypatch.setattr(owner, name, fails)
    torch.manual_seed(0)
    watched, said = recorded(zoo.WithMetrics(), monitor)
    assert fails.count > 0
    assert not differences(alone, watched)
    assert len(said) == 1, said
    assert "ours, the 1th" in said[0]
    assert len(monitor.measurements) == measured
