"""The highest learning rate of every parameter group: beside it, that of now is the shape of the schedule."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from spectral_monitor.state.muted_warnings import muted_warnings

NAMES = ("max_lr", "initial_lr")
"""Options in which schedules note a learning rate that they start from or go up to."""
CONSTANT = 0.5
"""A learning rate that nothing schedules counts as so much of a peak: as much as one that decays has on average."""

FALLEN, MISSED = 0.9, 0.25
"""A learning rate that has fallen to such a part of the highest it had, where that is less than such a part of what it
names, will not come to that: warm-ups rise, and restarts begin with a peak.
"""


@dataclass
class Peak:
    """The highest learning rate of a group.

    Attributes:
        seen: that it had so far.
        first: that it had.
        scheduled: whether something schedules it: it names one, or was another before.
        named: that it names, or its schedule plans.
        now: that it has.
    """

    seen: float
    first: float
    scheduled: bool
    named: float = 0.0
    now: float = 0.0

    @property
    def is_missed(self) -> bool:
        """Return whether the learning rate falls again far below what it names."""
        return self.now < FALLEN * self.seen and self.seen < MISSED * self.named

    @property
    def highest(self) -> float:
        """Return the highest one known."""
        return max(self.seen, self.named)


class Peaks:
    """Peaks of parameter groups: what a schedule plans, or where none is known, ``max_lr`` or ``initial_lr``; or the
    highest rate seen, if that is larger.

    They are kept by parameter, for optimizers make new groups when they load a state.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> peaks = Peaks()
        >>> [peaks.part({"params": [weight], "lr": lr}) * lr for lr in (0.1, 0.1, 0.4, 0.2)]
        [0.5, 0.5, 1.0, 0.5]
    """

    def __init__(self) -> None:
        self._peaks: dict[nn.Parameter, Peak] = {}
        self._planned: dict[nn.Parameter, float] = {}

    def plan(self, parameters: Iterable[nn.Parameter], highest: float) -> None:
        """Take the highest learning rate that the schedule of a group comes to; its options no longer count."""
        self._planned.update(dict.fromkeys(parameters, highest))

    def begin(self) -> None:
        """Forget learning rates that groups had before training: a schedule may have come since, and changed them."""
        self._peaks.clear()

    def see(self, group: Mapping[str, Any]) -> Peak:
        """Return what is known of a group, the learning rate of now included."""
        parameters, lr = group["params"], _number(group.get("lr"))
        found = self._peaks.get(parameters[0]) if parameters else None
        if found is None:
            found = Peak(0.0, lr, any(name in group for name in NAMES))
            self._peaks.update(dict.fromkeys(parameters, found))
        planned = self._planned.get(parameters[0]) if parameters else None
        found.scheduled = found.scheduled or planned is not None or lr != found.first
        found.seen, found.now = max(found.seen, lr), lr
        names = (_number(group.get(name)) for name in NAMES)
        found.named = max(found.named, *names) if planned is None else planned
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


def planned_rates(scheduler: LRScheduler, calls: int, shared: Sequence[object] = ()) -> list[float]:
    """Return the highest learning rate that each parameter group of a scheduler's optimizer has during so many calls of
    its ``step``, that of now included.

    Options of groups do not tell: a schedule whose function returns learning rates, such as that of the first
    transformer, says 1. So a copy of it runs ahead, with a stand-in for the optimizer.

    Args:
        scheduler: any but those that go by a metric.
        calls: how many.
        shared: what a schedule may refer to and is not copied with it, such as the network.

    Raises:
        Exception: it cannot be copied, or fails before its first call.
    """
    groups = [{**group, "params": [nn.Parameter(torch.zeros(()))]} for group in scheduler.optimizer.param_groups]
    stand_in = torch.optim.SGD([{**group, "lr": _number(group["lr"])} for group in groups], lr=1.0)
    kept = {id(item): item for item in shared}
    with muted_warnings():  # that the stand-in takes no steps
        ahead = copy.deepcopy(scheduler, {**kept, id(scheduler.optimizer): stand_in})
        vars(ahead)["verbose"] = False  # which prints every step before torch 2.7
        found = [_number(group["lr"]) for group in stand_in.param_groups]
        for call in range(calls):
            try:
                ahead.step()
            except Exception:
                if call == 0:
                    raise
                break  # it has come to its end
            found = [max(rate, _number(group["lr"])) for rate, group in zip(found, stand_in.param_groups, strict=True)]
    return found


def _number(value: object) -> float:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else 0.0
    return float(value) if isinstance(value, int | float) else 0.0
