"""The size of the data that a model reads, seen in a forward that is run again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn

from spectral_monitor.capture.hooks.registration import Hook
from spectral_monitor.capture.replay.loss_flow import tensors_in


class DataSize:
    """Watches a repeated forward for the inputs of one module.

    Attributes:
        rms: root mean square of the inputs of its first call; ``None`` before that.
    """

    def __init__(self, module: nn.Module | None) -> None:
        """``module``: whose inputs are watched; ``None`` if there is none."""
        self._module = module
        self.rms: float | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hook the module inside, until the size is known."""
        if self._module is None or self.rms is not None:
            yield
            return
        with self._module.register_forward_pre_hook(Hook(self._called), with_kwargs=True):
            yield

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = next((x for x in tensors_in((args, kwargs)) if x.is_floating_point()), None)
        if inputs is not None and self.rms is None:
            with suppress(Exception):  # then it stays unknown
                self.rms = float(inputs.detach().to_dense().double().square().mean().sqrt())
