"""The overhead budget: intervals grow until measuring takes no more than a share of training time."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from spectral_monitor.engine.schedule import DEFAULT_SCHEDULE
from spectral_monitor.engine.settings import Settings

MAX_OVERHEAD, FREE_STEPS = 0.01, 100
"""Share of training time that measuring may take by default, and the number of first steps without this limit."""
WINDOW, SLOWEST = 64, 8
"""Number of unmeasured steps whose times are kept. The slowest one in eight is left out of their mean."""
WARM_UP = 2
"""Measured steps that allocate memory and choose kernels: their cost says little about that of later ones."""
DEFAULT_SPACING = 3
"""Steps from a measured one to the next while no cost is known. The first step after it may still wait for its work on
the device; the second one shows the time of an unmeasured step."""


@dataclass
class MeasuredStep:
    """The time of a measured step."""

    step: int
    seconds: float  # from its start to that of the next one; 0 until then
    own: float  # seconds that the monitor itself has counted

    def cost(self, plain: float) -> float:
        """Return the seconds it took longer than an unmeasured step."""
        return max(self.seconds - plain, self.own)


def plain_time(times: Collection[float]) -> float:
    """Return the mean time of unmeasured steps without the slowest, so rather too low; 0 if there are none.

    Example:
        >>> plain_time([1.0, 1.0, 1.0, 30.0]), plain_time([2.0]), plain_time([])
        (1.0, 2.0, 0.0)
    """
    kept = sorted(times)[: max(1, len(times) - -(-len(times) // SLOWEST))]
    return sum(kept) / len(kept) if kept else 0.0


def min_spacing(steps: Sequence[MeasuredStep], measured: int, plain: float, share: float) -> float:
    """Return the least number of steps from the last measured one to the next.

    A measured step that costs as much as ``w * share`` unmeasured ones is followed by ``w`` steps. Steps of the warm-up
    are not; the first step after it makes up for them, at its own cost or at theirs, whichever is less.

    Args:
        steps: all measured steps up to the first one after the warm-up, later the last one only.
        measured: the number of measured steps.
        plain: seconds of an unmeasured step; 0 if unknown.
        share: of training time that measuring may take.

    Example:
        >>> min_spacing([MeasuredStep(700, 1.5, 0.2)], 9, 1.0, 0.01)
        50.0
        >>> warm = [MeasuredStep(1, 101.0, 60.0), MeasuredStep(4, 1.5, 0.2), MeasuredStep(7, 1.5, 0.2)]
        >>> [min_spacing(warm[:n], n, 1.0, 0.01) for n in (1, 2, 3)]
        [3, 3, 144.0]
    """
    if not steps or not plain > 0:
        return DEFAULT_SPACING
    waits = [step.cost(plain) / (share * plain) for step in steps]
    last = waits[-1]
    if measured <= WARM_UP:
        return min(last, DEFAULT_SPACING)
    return max(last, sum(min(wait, last) for wait in waits) - (steps[-1].step - steps[0].step))


def budget_for(settings: Settings, distributed: bool, corrected: bool) -> Budget | None:
    """Return the budget that settings ask for, if any.

    With a correction there is one only on request, because training should not depend on a clock.
    """
    share = settings.max_overhead
    if share != "auto":
        return None if share is None else Budget(share, distributed)
    timed = settings.every_n_steps == DEFAULT_SCHEDULE and not corrected
    return Budget(MAX_OVERHEAD, distributed, FREE_STEPS) if timed else None


class Budget:
    """Decides by a clock which of the due steps are measured.

    Steps are numbered consecutively. If a number jumps, another fit counts from its own start; then the count of steps
    since the last measured one continues.

    All processes decide the same: they use the spacing of rank 0, which it sends at each measured step, and which
    follows from the measured step before.

    Args:
        share: of training time that measuring may take, in (0, 1).
        distributed: whether other processes have to decide the same.
        free: the number of first steps at which everything due is measured; they are not made up for.

    Attributes:
        interval: steps between the last two measured ones, once there are two.
        news: a message about the latest decision; mostly empty.
    """

    def __init__(self, share: float, distributed: bool = False, free: int = 0) -> None:
        self.interval: int | None = None
        self.news = ""
        self._share, self._distributed, self._free = share, distributed, free
        self._times: deque[float] = deque(maxlen=WINDOW)  # of unmeasured steps
        self._steps: list[MeasuredStep] = []  # see :func:`min_spacing`
        self._measured = 0
        self._agreed: float = DEFAULT_SPACING  # the spacing of rank 0
        self._skipped: frozenset[str] = frozenset()  # keys that were due at skipped steps
        self._reported = 0.0  # the spacing in the last message
        self._step: int | None = None
        self._last: int | None = None
        self._began: float | None = None
        self._elapsed = 0.0

    def begin(self, step: int) -> None:
        """Start the clock: a batch of this step begins."""
        if step != self._step:
            self._close()
            if self._last is not None and step not in (self._last, self._last + 1):
                for measured in self._steps:
                    measured.step += step - (self._last + 1)
            self._step, self._last, self._elapsed = step, step, 0.0
        if self._began is None:
            self._began = perf_counter()

    def pause(self) -> None:
        """Stop the clock: what follows (validation, a checkpoint) belongs to no step."""
        if self._began is not None:
            self._elapsed += perf_counter() - self._began
            self._began = None

    def _close(self) -> None:
        self.pause()
        last = self._steps[-1].step if self._steps else None
        if self._step is not None and self._step == last:
            self._steps[-1].seconds = self._elapsed
        elif self._step is not None and (last is None or self._step != last + 1):
            self._times.append(self._elapsed)
        self._step = None

    @property
    def wait(self) -> float:
        """The least number of steps from the last measured one to the next, by this process's clock."""
        return min_spacing(self._steps, self._measured, plain_time(self._times), self._share)

    @property
    def _spacing(self) -> float:
        return self._agreed if self._distributed else self.wait

    def affords(self, step: int) -> bool:
        """Return whether a step may be measured."""
        return not self._steps or step <= self._free or step - self._steps[-1].step >= self._spacing

    def granted(self, step: int, keys: frozenset[str]) -> frozenset[str]:
        """Return the keys that are measured at a step, of due ``keys`` and those of skipped steps; or none."""
        self.news = ""
        if not keys or not self._steps or step <= self._free:
            return keys
        spacing, affordable = self._spacing, self.affords(step)
        if not affordable:
            self._skipped |= keys
        self._report(float(step - self._steps[-1].step) if affordable else spacing, affordable)
        return keys | self._skipped if affordable else frozenset()

    def _report(self, spacing: float, affordable: bool) -> None:
        """Set a message when a step is skipped for the first time, and when the spacing has changed much."""
        if self._measured <= WARM_UP or (affordable and not self._reported):
            return
        if not self._reported or max(spacing / self._reported, self._reported / spacing) > 2:
            plain = plain_time(self._times)
            cost = self._steps[-1].cost(plain) / plain if plain else 0.0
            self._reported = spacing
            self.news = (
                f"step {self._step}: measured steps are now at least {spacing:.0f} steps apart, so that measuring "
                f"takes at most {100 * self._share:.3g} % of training time: the last one took the time of {cost:.2g} "
                "more steps"
            )

    def measured(self, step: int, own: float, agreed: float | None = None) -> None:
        """Note that a step was measured, or at least took the time.

        Args:
            step: its number.
            own: seconds that the monitor itself has counted.
            agreed: :attr:`wait` of rank 0, if there are several processes.
        """
        self.interval = step - self._steps[-1].step if self._steps else None
        self._measured += 1
        before = self._steps if self._measured <= WARM_UP + 1 else []
        self._steps = [*before, MeasuredStep(step, 0.0, own)]
        self._skipped = frozenset()
        if agreed is not None:
            self._agreed = agreed

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain types; close the current step, for the time until the next one belongs to none."""
        self._close()
        return {
            "times": list(self._times),
            "paid": [[step.step, step.seconds, step.own] for step in self._steps],
            "measured": self._measured,
            "apart": self._spacing,
            "passed": sorted(self._skipped),
            "said": self._reported,
            "last": self._last,
        }

    def load_state_dict(self, state: Mapping[str, Any], keys: Collection[str]) -> None:
        """Continue from :meth:`state_dict`; ``keys`` are those that are measured now."""
        self._times = deque(state["times"], maxlen=WINDOW)
        self._steps = [MeasuredStep(*step) for step in state["paid"]]
        self._measured, self._agreed = int(state["measured"]), float(state["apart"])
        self._reported = float(state["said"])
        self._skipped = frozenset(state["passed"]) & frozenset(keys)
        self._step = self._began = None
        self._last = state.get("last")
