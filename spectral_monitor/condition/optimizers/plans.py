"""Learning-rate schedules, run ahead before training begins."""

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
"""Below this part of the highest learning rate hardly anything is learned."""
FINAL = 0.02
"""Healthy schedules stay above this part of the highest learning rate for half of training; some end at 0.01 of it."""
CALLS = 32
"""Schedules with fewer values are too short to end too early."""


class Plan(NamedTuple):
    """The course of the learning rate of a parameter group."""

    first: float  # the rate before training
    highest: float  # the highest rate of the schedule
    rises: bool = False  # whether it is known to be still rising when training ends
    # the part of training after which it is next to 0 for good; 1 if it never is, or that is not known
    lasts: float = 1.0

    @classmethod
    def of(cls, rates: Sequence[float]) -> Plan:
        """Return the plan of a schedule with these learning rates."""
        highest = max(rates)
        working = max((k for k, rate in enumerate(rates) if rate > FINAL * highest), default=len(rates) - 1)
        long = len(rates) >= CALLS
        return cls(rates[0], highest, rates[0] < rates[-1] == highest, (working + 1) / len(rates) if long else 1.0)


class LookAhead:
    """A scheduler's copy that runs ahead of it, with a stand-in for its optimizer.

    Options of groups do not tell where learning rates go: a schedule whose function returns learning rates, such as
    that of the first transformer, says 1.
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
        kept = {id(item): item for item in shared}
        self._scheduler = copy.deepcopy(scheduler, {**kept, id(scheduler.optimizer): self._groups})
        vars(self._scheduler)["verbose"] = False  # which prints every step before torch 2.7

    def plans(self, calls: int) -> list[Plan]:
        """Return the plan of each parameter group over a number of calls of the scheduler's ``step``.

        Raises:
            Exception: the first call fails; where a later one does, the schedule has come to its end.
        """
        rates = [self._rates()]
        with muted_warnings():  # the stand-in takes no steps, which torch warns of
            for call in range(calls):
                try:
                    self._scheduler.step()
                except Exception:
                    if call == 0:
                        raise
                    break
                rates.append(self._rates())
        return [Plan.of(course) for course in zip(*rates, strict=True)]

    def _rates(self) -> list[float]:
        return [number(group["lr"], 0.0) for group in self._groups.param_groups]


def number(value: object, missing: float = math.nan) -> float:
    """Return a setting as a number, whatever an optimizer keeps it as."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else missing
    return float(value) if isinstance(value, int | float) else missing


def highest_rate(group: Mapping[str, Any]) -> float:
    """Return the highest learning rate that a group names, whether of now or of a schedule; NaN if it names none."""
    return nanmax(number(group.get(key)) for key in ("max_lr", "initial_lr", "lr"))
