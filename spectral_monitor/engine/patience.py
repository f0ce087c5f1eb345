"""How many steps Lanczos makes where a look at what it has found would be a wait for the device."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from spectral_monitor.engine.scalars import Raw, Scalars
from spectral_monitor.linalg import DOUBT, MAX_STEPS, Exchange, Pieces, blind_estimate
from spectral_monitor.snapshot import devices

FIRST_STEPS = 12
"""Enough for Gaussian matrices, the hardest there are in networks, up to a width of about 1000."""
MORE_STEPS = 4
LEAST_STEPS = 2
CAUTION = 0.75
"""Share of the steps that seem to be spared which is spared: convergence is slower early on."""


class Patience:
    """Steps for each layer and kind of matrix, learnt from what earlier measurements needed.

    Too few never pass unseen: a norm that another measurement's steps have left in doubt is NaN.

    Example:
        >>> patience = Patience()
        >>> patience.learn({3: {"dW.doubt": [1e-14, 1e-10, 12.0], "W.doubt": [0.3, 2.0, 12.0]}})
        >>> patience.steps(3, "dW"), patience.steps(3, "W"), patience.steps(4, "W")
        (10, 16, 12)
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[int, str], int] = {}

    def is_needed(self, device: torch.device, exchange: Exchange | None) -> bool:
        """Whether norms are taken without a look. Several processes look, for each has to know when all are done."""
        return exchange is None and devices.asynchronous(device)

    def steps(self, i: int, name: str) -> int:
        """For layer ``i``'s matrices of one kind."""
        return self._steps.get((i, name), FIRST_STEPS)

    def estimate(
        self, A: Pieces, places: Mapping[tuple[int, str], slice], tol: float, out: Scalars
    ) -> tuple[Tensor, Tensor]:
        """Spectral and Frobenius norms (K,) of a stack of matrices, NaN for those that are in doubt.

        ``places``: layer index and kind -> which of the stack they are.
        """
        steps = max(self.steps(*key) for key in places)
        found = blind_estimate(A, steps, tol)
        made = torch.full((), float(steps), dtype=found.doubt.dtype, device=found.doubt.device)
        for (i, name), place in places.items():
            out.put(i, f"{name}.doubt", torch.stack([found.doubt[place].amax(), found.early[place].amax(), made]))
        return torch.where(found.doubt <= DOUBT, found.sigma, math.nan).to(found.fro), found.fro

    def learn(self, raw: Raw) -> None:
        """From the doubts that were left."""
        for i, values in raw.items():
            for name, found in values.items():
                kind, _, what = name.rpartition(".")
                if what == "doubt":
                    doubt, early, steps = found
                    self._steps[(i, kind)] = _next(doubt, early, int(steps))


def in_doubt(values: Mapping[str, list[float]]) -> set[str]:
    """Kinds of matrices whose spectral norms are, among a layer's raw scalars."""
    return {
        name.removesuffix(".doubt") for name, found in values.items() if name.endswith(".doubt") and found[0] > DOUBT
    }


def _next(doubt: float, early: float, steps: int) -> int:
    if doubt > DOUBT:
        return min(steps + MORE_STEPS, MAX_STEPS)
    if not 0 < doubt < early:  # nothing was in doubt, or nothing is known
        return steps
    spare = math.log(DOUBT / doubt) / math.log(early / doubt)
    return max(steps - int(CAUTION * spare), LEAST_STEPS)
