"""A multiplier that was changed, and why, in words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """A multiplier that was changed.

    Attributes:
        layer: whose; where several layers share one, the one whose rule counts.
        before, after: the multiplier.
        observed, wanted: of the update, in the policy's quantity.
        quantity: that quantity.
        limited: whether it is now further off than the settings explain, and held there.
    """

    layer: str
    before: float
    after: float
    observed: float
    wanted: float
    quantity: str
    limited: bool = False

    @property
    def factor(self) -> float:
        """Return by how much it was changed, whichever way."""
        return max(self.after / self.before, self.before / self.after)
