"""Another fit of a module goes on with what measuring took, though a new Trainer counts its steps from 1 again."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest

from spectral_monitor.engine import guards
from spectral_monitor.engine import overhead_budget as budget
from tests.callbacks.quickfit import fit
from tests.noninterference import zoo
from tests.resume.resuming import monitor, saved

LIGHT = {"every_n_steps": 1, "quantities": ["feature_change"], "max_overhead": 0.1}


class Slow(zoo.Classifier):
    """A second for each forward, of which a measured step has two."""

    now = 0.0

    def __init__(self):
        super().__init__()
        self.net.register_forward_hook(pass_a_second)


def pass_a_second(*_):
    Slow.now += 1.0


class Fails(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 40:
            raise RuntimeError("on purpose")


@pytest.fixture(autouse=True)
def _clock(monkeypatch):
    monkeypatch.setattr(budget, "perf_counter", lambda: Slow.now)
    monkeypatch.setattr(guards, "time", SimpleNamespace(perf_counter=lambda: Slow.now))


def steps(watch):
    return [m.step for m in watch.measurements]


STEPS = [1, 4, 7, 31, 41, 51, 61, 71]
"""Ten apart; the first three, three apart, are paid for until step 31."""


def test_of_one_fit():
    watch = monitor(**LIGHT)
    fit(watch, Slow(), max_steps=80, max_epochs=20)
    assert steps(watch) == STEPS


@pytest.mark.parametrize("fails", [False, True])
def test_of_two_fits_with_a_trainer_each(fails):
    watch, module = monitor(**LIGHT), Slow()
    with pytest.raises(RuntimeError, match="on purpose") if fails else nullcontext():
        fit(watch, module, max_steps=99 if fails else 40, max_epochs=20, callbacks=[Fails()] if fails else [])
    assert steps(watch) == STEPS[:4]
    fit(watch, module, max_steps=40, max_epochs=20)
    assert steps(watch) == [*STEPS[:4], *(step - 40 for step in STEPS[4:])]


def test_of_a_resumed_run(tmp_path):
    whole, rest = monitor(**LIGHT), monitor(**LIGHT)
    saved(tmp_path, whole, Slow(), every=36, max_steps=80, max_epochs=20)
    assert steps(whole) == STEPS
    fit(rest, Slow(), ckpt_path=tmp_path / "step=36.ckpt", max_steps=80, max_epochs=20)
    assert steps(rest) == STEPS[4:]
