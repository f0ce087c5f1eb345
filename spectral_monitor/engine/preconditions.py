"""Preconditions: unsupported models are refused, and measurements run in full precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.optim import LBFGS, Optimizer

from spectral_monitor.engine.parameter_tracker import ParameterTracker
from spectral_monitor.engine.results.reasons import REPLACED
from spectral_monitor.layers import Layer
from spectral_monitor.layers.naming import some
from spectral_monitor.quantities import TIERS

MAX_NAMES = 5
"""Layers that a warning names."""


def check_supported(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers around which features cannot be measured.

    Raises:
        ValueError: naming the optimizer and what can be measured.
    """
    light = f"Choose quantities='light', or a list of: {', '.join(TIERS['light'])}"
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise ValueError(f"{type(optimizer).__name__} runs the forward several times in a step. {light}")


def replaced(tracker: ParameterTracker | None, layers: Sequence[Layer], warn: Callable[[str], None]) -> set[int]:
    """Layers that are not what they were when training began; says so."""
    found = set() if tracker is None else tracker.moved()
    if found:
        names = [layers[i].info.name for i in sorted(found)]
        hint = "Another fit, or another probe, measures it as it is then"
        warn(f"not measured any more: {some(names, MAX_NAMES)}; {REPLACED}. {hint}")
    return found


@contextmanager
def full_precision() -> Iterator[None]:
    """Inside, no autocast: norms are not to be computed in half precision."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
