"""The multiplier of a layer, the tracked size of its updates that it follows from, and its changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from spectral_monitor.correction.smoothing import Tracker
from spectral_monitor.fitting.medians import geometric_median


@dataclass
class Multiplier:
    """A factor on a learning rate, and the size of updates that it follows from."""

    rate: float  # the factor
    lowest: float = math.inf  # the lowest factor that was right for a measured update
    since: int = 0  # step of the first reading; 0 before there is one
    size: Tracker = field(default_factory=Tracker)  # logarithm of updates for each unit of learning rate, smoothed
    limited: bool = False  # whether it is held at a limit

    @property
    def is_known(self) -> bool:
        """Return whether an update was ever read."""
        return not math.isnan(self.size.level)

    def factor_for(self, step: int, update: float, lr: float, wanted: float, swings: bool = False) -> float:
        """Return the factor that gives updates the wanted size, by this measured update and those before.

        Args:
            update: its size, above 0.
            lr: its learning rate, multiplied.
            wanted: size over the learning rate before its multiplier.
            swings: whether updates grow with the gradient, and so are close to 0 now and then.
        """
        self.since = self.since or step
        self.lowest = min(self.lowest, wanted * lr / update)
        return wanted / math.exp(self.size.see(math.log(update / lr), swings))

    def state(self) -> list[Any]:
        """Return plain numbers."""
        return [self.rate, self.lowest, self.since, *self.size.state()]

    @classmethod
    def loaded(cls, state: list[Any], limited: bool) -> Multiplier:
        """Return a multiplier that goes on from :meth:`state`."""
        rate, lowest, since, *size = state
        return cls(rate, lowest, since, Tracker(*size), limited)


def trials(multipliers: Sequence[Multiplier], began: Sequence[bool]) -> list[bool]:
    """Return for each multiplier whether it is still a trial; ``began``: whether its first value was one.

    A trial ends when the multiplier is found, or is as high as those that are: smaller steps are then the layer's own.
    """
    typical_rate = geometric_median(multiplier.rate for multiplier in multipliers if multiplier.is_known)
    return [
        is_trial and not (multiplier.is_known or multiplier.limited or multiplier.rate >= typical_rate)
        for multiplier, is_trial in zip(multipliers, began, strict=True)
    ]


@dataclass(frozen=True)
class Change:
    """A multiplier that was changed."""

    layer: str  # its name; where several layers share one multiplier, the one whose rule counts
    before: float
    after: float
    observed: float  # the update, in the policy's quantity
    wanted: float  # the update that the policy wants
    quantity: str  # the policy's
    limited: bool = False  # whether it is now held at the limit that the settings explain

    @property
    def factor(self) -> float:
        """The ratio of the two, at least 1."""
        return max(self.after / self.before, self.before / self.after)
