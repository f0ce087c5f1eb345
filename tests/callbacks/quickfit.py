"""Short ways to run the monitor, and to see what it leaves behind."""

from __future__ import annotations

from tests.noninterference import zoo
from tests.noninterference.recorder import RecordingLogger, Run, of_module, of_optimizer


def recording():
    return RecordingLogger(Run())


def fit(monitor, module=None, data=None, logger=None, callbacks=(), **trainer):
    """Six batches, one epoch, nothing but the monitor."""
    module = module if module is not None else zoo.Classifier()
    data = data if data is not None else zoo.loader()
    return zoo.fit(module, data, [*callbacks, monitor], recording() if logger is None else logger, **trainer)


def attributes(module):
    """Names on the module, but for the one Lightning adds when it looks for hyperparameters."""
    return set(vars(module)) - {"_hparams"}


def leftovers(module, *optimizers):
    """Hooks on modules, parameters and optimizers."""
    records = [of_module(module), *map(of_optimizer, optimizers)]
    return [path for record in records for path, n in record.items() if path.startswith("hooks/") and n]
