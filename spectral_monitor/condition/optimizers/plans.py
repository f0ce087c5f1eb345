"""Learning-rate schedules, run ahead of training."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from spectral_monitor.fitting.medians import nanmax
from spectral_monitor.state.muted_warnings import muted_warnings

FADED = 2e-3
"""Below this part of the highest learning rate a network hardly learns."""
FINAL = 0.02
"""Healthy schedules stay above this part of the highest learning rate for half of training; some end at 0.01 of it."""
CALLS = 32
"""With fewer values than this, a schedule is too short to judge when it ends."""


class Plan(NamedTuple):
    """The course of the learning rate of a parameter group."""

    first: float  # rate before training
    highest: float  # highest rate of the schedule
    rises: bool = False  # whether it is known to be still rising when training ends
    lasts: float = 1.0  # part of training after which it stays next to 0; 1 if it does not or that is unknown

    @classmethod
    def of(cls, rates: Sequence[float], after: float = math.nan) -> Plan:
        """Return the plan of a schedule with these learning rates, and the one that would follow training, if known."""
        highest = max(rates)
        last = max((k for k, rate in enumerate(rates) if rate > FINAL * highest), default=len(rates) - 1)
        lasts = (last + 1) / len(rates) if len(rates) >= CALLS else 1.0
        rises = rates[-1] == highest > 0 and (rates[0] < highest or highest < after)
        return cls(rates[0], highest, rises, lasts)


class LookAhead:
    """A copy of a scheduler that runs ahead of it, with a stand-in for its optimizer.

    The options of groups do not tell where learning rates go: the base rate is 1 if a schedule's function returns
    learning rates, as that of the first transformer does.
    """

    def __init__(self, scheduler: LRScheduler, shared: Sequence[object] = ()) -> None:
        """Copy a scheduler as it is now.

        Args:
            scheduler: any scheduler that does not depend on a metric.
            shared: objects that it may refer to and that are not copied, such as the network.

        Raises:
            Exception: it cannot be copied.
        """
        groups = [{**group, "params": [nn.Parameter(torch.zeros(()))]} for group in scheduler.optimizer.param_groups]
        self._groups = torch.optim.SGD([{**group, "lr": number(group["lr"], 0.0)} for group in groups], lr=1.0)
        uncopied = {id(item): item for item in shared}
        self._scheduler = copy.deepcopy(scheduler, {**uncopied, id(scheduler.optimizer): self._groups})
        vars(self._scheduler)["verbose"] = False  # before torch 2.7 it prints every step

    def plans(self, calls: int) -> list[Plan]:
        """Return the plan of each parameter group over a number of calls of the scheduler's ``step``.

        Raises:
            Exception: the first call fails; if a later one does, the schedule has ended.
        """
        rates = [self._rates()]
        with muted_warnings():  # torch warns because the stand-in takes no steps
            for call in range(calls + 1):  # the last one would follow training
                try:
                    self._scheduler.step()
                except Exception:
                    if call == 0 < calls:
                        raise
                    break
                rates.append(self._rates())
        return [Plan.of(of_group[: calls + 1], *of_group[calls + 1 :]) for of_group in zip(*rates, strict=True)]

    def _rates(self) -> list[float]:
        return [number(group["lr"], 0.0) for group in self._groups.param_groups]


def number(value: object, missing: float = math.nan) -> float:
    """Return a setting as a number, whether an optimizer keeps it as a number or a tensor."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else missing
    return float(value) if isinstance(value, int | float) else missing


def highest_rate(group: Mapping[str, Any]) -> float:
    """Return the highest learning rate among a group's options; NaN if it has none."""
    return nanmax(number(group.get(key)) for key in ("max_lr", "initial_lr", "lr"))
