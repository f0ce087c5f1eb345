"""The highest learning rate of every parameter group: beside it, that of now is the shape of the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import nn

NAMES = ("max_lr", "initial_lr")
"""Options in which schedules note a learning rate that they start from or go up to."""
CONSTANT = 0.5
"""A learning rate that nothing schedules counts as so much of a peak: as much as one that decays has on average."""


@dataclass
class Peak:
    """The highest learning rate of a group so far.

    Attributes:
        highest: that it names or had.
        first: that it had.
        scheduled: whether something schedules it: it names one, or was another before.
    """

    highest: float
    first: float
    scheduled: bool


class Peaks:
    """Peaks of parameter groups: ``max_lr``, ``initial_lr`` or the highest rate seen, whichever is largest.

    They are kept by parameter, for optimizers make new groups when they load a state.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> peaks = Peaks()
        >>> [peaks.part({"params": [weight], "lr": lr}) * lr for lr in (0.1, 0.1, 0.4, 0.2)]
        [0.5, 0.5, 1.0, 0.5]
    """

    def __init__(self) -> None:
        self._peaks: dict[nn.Parameter, Peak] = {}

    def see(self, group: Mapping[str, Any]) -> Peak:
        """Return what is known of a group, the learning rate of now included."""
        parameters, lr = group["params"], _number(group.get("lr"))
        found = self._peaks.get(parameters[0]) if parameters else None
        if found is None:
            found = Peak(0.0, lr, any(name in group for name in NAMES))
            self._peaks.update(dict.fromkeys(parameters, found))
        found.scheduled = found.scheduled or lr != found.first
        found.highest = max(found.highest, lr, *(_number(group.get(name)) for name in NAMES))
        return found

    def part(self, group: Mapping[str, Any]) -> float:
        """Return what turns the learning rate of a group into the part of its peak."""
        peak = self.see(group)
        if not peak.highest > 0:
            return 1.0
        return (1.0 if peak.scheduled else CONSTANT) / peak.highest

    def state(self, parameter: nn.Parameter) -> list[Any]:
        """Return what is known of the group that holds a parameter, as plain values; nothing if it was not seen."""
        return list(astuple(self._peaks[parameter])) if parameter in self._peaks else []

    def load(self, parameters: Iterable[nn.Parameter], state: list[Any]) -> None:
        """Go on from what :meth:`state` gave."""
        if state:
            self._peaks.update({p: Peak(*state) for p in parameters})


def _number(value: object) -> float:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else 0.0
    return float(value) if isinstance(value, int | float) else 0.0
