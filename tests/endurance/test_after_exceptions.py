"""Exceptions again and again: no hook is left anywhere, nothing that was recorded stays alive.

What one exception leaves behind is compared in detail in tests/callbacks/test_exceptions.py.
"""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch import nn, optim

from spectral_monitor import SpectralMonitor, SpectralMonitorWarning, SpectralProbe
from tests.endurance.endure import hooks
from tests.noninterference import zoo
from tests.noninterference.recorder import RecordingLogger, Run
from tests.one_step import training_step

ROUNDS, WARM = 14, 10


class BoomError(Exception):
    pass


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise BoomError("backward")


class Net(nn.Module):
    """Fails in its forward or backward pass when told to."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.place = nn.Linear(8, 12), nn.Linear(12, zoo.CLASSES), ""

    def forward(self, x):
        h = self.first(x).relu()
        if self.place == "forward":
            raise BoomError("forward")
        return self.last(FailsInBackward.apply(h) if self.place == "backward" else h)


class Optimizer(optim.SGD):
    place = ""

    def step(self, closure=None):
        loss = super().step(closure)
        if self.place == "optimizer step":
            raise BoomError("optimizer step")
        return loss


def objects():
    """Live tensors and live objects of ours."""
    gc.collect()
    kinds = [type(item) for item in gc.get_objects()]
    ours = sum(str(kind.__module__).startswith("spectral_monitor") for kind in kinds)
    return sum(issubclass(kind, torch.Tensor) for kind in kinds), ours


def rounds(once):
    """Live objects after every round, when it no longer matters what was needed for the first ones."""
    found = []
    gc.collect()
    gc.freeze()  # what was there before need not be looked through
    try:
        for _ in range(ROUNDS):
            once()
            found.append(objects())
    finally:
        gc.unfreeze()
    return found[WARM:]


PLACES = ["forward", "backward", "optimizer step"]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("place", PLACES)
def test_a_probe_in_one_long_loop(place):
    """Every second step fails; the user catches that and goes on."""
    model = Net()
    optimizer = Optimizer(model.parameters(), lr=0.01)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, history=2)
    x = torch.randn(16, 8)

    def step():
        with training_step(probe, optimizer):
            model(x).square().mean().backward()

    def once():
        model.place = optimizer.place = place
        with pytest.raises(BoomError, match=place):
            step()
        assert hooks(model, optimizer) == {}
        model.place = optimizer.place = ""
        step()
        assert hooks(model, optimizer) == {}

    assert len(set(rounds(once))) == 1
    assert probe.steps == 2 * ROUNDS
    assert [m.step for m in probe.measurements] == [2 * ROUNDS - 2, 2 * ROUNDS]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("place", PLACES)
def test_fit_after_fit(place):
    """One monitor, a new module and trainer each time."""
    monitor = SpectralMonitor(1, history=2)

    def once():
        optimizers = []

        def build(parameters):
            optimizers.append(Optimizer(parameters, lr=0.01))
            return optimizers[0]

        module = zoo.Classifier(Net, optimizer=build)

        def fail(batch, batch_idx):
            if batch_idx == 3:
                module.net.place = optimizers[0].place = place

        module.on_train_batch_start = fail
        with pytest.raises(BoomError, match=place):
            zoo.fit(module, zoo.loader(), [monitor], RecordingLogger(Run()))
        assert hooks(module, *optimizers) == {}

    assert len(set(rounds(once))) == 1
    assert [m.step for m in monitor.measurements] == [2, 3]


class Broken(RecordingLogger):
    """Never takes what the monitor sends."""

    def log_metrics(self, metrics, step=None):
        if any(key.startswith("spectral") for key in metrics):
            raise BoomError("logger")


@pytest.mark.slow
def test_a_logger_that_always_fails_does_not_stop_training():
    monitor, done = SpectralMonitor(1, history=2), []

    def once():
        module = zoo.Classifier(Net)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SpectralMonitorWarning)
            trainer = zoo.fit(module, zoo.loader(), [monitor], Broken(Run()))
        done.append(trainer.global_step)
        assert hooks(module, *trainer.optimizers) == {}

    assert len(set(rounds(once))) == 1
    assert done == [6] * ROUNDS
    assert [m.step for m in monitor.measurements] == [5, 6]


@pytest.mark.slow
def test_what_is_kept_would_be_counted():
    """The comparisons above can fail."""
    kept = []
    assert len(set(rounds(lambda: kept.append(torch.ones(1))))) == ROUNDS - WARM
