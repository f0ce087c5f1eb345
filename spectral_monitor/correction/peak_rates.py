"""The highest learning rate of every parameter group: beside it, that of now is the shape of the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from spectral_monitor.condition.optimizers.plans import highest_rate, number

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
    """The highest learning rate of a group."""

    seen: float  # that it had so far
    first: float  # that it had
    scheduled: bool  # whether something schedules it: it names one, or was another before
    named: float = 0.0  # that it names, or its schedule plans
    now: float = 0.0  # that it has

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
        """Take the highest learning rate that the schedule of a group comes to; its options no longer count."""
        self._planned.update(dict.fromkeys(parameters, highest))

    def begin(self) -> None:
        """Forget learning rates that groups had before training: a schedule may have come since, and changed them."""
        self._peaks.clear()

    def see(self, group: Mapping[str, Any]) -> Peak:
        """Return what is known of a group, the learning rate of now included."""
        parameters, lr = group["params"], number(group.get("lr"), 0.0)
        found = self._peaks.get(parameters[0]) if parameters else None
        if found is None:
            found = Peak(0.0, lr, any(name in group for name in NAMES))
            self._peaks.update(dict.fromkeys(parameters, found))
        planned = self._planned.get(parameters[0]) if parameters else None
        found.scheduled = found.scheduled or planned is not None or lr != found.first
        found.seen, found.now = max(found.seen, lr), lr
        found.named = max(found.named, highest_rate(group)) if planned is None else planned
        return found

    def part(self, group: Mapping[str, Any]) -> float:
        """Return what turns the learning rate of a group into the part of its peak."""
        peak = self.see(group)
        if not peak.highest > 0:
            return 1.0
        return (1.0 if peak.scheduled else CONSTANT) / peak.highest

    def meaning(self, groups: Iterable[Mapping[str, Any]], size: float, sizes: Iterable[float]) -> str:
        """Return, in a sentence, what learning rates mean where their peak counts as steps of a size.

        Args:
            groups: of the optimizers.
            size: as the user has set it.
            sizes: that steps at the peak have under each of the optimizers.
        """
        peaks = [self.see(group) for group in groups if group["params"]]
        rates = [peak.highest for peak in peaks if peak.highest > 0]
        if not rates:
            return "every learning rate is 0: nothing is corrected until one is set"
        some = " to ".join(f"{rate:.3g}" for rate in sorted({min(rates), max(rates)}))
        scheduled = any(peak.scheduled for peak in peaks)
        part = 1.0 if scheduled else CONSTANT
        changes = " to ".join(dict.fromkeys(f"{100 * part * each:.2g}" for each in sizes))
        kind = "peak" if scheduled else "constant"
        return (
            f"the {kind} learning rate ({some}) counts as size {part * size:.3g}: a step then "
            f"changes a layer's outputs by about {changes} %" + ("; the schedule keeps its shape" if scheduled else "")
        )

    def unreached(self, groups: Iterable[Mapping[str, Any]]) -> str:
        """Return, in a sentence, that a learning rate falls again far below what counts as its peak; empty if not."""
        low = next((peak for peak in map(self.see, groups) if peak.is_missed), None)
        if low is None:
            return ""
        return (
            f"a learning rate falls again after {low.seen:.3g}, but {low.named:.3g} counts as its peak: steps have at "
            f"most {low.seen / low.named:.2g} of their size; set initial_lr of its group to {low.seen:.3g}, or call "
            "probe.report_schedule(scheduler, steps) in a loop of your own"
        )

    def state(self, parameter: nn.Parameter) -> list[Any]:
        """Return what is known of the group that holds a parameter, as plain values; nothing if it was not seen."""
        return list(astuple(self._peaks[parameter])) if parameter in self._peaks else []

    def load(self, parameters: Iterable[nn.Parameter], state: list[Any]) -> None:
        """Go on from what :meth:`state` gave."""
        if state:
            self._peaks.update({p: Peak(*state) for p in parameters})


def share_of(groups: Iterable[Mapping[str, Any]], some: Callable[[nn.Parameter], bool], what: str) -> str:
    """Return, as the end of a sentence, how many parameters are of a kind; empty if none is.

    Args:
        groups: of the optimizers.
        some: whether a parameter is of that kind.
        what: what is said of them.
    """
    trained = [p for group in groups for p in group["params"] if p.requires_grad]
    kind = list(filter(some, trained))
    if not kind:
        return ""
    part = _entries(kind) / max(_entries(trained), 1)
    return f"; {len(kind)} of {len(trained)} parameters, with {part:.0%} of all entries, {what}"


def _entries(parameters: Iterable[nn.Parameter]) -> int:
    """Return how many there are; those of lazy modules come with the first forward."""
    return sum(p.numel() for p in parameters if not is_lazy(p))
