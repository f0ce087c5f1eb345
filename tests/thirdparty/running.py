"""Train a model for a few steps under the monitor, and look at what was measured."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger

from spectral_monitor import Measurement, SpectralMonitor, SpectralProbe
from spectral_monitor.layers import Anatomy

FEATURES = ("feature_rms", "feature_change", "alignment", "bfa")


@dataclass(frozen=True)
class Ran:
    """What a run left behind; ``guess``: the readouts before its first step."""

    guess: set[str]
    anatomy: Anatomy
    measurements: list[Measurement]

    @property
    def readouts(self):
        return names(self.anatomy, "readout")

    @property
    def bare(self):
        """Operators that were taken for parameters without a module that is called."""
        matrices = (layer for layer in self.anatomy.layers if layer.info.role in ("operator", "readout"))
        return [layer.info.name for layer in matrices if "bare parameter" in layer.note]

    def unmeasured(self, *left_out):
        """Features of operators that have no number, but of layers that are ``left_out``: {(layer, quantity): why}."""
        last = self.measurements[-1]
        dense = [info.name for info in last.layers if info.role in ("operator", "readout")]
        pairs = [(name, key) for name in dense for key in FEATURES if not name.startswith(left_out)]
        return {(n, k): last.why(k, n) for n, k in pairs if not math.isfinite(last.value(k, n))}


def names(anatomy, role):
    return {info.name for info in anatomy.infos if info.role == role}


def run(model, loss, steps=3, optimizers=None, lr=1e-3, **options):
    """Train under a probe, without a word from the monitor.

    Args:
        loss: called without arguments, returns what is minimized.
        optimizers: by default one AdamW of what requires a gradient.
        options: of the probe.
    """
    torch.manual_seed(0)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizers = optimizers or [torch.optim.AdamW(trained, lr)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="spectral_monitor")
        probe = SpectralProbe(model, optimizers, **({"every_n_steps": 1} | options))
        guess = names(probe.anatomy, "readout")
        for _ in range(steps):
            with probe.step():
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss().backward()
                for optimizer in optimizers:
                    optimizer.step()
    return Ran(guess, probe.anatomy, list(probe.measurements))


class Watch(pl.Callback):
    """Keeps what the monitor takes the model for, at the start and at the end of training."""

    def __init__(self, monitor):
        self.monitor, self.anatomies = monitor, []

    def on_train_start(self, trainer, module):
        self.anatomies.append(self.monitor._engine.anatomy)

    def on_train_end(self, trainer, module):
        self.anatomies.append(self.monitor._engine.anatomy)


def fit(module, batches, folder, **options):
    """Train a LightningModule under :class:`SpectralMonitor`."""
    monitor = SpectralMonitor(every_n_steps=1, **options)
    watch = Watch(monitor)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[watch, monitor],
        log_every_n_steps=1,
        logger=CSVLogger(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, batches)
    before, after = watch.anatomies
    return Ran(names(before, "readout"), after, list(monitor.measurements))
