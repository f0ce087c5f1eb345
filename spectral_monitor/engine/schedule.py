"""The schedule: which steps are measured, and which quantities at each.

Optimizers may take turns, as those of a GAN do: even intervals would only ever meet one of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from spectral_monitor.quantities import QUANTITIES, TIERS
from spectral_monitor.suggestions import did_you_mean

Interval = int | str
"""Every so many steps, or steps in words."""

DEFAULT_SCHEDULE = "1, 2, 4, ..., every 100"
"""Most happens in the first steps, and a fault is best known at once."""

PATIENCE = 32
"""Steps after a measured one that are watched in vain."""

VALID = 'an integer >= 1, or steps in words such as "1, 2, 4, 8, ..., every 100" or "1, 10, every 1000"'


@dataclass(frozen=True)
class Schedule:
    """Some first steps, and then every so many.

    Example:
        >>> schedule = Schedule.of("1, 2, 4, ..., every 100")
        >>> [step for step in range(1, 301) if schedule.due(step)]
        [1, 2, 4, 8, 16, 32, 64, 100, 200, 300]
    """

    first: tuple[int, ...]  # steps, growing
    every: int  # every n-th step too; 0 for none

    @classmethod
    def of(cls, given: Interval, name: str = "every_n_steps") -> Schedule:
        """Return the schedule for a user's ``every_n_steps``: a number, or a list in words, the last entry of which may
        be ``every n``. ``...`` before that continues with the ratio of the two steps before it.

        Args:
            given: the number or the words.
            name: what it is called in errors.

        Raises:
            ValueError: it stands for nothing.
        """
        if isinstance(given, int) and not isinstance(given, bool) and given >= 1:
            return cls((), given)
        wrong = ValueError(f"{name} must be {VALID}; got {given!r}")
        if not isinstance(given, str):
            raise wrong
        *words, last = (word.strip() for word in given.split(","))
        found = re.fullmatch(r"every +(\d+)", last)
        every = int(found[1]) if found else 0
        words += [] if found else [last]
        dots = bool(found) and words[-1:] == ["..."]
        words = words[:-1] if dots else words
        few = 0 if every else 2  # a lone number is taken for a slip: every so many, or that one?
        if not all(word.isdecimal() for word in words) or (found and every < 1) or len(words) < (2 if dots else few):
            raise wrong
        first = [int(word) for word in words]
        if any(a >= b for a, b in pairwise([0, *first])):
            raise wrong
        if dots:
            ratio = first[-1] / first[-2]
            while (step := round(first[-1] * ratio)) < every:
                first.append(max(step, first[-1] + 1))
        return cls(tuple(first), every)

    @cached_property
    def _first(self) -> frozenset[int]:
        """As words may mean thousands of first steps, and every step asks."""
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
    """

    groups: Mapping[Schedule, frozenset[str]]  # a schedule -> the keys that follow it

    @classmethod
    def of(cls, given: Interval | Mapping[str, Interval], keys: Collection[str]) -> Timetable:
        """Return the schedules for a user's ``every_n_steps``, one for each measured quantity.

        Args:
            given: one interval, or a mapping from tiers and keys to intervals: a tier stands for the measured
                quantities that are in it and in none below, and a key counts for more than its tier.
            keys: that are measured.

        Raises:
            ValueError: an interval that stands for nothing, a name that is not measured, a key without an interval.
        """
        if not isinstance(given, Mapping):
            return cls({Schedule.of(given): frozenset(keys)})
        tiers = {tier: [key for key in keys if QUANTITIES[key].tier == tier] for tier in TIERS}
        valid = [tier for tier in TIERS if tiers[tier]] + list(keys)
        for name in given:
            if name not in valid:
                hint = "" if name in QUANTITIES or name in TIERS else did_you_mean(name, valid)
                raise ValueError(f"every_n_steps: {name!r} is not measured{hint or '.'} Measured: {', '.join(valid)}")
        schedules = {name: Schedule.of(interval, f"every_n_steps[{name!r}]") for name, interval in given.items()}
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
        """Return what is measured at a step, counted from 1; nothing at most of them."""
        return frozenset[str]().union(*(keys for schedule, keys in self.groups.items() if schedule.due(step)))

    def with_key(self, key: str) -> tuple[Schedule, frozenset[str]]:
        """Return the schedule of a measured key, and all keys that share it."""
        return next((schedule, keys) for schedule, keys in self.groups.items() if key in keys)


class Turns:
    """Waits, after a measured step, for the turn of those optimizers that did not step in it.

    Attributes:
        awaited: layers of these; empty if there are none.

    Example:
        >>> turns, held = Turns(), {0: "", 1: ""}
        >>> turns.measured(held, {0}), sorted(turns.awaited)
        (None, [1])
        >>> turns.taken({1}), sorted(turns.awaited)
        (None, [])
    """

    def __init__(self) -> None:
        self.awaited: frozenset[int] = frozenset()
        self._absent: frozenset[int] = frozenset()
        self._waited = 0

    def measured(self, held: Mapping[int, str], stepped: Collection[int]) -> None:
        """Take in a step that was measured because it was due.

        Args:
            held: layer index -> why steps of its optimizer cannot be seen; empty if they can.
            stepped: layers whose optimizer has stepped.
        """
        self._waited, self._absent = 0, self._absent - frozenset(stepped)
        self.awaited = frozenset(i for i, unseen in held.items() if not unseen and i not in stepped) - self._absent

    def taken(self, stepped: Collection[int]) -> None:
        """Take in a step that was measured because some of those that are awaited have stepped."""
        self._waited, self.awaited = 0, self.awaited - frozenset(stepped)

    def missed(self) -> None:
        """Take in a step in which none of those that are awaited has stepped."""
        self._waited += 1
        if self._waited >= PATIENCE:  # until they are seen to step, nobody waits for them again
            self._waited, self._absent, self.awaited = 0, self._absent | self.awaited, frozenset()
