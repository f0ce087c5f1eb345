"""The overhead budget: intervals are stretched until measuring takes no more than a share of training time."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from spectral_monitor.engine.schedule import DEFAULT_SCHEDULE
from spectral_monitor.engine.settings import Settings

MAX_OVERHEAD, FREE_STEPS = 0.01, 100
"""Share of training time that measuring may take by default, and the first steps that it does not hold for."""
WINDOW, SLOWEST = 64, 8
"""Unmeasured steps whose times are kept; of these one in eight, the slowest ones, is left out of their mean."""
WARM_UP = 2
"""Measured steps of a run in which memory is set aside and kernels are chosen: their cost says little of later ones."""
APART = 3
"""Steps from a measured one to the next while no cost is known: the one after it may still have to wait for its work on
the device, and the next one shows what an unmeasured step takes."""


@dataclass
class Paid:
    """A measured step."""

    step: int  # which
    seconds: float  # from its start to that of the next one; 0 while that is not over
    own: float  # seconds the monitor itself has counted in it

    def cost(self, plain: float) -> float:
        """Seconds it took more than an unmeasured one does."""
        return max(self.seconds - plain, self.own)


def plain_time(times: Collection[float]) -> float:
    """Mean of the times of unmeasured steps, without the slowest, 0 if there are none; so it errs on the low side.

    Example:
        >>> plain_time([1.0, 1.0, 1.0, 30.0]), plain_time([2.0]), plain_time([])
        (1.0, 2.0, 0.0)
    """
    kept = sorted(times)[: max(1, len(times) - -(-len(times) // SLOWEST))]
    return sum(kept) / len(kept) if kept else 0.0


def steps_apart(paid: Sequence[Paid], measured: int, plain: float, share: float) -> float:
    """Steps from the last measured one to the next, at least.

    After each step that costs as much as ``w`` times ``1 / share`` unmeasured ones, ``w`` steps pass. Those of the
    warm-up are not waited for; after the first step behind it those ``w`` that they would have been worth at its own
    cost, or at theirs if that was less, are made up for.

    Args:
        paid: up to the end of the warm-up and one more all measured steps, later the last one.
        measured: how many steps were measured.
        plain: seconds of an unmeasured step; 0 if unknown.
        share: of training time that measuring may take.

    Example:
        >>> steps_apart([Paid(700, 1.5, 0.2)], 9, 1.0, 0.01)
        50.0
        >>> warm = [Paid(1, 101.0, 60.0), Paid(4, 1.5, 0.2), Paid(7, 1.5, 0.2)]
        >>> [steps_apart(warm[:n], n, 1.0, 0.01) for n in (1, 2, 3)]
        [3, 3, 144.0]
    """
    if not paid or not plain > 0:
        return APART
    waits = [one.cost(plain) / (share * plain) for one in paid]
    last = waits[-1]
    if measured <= WARM_UP:
        return min(last, APART)
    return max(last, sum(min(wait, last) for wait in waits) - (paid[-1].step - paid[0].step))


def budget_for(settings: Settings, several: bool, corrected: bool) -> Budget | None:
    """Return the budget that settings ask for, if any.

    A correction has none but on demand: training must not depend on a clock.
    """
    share = settings.max_overhead
    if share != "auto":
        return None if share is None else Budget(share, several)
    timed = settings.every_n_steps == DEFAULT_SCHEDULE and not corrected
    return Budget(MAX_OVERHEAD, several, FREE_STEPS) if timed else None


class Budget:
    """Decides which of the steps that are due are measured, by a clock.

    Steps begin one after the other. Where they do not, another fit counts from its own start, and the steps since the
    last measured one go on there.

    Several processes decide alike: what counts is what the first one had to say at the last measured step, which is of
    the measured step before that one.

    Args:
        share: of training time that measuring may take, in (0, 1).
        several: whether other processes have to decide the same.
        free: the first steps, at which everything that is due is measured; they are not made up for.

    Attributes:
        interval: steps between the last two measured ones, once there are two.
        news: what is to be said of the latest decision; mostly nothing.
    """

    def __init__(self, share: float, several: bool = False, free: int = 0) -> None:
        self.interval: int | None = None
        self.news = ""
        self._share, self._several, self._free = share, several, free
        self._times: deque[float] = deque(maxlen=WINDOW)
        self._paid: list[Paid] = []
        self._measured = 0
        self._agreed: float = APART
        self._passed: frozenset[str] = frozenset()
        self._said = 0.0
        self._step: int | None = None
        self._last: int | None = None
        self._began: float | None = None
        self._elapsed = 0.0

    def begin(self, step: int) -> None:
        """Now begins the batch that leads to a step, or another batch for the same one."""
        if step != self._step:
            self._close()
            if self._last is not None and step not in (self._last, self._last + 1):
                for one in self._paid:
                    one.step += step - (self._last + 1)
            self._step, self._last, self._elapsed = step, step, 0.0
        if self._began is None:
            self._began = perf_counter()

    def pause(self) -> None:
        """Stop the clock: what comes now (validation, a checkpoint) is no part of any step."""
        if self._began is not None:
            self._elapsed += perf_counter() - self._began
            self._began = None

    def _close(self) -> None:
        self.pause()
        last = self._paid[-1].step if self._paid else None
        if self._step is not None and self._step == last:
            self._paid[-1].seconds = self._elapsed
        elif self._step is not None and (last is None or self._step != last + 1):
            self._times.append(self._elapsed)
        self._step = None

    @property
    def wait(self) -> float:
        """Steps from the last measured one to the next, at least, by this process's clock."""
        return steps_apart(self._paid, self._measured, plain_time(self._times), self._share)

    @property
    def _apart(self) -> float:
        return self._agreed if self._several else self.wait

    def affords(self, step: int) -> bool:
        """Return whether a step may be measured."""
        return not self._paid or step <= self._free or step - self._paid[-1].step >= self._apart

    def granted(self, step: int, keys: frozenset[str]) -> frozenset[str]:
        """Return what is measured at a step: what is due, and what was due at skipped steps; or nothing."""
        self.news = ""
        if not keys or not self._paid or step <= self._free:
            return keys
        apart, now = self._apart, self.affords(step)
        if not now:
            self._passed |= keys
        self._tell(float(step - self._paid[-1].step) if now else apart, now)
        return keys | self._passed if now else frozenset()

    def _tell(self, apart: float, now: bool) -> None:
        """Say so when steps are passed over for the first time, and when the interval has become another one."""
        if self._measured <= WARM_UP or (now and not self._said):
            return
        if not self._said or max(apart / self._said, self._said / apart) > 2:
            plain = plain_time(self._times)
            cost = self._paid[-1].cost(plain) / plain if plain else 0.0
            self._said = apart
            self.news = (
                f"step {self._step}: measured steps are now {apart:.0f} steps apart or more, to take no more than "
                f"{self._share:.3g} of training time: the last one took {cost:.2g} unmeasured steps longer"
            )

    def measured(self, step: int, own: float, agreed: float | None = None) -> None:
        """Note that a step was measured, or paid for.

        Args:
            step: which.
            own: seconds the monitor has counted itself.
            agreed: what :attr:`wait` was for the first of several processes, as all were told.
        """
        self.interval = step - self._paid[-1].step if self._paid else None
        self._measured += 1
        before = self._paid if self._measured <= WARM_UP + 1 else []
        self._paid = [*before, Paid(step, 0.0, own)]
        self._passed = frozenset()
        if agreed is not None:
            self._agreed = agreed

    def state_dict(self) -> dict[str, Any]:
        """Plain types; the time until the next step is no part of any."""
        self._close()
        return {
            "times": list(self._times),
            "paid": [[one.step, one.seconds, one.own] for one in self._paid],
            "measured": self._measured,
            "apart": self._apart,
            "passed": sorted(self._passed),
            "said": self._said,
            "last": self._last,
        }

    def load_state_dict(self, state: Mapping[str, Any], keys: Collection[str]) -> None:
        """Go on from what :meth:`state_dict` gave; ``keys`` are those that are measured now."""
        self._times = deque(state["times"], maxlen=WINDOW)
        self._paid = [Paid(*one) for one in state["paid"]]
        self._measured, self._agreed, self._said = int(state["measured"]), float(state["apart"]), float(state["said"])
        self._passed = frozenset(state["passed"]) & frozenset(keys)
        self._step = self._began = None
        self._last = state.get("last")
