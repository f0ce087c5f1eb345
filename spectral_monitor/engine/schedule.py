"""The schedule: which steps are measured, and which quantities at each.

Optimizers may take turns, as those of a GAN do: with an even interval only one of them would ever be measured.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from spectral_monitor.arguments import is_integer
from spectral_monitor.quantities import QUANTITIES, TIERS
from spectral_monitor.suggestions import did_you_mean

Interval = int | str
"""Number of steps between measurements, or a list of steps in words."""

DEFAULT_SCHEDULE = "1, 2, 4, ..., every 100"
"""Dense at first, because most changes happen early and faults should show at once."""

MAX_WAIT_STEPS = 32
"""Steps after a measured one in which absent optimizers are waited for."""

VALID = 'an integer >= 1, or steps in words such as "1, 2, 4, 8, ..., every 100" or "1, 10, every 1000"'


@dataclass(frozen=True)
class Schedule:
    """Single steps, and multiples of an interval.

    Example:
        >>> schedule = Schedule.of("1, 2, 4, ..., every 100")
        >>> [step for step in range(1, 301) if schedule.due(step)]
        [1, 2, 4, 8, 16, 32, 64, 100, 200, 300]
    """

    first: tuple[int, ...]  # single steps, increasing
    every: int  # the interval; 0 for none

    @classmethod
    def of(cls, interval: Interval, name: str = "every_n_steps") -> Schedule:
        """Return the schedule for a user's ``every_n_steps``.

        Args:
            interval: a number, or a list of steps in words. Its last entry may be ``every n``; ``...`` before that
                continues with the ratio of the two steps before it.
            name: of the option, for errors.

        Raises:
            ValueError: the interval is invalid.
        """
        if is_integer(interval, 1):
            return cls((), interval)
        error = ValueError(f"{name} must be {VALID}; got {interval!r}")
        if not isinstance(interval, str):
            raise error
        *words, last = (word.strip() for word in interval.split(","))
        repeat = re.fullmatch(r"every +(\d+)", last)
        every = int(repeat[1]) if repeat else 0
        words += [] if repeat else [last]
        dots = bool(repeat) and words[-1:] == ["..."]
        words = words[:-1] if dots else words
        # A single number in words is refused: it could be one step or an interval.
        least = 2 if dots or not every else 0
        if not all(word.isdecimal() for word in words) or (repeat and every < 1) or len(words) < least:
            raise error
        first = [int(word) for word in words]
        if any(a >= b for a, b in pairwise([0, *first])):
            raise error
        if dots:
            ratio = first[-1] / first[-2]
            while (step := round(first[-1] * ratio)) < every:
                first.append(max(step, first[-1] + 1))
        return cls(tuple(first), every)

    @cached_property
    def _first(self) -> frozenset[int]:
        """The single steps as a set: there may be thousands, and ``due`` is called at every step."""
        return frozenset(self.first)

    def due(self, step: int) -> bool:
        """Return whether a step, counted from 1, is measured."""
        return step in self._first or (self.every > 0 and step % self.every == 0)


@dataclass(frozen=True)
class Timetable:
    """The schedules of all quantities.

    Example:
        >>> table = Timetable.of({"light": 10, "feature_rms": 100}, ["update_norm", "lr", "feature_rms"])
        >>> sorted(table.due(10)), len(table.due(100)), len(table.due(55))
        (['lr', 'update_norm'], 3, 0)
        >>> table.after(55), Timetable.of("1, 2, 4", ["lr"]).after(4)
        (60, 0)
    """

    groups: Mapping[Schedule, frozenset[str]]  # schedule -> the keys that follow it

    @classmethod
    def of(cls, intervals: Interval | Mapping[str, Interval], keys: Collection[str]) -> Timetable:
        """Return the schedules for a user's ``every_n_steps``, one for each measured quantity.

        Args:
            intervals: one interval, or a mapping from tiers and keys to intervals. A tier stands for the measured
                quantities that are in it and in no lower one; a key overrides its tier.
            keys: the measured quantities.

        Raises:
            ValueError: an interval is invalid, a name is not measured, or a key has no interval.
        """
        if not isinstance(intervals, Mapping):
            return cls({Schedule.of(intervals): frozenset(keys)})
        tiers = {tier: [key for key in keys if QUANTITIES[key].tier == tier] for tier in TIERS}
        valid = [tier for tier in TIERS if tiers[tier]] + list(keys)
        for name in intervals:
            if name not in valid:
                hint = "" if name in QUANTITIES or name in TIERS else did_you_mean(name, valid)
                raise ValueError(f"every_n_steps: {name!r} is not measured{hint or '.'} Measured: {', '.join(valid)}")
        schedules = {name: Schedule.of(interval, f"every_n_steps[{name!r}]") for name, interval in intervals.items()}
        groups: dict[Schedule, frozenset[str]] = {}
        for key in keys:
            schedule = schedules.get(key) or schedules.get(QUANTITIES[key].tier)
            if schedule is None:
                raise ValueError(
                    f"every_n_steps has no interval for {key!r}; give it one, or its tier: {QUANTITIES[key].tier!r}"
                )
            groups[schedule] = groups.get(schedule, frozenset()) | {key}
        return cls(groups)

    def due(self, step: int) -> frozenset[str]:
        """Return the keys that are measured at a step, counted from 1."""
        return frozenset[str]().union(*(keys for schedule, keys in self.groups.items() if schedule.due(step)))

    def after(self, step: int) -> int:
        """Return the first step after a given one at which anything is measured; 0 if there is none."""
        steps = [
            later
            for schedule in self.groups
            for later in (*schedule.first, schedule.every and (step // schedule.every + 1) * schedule.every)
            if later > step
        ]
        return min(steps, default=0)

    def with_key(self, key: str) -> tuple[Schedule, frozenset[str]]:
        """Return the schedule of a measured key, and all keys that follow it."""
        return next((schedule, keys) for schedule, keys in self.groups.items() if key in keys)


class Turns:
    """Waits, after a measured step, for the optimizers that did not step in it.

    Attributes:
        awaited: the layers of these optimizers.

    Example:
        >>> turns = Turns()
        >>> turns.measured({0: "", 1: ""}, {0}), sorted(turns.awaited)
        (None, [1])
        >>> turns.taken({1}), sorted(turns.awaited)
        (None, [])
    """

    def __init__(self) -> None:
        self.awaited: frozenset[int] = frozenset()
        self._absent: frozenset[int] = frozenset()
        self._waited = 0

    def measured(self, optimized: Mapping[int, str], stepped: Collection[int]) -> None:
        """Note a step that was measured because it was due.

        Args:
            optimized: layer index -> why steps of its optimizer cannot be observed; empty if they can.
            stepped: layers whose optimizer has stepped.
        """
        self._waited, self._absent = 0, self._absent - frozenset(stepped)
        waiting = (i for i, reason in optimized.items() if not reason and i not in stepped)
        self.awaited = frozenset(waiting) - self._absent

    def taken(self, stepped: Collection[int]) -> None:
        """Note a step that was measured because awaited optimizers have stepped."""
        self._waited, self.awaited = 0, self.awaited - frozenset(stepped)

    def missed(self) -> None:
        """Note a step in which no awaited optimizer has stepped."""
        self._waited += 1
        if self._waited >= MAX_WAIT_STEPS:  # until they step, they are not waited for again
            self._waited, self._absent, self.awaited = 0, self._absent | self.awaited, frozenset()
