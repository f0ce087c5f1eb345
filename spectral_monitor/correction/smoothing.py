"""Smoothed numbers that a correction tracks through noise: the size of updates, and the edge of steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

NEWEST_WEIGHT = 0.3
"""Weight of the newest error among those that set the pace."""
MIN_PACE = 0.2
"""The smallest part of an error that is made up for."""

MAX_BELOW, MAX_ABOVE = 0.35, 0.5
"""Where values swing: a lower value counts as this far below the level, and the level stays this close below a higher
one. They are logarithms: factors of 0.7 and 1.65.

In networks without normalization gradients may fall to a hundredth at one step and grow a hundredfold at the next. A
mean of logarithms follows the small ones, and later steps are far too long (docs/adr/0006).
"""

LONGEST = 1.4
"""The largest ``edge`` that is left alone: half of a longer step would have lowered the loss further.

Where the loss is quadratic along the step that holds from 4/3 on. Networks that train well are at 0.1 to 1.
"""
LONGEST_PROPORTIONAL = 1.0
"""The same where updates grow with gradients, as under SGD: there a step that is too long makes the next longer."""
UPHILL_EDGE = 2.0
"""The edge of a step that gains nothing. Larger edges count as this, and so do steps uphill against the gradient of
their own batch, where momentum has carried past the lowest point.
"""
EDGES = 3
"""Steps become shorter or longer by the mean of so many of the latest edges.

With little noise edges swing about 1, for momentum carries steps past the lowest point and back, and the loss still
falls. A median, or the largest, would shorten these steps again and again (docs/adr/0012). Steps that are really too
long have edges of 2 each time.
"""
RISE = 2**0.125
"""The largest factor by which steps become longer at a time."""
SHORTEST = 1 / 64
"""The smallest factor on the length of steps."""
MAX_FRUITLESS = 3
"""So many large edges in a row at that length show that the gradients are not those of the loss."""
PROBED, PROBES = 1 / 2, 6
"""Before the factor falls below the first number, up to so many of the shortest steps show whether that helps."""
RUN_PARTS, MAX_STEPS_BETWEEN = 4, 50
"""While edges are healthy the next one is taken after a quarter of the steps so far, or after at most 50 steps."""


@dataclass
class Tracker:
    """Exponential smoothing whose pace grows as its errors agree (Trigg and Leach, 1967).

    Errors of one sign are drift, which is followed in full; errors that cancel out are noise, which is mostly ignored.

    Example:
        >>> drift, noise = Tracker(), Tracker()
        >>> levels = [(drift.see(float(step)), noise.see((-1.0) ** step)) for step in range(40)]
        >>> drift.level > 38, abs(noise.level) < 0.3
        (True, True)
    """

    level: float = math.nan  # the smoothed number; NaN before the first value
    bias: float = 0.0  # mean error
    spread: float = 0.0  # mean absolute error

    def see(self, value: float, swings: bool = False) -> float:
        """Take in the next value and return the level.

        ``swings``: values are logarithms of a number that is close to 0 now and then, as a gradient is.
        """
        if math.isnan(self.level):
            self.level = value
            return value
        error = value - self.level
        if swings:
            error = max(error, -MAX_BELOW)
        self.bias += NEWEST_WEIGHT * (error - self.bias)
        self.spread += NEWEST_WEIGHT * (abs(error) - self.spread)
        pace = abs(self.bias) / self.spread if self.spread > 0 else 1.0
        self.level += max(MIN_PACE, pace) * error
        if swings:
            self.level = max(self.level, value - MAX_ABOVE)
        return self.level

    def state(self) -> list[float]:
        """Return plain numbers."""
        return list(astuple(self))


class StepLength:
    """A factor on the length of steps, set by the ``edge`` of measured ones.

    Norms of weights show how large a step is, but neither factors behind a layer, as in a SIREN, nor curvature.
    ``edge`` shows both. It is proportional to the length of the step, so one measurement gives the right length.

    Args:
        longest: the largest edge that is left alone.

    Attributes:
        factor: on the length of steps, from 1/64 to 1.
        given_up: whether the loss does not follow its gradients, as with straight-through estimators; steps then keep
            their length.
        edge: the mean of the latest edges, for steps as long as the last one.
        probing: whether the next step has the shortest length, to see whether shorter steps help.
    """

    def __init__(self, longest: float = LONGEST) -> None:
        self.factor, self.given_up, self.edge = 1.0, False, math.nan
        self._longest = longest
        self._curvatures: list[float] = []  # latest edges, for steps of full length
        self._next, self._fruitless = 1, 0
        self.probing, self._probed = False, False

    def due(self, step: int) -> bool:
        """Return whether the edge of a step is needed, if the step is measured."""
        return not self.given_up and step >= self._next

    def see(self, step: int, edge: float, uphill: bool = False) -> float:
        """Take in the edge of a step, NaN where it is not known; return the factor.

        ``uphill``: whether it is not known because the gradient says that the step goes uphill.
        """
        if self.given_up:
            return self.factor
        # Seldom while edges are healthy; at each measurement while steps are too long or nearly so.
        watchful = self.factor < 1 or uphill or edge > self._longest / 2
        self._next = step + (1 if watchful else min(max(1, step // RUN_PARTS), MAX_STEPS_BETWEEN))
        if self.probing:
            return self._probe(edge)
        edge = UPHILL_EDGE if uphill else edge
        if not math.isfinite(edge):
            return self.factor
        bounded = min(max(edge, 0.0), UPHILL_EDGE)
        self._curvatures = [*self._curvatures, bounded / self.factor][-EDGES:]
        if len(self._curvatures) < EDGES:
            return self.factor
        self.edge = statistics.fmean(self._curvatures) * self.factor
        self._fruitless = self._fruitless + 1 if self.factor == SHORTEST and edge > self._longest else 0
        # Shorter at once, longer only step by step.
        self.factor = min(self._right(), RISE * self.factor)
        if self.factor < PROBED and not self._probed:
            self.factor, self.probing, self._probed = SHORTEST, True, True
        if self._fruitless == MAX_FRUITLESS:
            self.factor, self.given_up = 1.0, True
        return self.factor

    def _probe(self, edge: float) -> float:
        """Take in the edge of a step of the shortest length, after longer ones were all too long.

        It is close to 0 where a loss follows its gradients. In a network that was just disturbed it takes a few steps
        to fall.
        """
        self._fruitless = self._fruitless + 1 if edge > self._longest / 2 else 0
        if self._fruitless == PROBES and edge > self._longest:
            self.factor, self.given_up = 1.0, True
        elif self._fruitless in (0, PROBES):  # shorter steps help, or it is not known
            self.factor, self.probing, self._fruitless = self._right(), False, 0
        return self.factor

    def _right(self) -> float:
        """Return the factor with which edges have the largest healthy size."""
        mean = statistics.fmean(self._curvatures)
        return min(max(self._longest / mean, SHORTEST), 1.0) if mean > 0 else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers."""
        return {
            "factor": self.factor,
            "given_up": self.given_up,
            "curvatures": list(self._curvatures),
            "next": self._next,
            "fruitless": self._fruitless,
            "probed": self._probed,
            "probing": self.probing,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; begin afresh if the earlier run had none."""
        self.factor, self.given_up = float(state.get("factor", 1.0)), bool(state.get("given_up", False))
        self._curvatures = [float(edge) for edge in state.get("curvatures", ())]
        self._next, self._fruitless = int(state.get("next", 1)), int(state.get("fruitless", 0))
        self.probing, self._probed = bool(state.get("probing", False)), bool(state.get("probed", False))
