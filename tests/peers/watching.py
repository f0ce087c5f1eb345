"""Short ways to train, and to see what really happened."""

from __future__ import annotations

import lightning.pytorch as pl

from tests.noninterference import zoo
from tests.noninterference.recorder import RecordingLogger, Run


def fit(monitor, module, *others, data=None, **trainer):
    callbacks = [*others, *([] if monitor is None else [monitor])]
    return zoo.fit(module, zoo.loader() if data is None else data, callbacks, RecordingLogger(Run()), **trainer)


def matrices(monitor):
    return [info.name for info in monitor.latest.layers if info.role != "vector"]


def numbers(m):
    """Everything but the time it took."""
    return {key: value for key, value in m.scalars().items() if "overhead" not in key}


class Weights(pl.Callback):
    """Weights around every update, and the learning rate of each, as the optimizer itself meets them."""

    def on_train_start(self, trainer, module):
        self.before, self.after, self.rates = [], [], []
        (optimizer,) = trainer.optimizers
        optimizer.register_step_post_hook(lambda *_: self.after.append(self.read(module)))

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.before.append(self.read(module))
        names = {id(p): name for name, p in module.named_parameters()}
        self.rates.append({names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]})

    @staticmethod
    def read(module):
        return {name: p.detach().clone() for name, p in module.named_parameters()}

    def update(self, step, layer):
        """The real change of a layer's weight in a step, counted from one."""
        return self.after[step - 1][f"{layer}.weight"] - self.before[step - 1][f"{layer}.weight"]
