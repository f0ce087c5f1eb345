"""The multiplier of a layer: what is known of its updates, the learning rate that follows, and changes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from spectral_monitor.correction.smoothing import Tracker


@dataclass
class Multiplier:
    """Factor on a learning rate, and what it follows from."""

    rate: float  # that factor
    lowest: float = math.inf  # the lowest that was found to be right so far
    since: int = 0  # step of the first reading; 0 before there is one
    # logarithm of updates for each unit of learning rate, followed through noise
    size: Tracker = field(default_factory=Tracker)
    limited: bool = False  # whether it is held at a limit

    @property
    def is_known(self) -> bool:
        """Return whether an update was ever read."""
        return not math.isnan(self.size.level)

    def right(self, step: int, update: float, lr: float, wanted: float, swings: bool = False) -> float:
        """Return the factor that makes updates as large as is wanted, by this one and those before.

        Args:
            step: at which it was measured.
            update: its size, above 0.
            lr: the learning rate it was made with, multiplied.
            wanted: size over the learning rate that is multiplied.
            swings: whether it goes with the gradient, and so is close to 0 now and then.
        """
        self.since = self.since or step
        self.lowest = min(self.lowest, wanted * lr / update)
        return wanted / math.exp(self.size.see(math.log(update / lr), swings))

    def state(self) -> list[Any]:
        """Return plain numbers."""
        return [self.rate, self.lowest, self.since, *self.size.state()]

    @classmethod
    def loaded(cls, state: list[Any], limited: bool) -> Multiplier:
        """Return what goes on from :meth:`state`."""
        rate, lowest, since, *size = state
        return cls(rate, lowest, since, Tracker(*size), limited)


@dataclass(frozen=True)
class Change:
    """A multiplier that was changed."""

    layer: str  # whose; where several layers share one, the one whose rule counts
    before: float
    after: float
    observed: float  # of the update, in the policy's quantity
    wanted: float  # the same, as the policy wants it
    quantity: str  # the policy's
    limited: bool = False  # whether it is now further off than the settings explain, and held there

    @property
    def factor(self) -> float:
        """Return by how much it was changed, whichever way."""
        return max(self.after / self.before, self.before / self.after)
