"""Numbers that a correction follows from measurement to measurement, through noise: the size of updates, and how far
steps go along their own line.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

MEMORY = 0.3
"""Weight of the newest error among those that set the pace."""
SLOWEST = 0.2
"""Least part of an error that is made up for."""

BELOW, ABOVE = 0.35, 0.5
"""Where values swing, how far below the level one counts at most, and how far above it the newest may be. They are
logarithms: 0.7 of what the level stands for, and 1.65 times that.

Gradients without norms may be a hundredth of the last ones at one step and a hundred times as large at the next. A mean
of logarithms follows the small ones, and the steps after them were far too long: recommenders and residual networks
without norms were lost under SGD.
"""

LONGEST = 1.4
"""The largest ``edge`` that is left alone: of longer steps, half of one would have lowered the loss further.

For a loss that is quadratic along the step that is from 4/3 on. Networks that train well are at 0.1 to 1.
"""
LONGEST_PROPORTIONAL = 1.0
"""The same where updates go with gradients, as under SGD: steps that are too long make the next ones longer still."""
UPHILL_EDGE = 2.0
"""The edge of a step that gains nothing. What is larger counts as this. So does a step that goes uphill, as the
gradient of its own batch says: momentum carries on where the steps before went past the lowest point.
"""
EDGES = 3
"""The mean of so many edges, the latest ones, makes steps shorter or longer.

With little noise edges swing about 1, for momentum carries steps past the lowest point and back, and the loss falls
all the same. A median, or the largest, would shorten these steps. That only makes the loss steeper (Cohen and others,
2021), and steps are shortened again, until nothing is learnt. Steps that are really too long have edges of 2 each time.
"""
RISE = 2**0.125
"""Factor by which steps become longer again, at most, each time one is looked at."""
SHORTEST = 1 / 64
"""Part of their length that is left at least."""
FRUITLESS = 3
"""So many edges in a row that stay too large at that length show that gradients are not those of the loss."""
PROBED, PROBES = 1 / 2, 6
"""Before steps become shorter than this, up to so many of the shortest length tell whether that helps at all."""
PART, SELDOM = 4, 50
"""While all is well a run looks again when it has become a quarter longer, or after so many steps."""


@dataclass
class Tracker:
    """Exponential smoothing that is as fast as its errors agree (Trigg and Leach, 1967).

    Errors that all go one way are drift, and made up for in full; errors that cancel out are noise, and mostly left.

    Example:
        >>> drift, noise = Tracker(), Tracker()
        >>> levels = [(drift.see(float(step)), noise.see((-1.0) ** step)) for step in range(40)]
        >>> drift.level > 38, abs(noise.level) < 0.3
        (True, True)
    """

    level: float = math.nan  # where the number is; NaN before it was seen
    bias: float = 0.0  # mean error, signs counted
    spread: float = 0.0  # mean size of errors

    def see(self, value: float, swings: bool = False) -> float:
        """Take in the next value and return the level.

        ``swings``: values are logarithms of a number that is close to 0 now and then, as a gradient is.
        """
        if math.isnan(self.level):
            self.level = value
            return value
        error = value - self.level
        if swings:
            error = max(error, -BELOW)
        self.bias += MEMORY * (error - self.bias)
        self.spread += MEMORY * (abs(error) - self.spread)
        pace = abs(self.bias) / self.spread if self.spread > 0 else 1.0
        self.level += max(SLOWEST, pace) * error
        if swings:
            self.level = max(self.level, value - ABOVE)
        return self.level

    def state(self) -> list[float]:
        """Return plain numbers."""
        return list(astuple(self))


class StepLength:
    """The part of their length that steps have, by the ``edge`` of some of them.

    Norms of weights tell how large a step is, not what the loss makes of it: factors behind a layer, as in a SIREN, and
    curvature stay unseen. ``edge`` sees both. It goes with the length of the step, so that one measurement tells which
    length would be right.

    Args:
        longest: the largest edge that is left alone.

    Attributes:
        factor: that part, from 1/64 to 1.
        given_up: whether the loss does not follow its gradients, as with straight-through estimators; steps then keep
            their length.
        edge: the mean of the latest, for steps as long as the one that was seen last.
        probing: whether the next step has the shortest length, to see whether shorter steps help.
    """

    def __init__(self, longest: float = LONGEST) -> None:
        self.factor, self.given_up, self.edge = 1.0, False, math.nan
        self._longest = longest
        self._curvatures: list[float] = []  # latest edges, at full length
        self._next, self._fruitless = 1, 0
        self.probing, self._probed = False, False

    def due(self, step: int) -> bool:
        """Return whether a step is looked at, if it is one that is measured."""
        return not self.given_up and step >= self._next

    def see(self, step: int, edge: float, uphill: bool = False) -> float:
        """Take in the edge of a step, NaN where it is not known; return the factor.

        ``uphill``: whether it is not known because the gradient says that the step goes uphill.
        """
        if self.given_up:
            return self.factor
        # Now and then while all is well; at each measurement while steps are too long or nearly so.
        watchful = self.factor < 1 or uphill or edge > self._longest / 2
        self._next = step + (1 if watchful else min(max(1, step // PART), SELDOM))
        if self.probing:
            return self._probe(edge)
        edge = UPHILL_EDGE if uphill else edge
        if not math.isfinite(edge):
            return self.factor
        counts = min(max(edge, 0.0), UPHILL_EDGE)
        self._curvatures = [*self._curvatures, counts / self.factor][-EDGES:]
        if len(self._curvatures) < EDGES:
            return self.factor
        self.edge = statistics.fmean(self._curvatures) * self.factor
        self._fruitless = self._fruitless + 1 if self.factor == SHORTEST and edge > self._longest else 0
        # At once where they are too long, by and by where they may be longer again.
        self.factor = min(self._right(), RISE * self.factor)
        if self.factor < PROBED and not self._probed:
            self.factor, self.probing, self._probed = SHORTEST, True, True
        if self._fruitless == FRUITLESS:
            self.factor, self.given_up = 1.0, True
        return self.factor

    def _probe(self, edge: float) -> float:
        """Take in the edge of a step that was as short as can be, where longer ones were all too long.

        It is next to 0 where a loss follows its gradients. In a network that has just been thrown off it takes a few
        steps to come down.
        """
        self._fruitless = self._fruitless + 1 if edge > self._longest / 2 else 0
        if self._fruitless == PROBES and edge > self._longest:
            self.factor, self.given_up = 1.0, True
        elif self._fruitless in (0, PROBES):  # shorter steps help, or it is not known
            self.factor, self.probing, self._fruitless = self._right(), False, 0
        return self.factor

    def _right(self) -> float:
        """Return the factor of the length at which edges are as large as they may be."""
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
        """Go on from there; nothing has been seen yet where a run of before had no such state."""
        self.factor, self.given_up = float(state.get("factor", 1.0)), bool(state.get("given_up", False))
        self._curvatures = [float(edge) for edge in state.get("curvatures", ())]
        self._next, self._fruitless = int(state.get("next", 1)), int(state.get("fruitless", 0))
        self.probing, self._probed = bool(state.get("probing", False)), bool(state.get("probed", False))
