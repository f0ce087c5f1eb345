"""The highest learning rate of every parameter group: the current rate over it is the shape of the schedule."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from spectral_monitor.condition.optimizers.plans import highest_rate, number

NAMES = ("max_lr", "initial_lr")
"""Options in which schedules note the learning rate that they start from or rise to."""
CONSTANT = 0.5
"""An unscheduled learning rate counts as this part of a peak: the average of one that decays."""

FALLEN, MISSED = 0.9, 0.25
"""A learning rate below the first part of its highest value, where that is below the second part of the named peak,
will not reach that peak: warm-ups rise, and restarts begin with a peak.
"""


@dataclass
class Peak:
    """The highest learning rate of a group."""

    reached: float  # the highest rate so far
    first: float  # the first rate
    scheduled: bool  # whether a schedule is known: the group names a peak, or its rate has changed
    named: float = 0.0  # the peak that the group names, or its schedule plans
    current: float = 0.0  # the newest rate

    @property
    def is_missed(self) -> bool:
        """Return whether the learning rate falls again far below the named peak."""
        return self.current < FALLEN * self.reached and self.reached < MISSED * self.named

    @property
    def highest(self) -> float:
        """The highest rate, reached or named."""
        return max(self.reached, self.named)


class Peaks:
    """Peaks of parameter groups: the planned one, else ``max_lr`` or ``initial_lr``; or a higher rate so far.

    They are stored by parameter, for optimizers make new groups when they load a state.

    Example:
        >>> import torch
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> peaks = Peaks()
        >>> [peaks.part({"params": [weight], "lr": lr}) * lr for lr in (0.1, 0.1, 0.4, 0.2)]
        [0.5, 0.5, 1.0, 0.5]
    """

    def __init__(self) -> None:
        self._peaks: dict[nn.Parameter, Peak] = {}
        self._planned: dict[nn.Parameter, float] = {}

    def plan(self, parameters: Iterable[nn.Parameter], highest: float) -> None:
        """Take the highest learning rate that the schedule of a group reaches; the group's options no longer count."""
        self._planned.update(dict.fromkeys(parameters, highest))

    def begin(self) -> None:
        """Forget learning rates from before training: a schedule may have changed them since."""
        self._peaks.clear()

    def see(self, group: Mapping[str, Any]) -> Peak:
        """Return the peak of a group, updated with its current learning rate."""
        parameters, lr = group["params"], number(group.get("lr"), 0.0)
        peak = self._peaks.get(parameters[0]) if parameters else None
        if peak is None:
            peak = Peak(0.0, lr, any(name in group for name in NAMES))
            self._peaks.update(dict.fromkeys(parameters, peak))
        planned = self._planned.get(parameters[0]) if parameters else None
        peak.scheduled = peak.scheduled or planned is not None or lr != peak.first
        peak.reached, peak.current = max(peak.reached, lr), lr
        peak.named = max(peak.named, highest_rate(group)) if planned is None else planned
        return peak

    def part(self, group: Mapping[str, Any]) -> float:
        """Return the factor that turns the learning rate of a group into a part of its peak."""
        peak = self.see(group)
        if not peak.highest > 0:
            return 1.0
        return (1.0 if peak.scheduled else CONSTANT) / peak.highest

    def meaning(self, groups: Iterable[Mapping[str, Any]], size: float, sizes: Iterable[float]) -> str:
        """Return, in a sentence, which size of steps the peak of the learning rates stands for.

        ``size``: as the user has set it; ``sizes``: of steps at the peak, under each of the optimizers.
        """
        peaks = [self.see(group) for group in groups if group["params"]]
        rates = [peak.highest for peak in peaks if peak.highest > 0]
        if not rates:
            return "every learning rate is 0: nothing is corrected until you set one"
        shown = " to ".join(f"{rate:.3g}" for rate in sorted({min(rates), max(rates)}))
        scheduled = any(peak.scheduled for peak in peaks)
        part = 1.0 if scheduled else CONSTANT
        changes = " to ".join(dict.fromkeys(f"{100 * part * each:.2g}" for each in sizes))
        kind = "peak" if scheduled else "constant"
        return (
            f"the {kind} learning rate ({shown}) counts as size {part * size:.3g}: a step then "
            f"changes a layer's outputs by about {changes} %" + ("; the schedule keeps its shape" if scheduled else "")
        )

    def unreached(self, groups: Iterable[Mapping[str, Any]]) -> str:
        """Return a sentence if a learning rate falls again far below what counts as its peak; else an empty one."""
        low = next((peak for peak in map(self.see, groups) if peak.is_missed), None)
        if low is None:
            return ""
        reached, named = low.reached, low.named
        return (
            f"a learning rate reached only {reached:.3g} before it fell, but {named:.3g} counts as its peak, so steps "
            f"have at most {reached / named:.2g} of their size; set initial_lr of its group to {reached:.3g}, or call "
            "probe.report_schedule(scheduler, steps) in a loop of your own"
        )

    def state(self, parameter: nn.Parameter) -> list[Any]:
        """Return the peak of the group that holds a parameter, as plain values; nothing if there is none yet."""
        return list(astuple(self._peaks[parameter])) if parameter in self._peaks else []

    def load(self, parameters: Iterable[nn.Parameter], state: list[Any]) -> None:
        """Go on from :meth:`state`."""
        if state:
            self._peaks.update({p: Peak(*state) for p in parameters})


def share_of(groups: Iterable[Mapping[str, Any]], parameters: Collection[nn.Parameter], predicate: str) -> str:
    """Return, as the end of a sentence, how many trained parameters are among the given ones; empty if none is.

    ``predicate``: the end of the sentence, such as "are left out".
    """
    trained = [p for group in groups for p in group["params"] if p.requires_grad]
    members = [p for p in trained if p in parameters]
    if not members:
        return ""
    part = _entries(members) / max(_entries(trained), 1)
    return f"; {len(members)} of {len(trained)} parameters, with {part:.0%} of all entries, {predicate}"


def _entries(parameters: Iterable[nn.Parameter]) -> int:
    """Return the number of entries; parameters of lazy modules have none before the first forward."""
    return sum(p.numel() for p in parameters if not is_lazy(p))
