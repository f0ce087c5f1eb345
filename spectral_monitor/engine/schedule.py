"""Which steps are measured."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

VALID = 'an integer >= 1, or steps in words such as "1, 2, 4, 8, ..., every 100" or "1, 10, every 1000"'


@dataclass(frozen=True)
class Schedule:
    """Some first steps, and then every so many.

    Attributes:
        first: steps, growing.
        every: every n-th step too; 0 for none.

    Example:
        >>> schedule = Schedule.of("1, 2, 4, ..., every 100")
        >>> [step for step in range(1, 301) if schedule.due(step)]
        [1, 2, 4, 8, 16, 32, 64, 100, 200, 300]
    """

    first: tuple[int, ...]
    every: int

    @classmethod
    def of(cls, given: int | str) -> Schedule:
        """What a user's ``every_n_steps`` stands for: a number, or steps in words, the last of which may be
        ``every n``. ``...`` before that goes on by the ratio of the two steps before it.

        Raises:
            ValueError: it stands for nothing.
        """
        if isinstance(given, int) and not isinstance(given, bool) and given >= 1:
            return cls((), given)
        wrong = ValueError(f"every_n_steps must be {VALID}; got {given!r}")
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

    def due(self, step: int) -> bool:
        """Whether a step, counted from 1, is measured."""
        return step in self.first or (self.every > 0 and step % self.every == 0)
