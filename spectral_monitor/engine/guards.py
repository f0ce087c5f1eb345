"""What is refused at the start, and what every measurement runs under."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.optim import LBFGS, Optimizer

from spectral_monitor.quantities import TIERS


def refuse(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers around which features cannot be measured.

    Raises:
        ValueError: naming the optimizer and what can be measured.
    """
    light = f"Choose quantities='light', or a list of: {', '.join(TIERS['light'])}"
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise ValueError(f"{type(optimizer).__name__} runs the forward several times in a step. {light}")


@contextmanager
def full_precision() -> Iterator[None]:
    """Inside, no autocast: norms are not to be computed in half precision."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
