"""Short ways to train, save, resume and look at what was written."""

from __future__ import annotations

import io

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from spectral_monitor import SpectralMonitor, SpectralMonitorWarning
from tests.callbacks.quickfit import fit
from tests.noninterference import zoo

EPOCH = 6


class Keeps(zoo.Classifier):
    """Keeps its first layer's weights: at the start of a fit, and after every step."""

    def watched(self):
        return self.net[0].weight.detach().clone()

    def on_train_start(self):
        self.first = [self.watched()]

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: self.first.append(self.watched()))
        return optimizer


def monitor(every_n_steps=2, drift_every=2, **kwargs):
    return SpectralMonitor(every_n_steps, drift_every=drift_every, **kwargs)


def saved(folder, watch=None, module=None, data=None, every=EPOCH, keep=-1, callbacks=(), **trainer):
    """Train for one epoch with a checkpoint at every n-th step; the module, and the last checkpoint."""
    module = module if module is not None else zoo.Classifier()
    watch = monitor() if watch is None else watch
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=every, save_top_k=keep)
    fit(watch, module, data, callbacks=[*callbacks, saves], enable_checkpointing=True, **trainer)
    return module, folder / f"step={EPOCH}.ckpt"


def resumed(path, watch, module=None, data=None, **trainer):
    module = module if module is not None else Keeps()
    fit(watch, module, data, ckpt_path=path, **{"max_epochs": 2, **trainer})
    return module


def said(caught):
    return [str(w.message) for w in caught if w.category is SpectralMonitorWarning]


def state_in(path):
    (state,) = (v for k, v in torch.load(path, weights_only=True)["callbacks"].items() if k.startswith("SpectralMon"))
    return state


def change(path, **values):
    """Overwrite what a checkpoint holds of the monitor."""
    checkpoint = torch.load(path, weights_only=True)
    (state,) = (v for k, v in checkpoint["callbacks"].items() if k.startswith("SpectralMonitor"))
    state.update(values)
    torch.save(checkpoint, path)


QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


def measured(watch, after=0):
    """Everything but the cost, by step; NaN as None."""
    return {
        m.step: (
            {key: [None if x != x else x for x in v.tolist()] for key, v in m.values.items()},
            {key: None if v != v else v for key, v in m.summary.items() if key != "overhead_ms"},
            m.reasons,
        )
        for m in watch.measurements
        if m.step > after
    }


class Loop:
    """A plain loop that can stop and go on, of a ``model``, an ``optimizer`` and a ``probe``."""

    def state(self):
        buffer = io.BytesIO()
        torch.save({key: getattr(self, key).state_dict() for key in ("model", "optimizer", "probe")}, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)

    def load(self, state):
        for key, value in state.items():
            getattr(self, key).load_state_dict(value)
        return self


def drift_of(watch, step):
    return next(m.value("drift_fro_ratio", "net.0") for m in watch.measurements if m.step == step)


def drift(weights, start):
    return ((weights - start).norm() / start.norm()).item()


def assert_drift_is_from(start, watch, module):
    """Of every measurement after the resumption, against the closed form."""
    for m in watch.measurements:
        expected = drift(module.first[m.step - EPOCH], start)
        assert m.value("drift_fro_ratio", "net.0") == pytest.approx(expected, rel=1e-4)


def weights_in(path):
    return torch.load(path, weights_only=True)["state_dict"]["net.0.weight"]


def plain(value):
    if isinstance(value, dict):
        return all(type(key) is str and plain(item) for key, item in value.items())
    if type(value) is list:
        return all(map(plain, value))
    return value is None or type(value) in (str, int, float, bool)
