"""Lines that say what a correction did."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from spectral_monitor.correction import Change, Corrector
from spectral_monitor.correction.policies import TRAINED
from spectral_monitor.correction.wanted import BRANCHES
from spectral_monitor.measurement import SUMMARY, Measurement
from spectral_monitor.reporting.content.headline import names_in

NEARLY = 0.8
"""Above this part of their length, only a return to full length is worth a line."""
TOLD = 1.5
"""Smallest factor on a matrix's learning rate, up or down, that is worth a line."""
BLIND = 3
"""Number of times that the loss after a step must be unknown before a line says so."""
TOO_SMALL = "see whether gradients reach all entries of these weights, and are larger than the optimizer's eps"
TOO_LARGE = "see what makes the gradients of these layers so large, and clip them"
FURTHER = "wider limits=(low, high) let the correction go further"
"""Advice for learning rates that are held at the limit of a correction."""
GIVEN_UP = "the loss does not follow its gradients, however short steps are (a straight-through estimator, say)"


class CorrectionReport:
    """Reports notable corrections in lines.

    Attributes:
        looks: whether the loss after the step is measured in this step.
    """

    def __init__(self, corrector: Corrector) -> None:
        self._corrector = corrector
        self._length_told = 1.0, False  # last reported factor on the length of steps, and whether it was given up
        self._trained_told = self._depth_told = False
        self.looks = False
        self._blind = 0  # times that the loss was unknown; -1 once it was known, or that was reported

    def resume(self) -> None:
        """Treat the state that the corrector has loaded as reported."""
        self._length_told = self._corrector.step_length.factor, self._corrector.step_length.given_up
        self._trained_told, self._depth_told = bool(self._corrector.wanted.trained), True

    def lines(self, measurement: Measurement, changes: Sequence[Change]) -> Iterator[str]:
        """Yield a line on each notable change."""
        yield from filter(None, (self._trained(measurement), self._depth(), self._unseen(measurement)))
        if said := self._length(measurement):
            yield f"step {measurement.step}: {said}"
        if notable := [change for change in changes if change.factor >= TOLD]:
            yield f"step {measurement.step}: {_most(notable, measurement)}"

    def _trained(self, measurement: Measurement) -> str:
        """Return a line, once, on weights that an earlier training left; else nothing."""
        trained = self._corrector.wanted.trained
        matrices = [info.name for info in measurement.layers if info.is_dense]
        found = [name for name in matrices if name in trained]
        if self._trained_told or not found:
            return ""
        self._trained_told = True
        return (
            f"weights of {len(found)} of {len(matrices)} matrices look trained: they take {TRAINED:.2g} of the steps; "
            "after a long training take a smaller size"
        )

    def _depth(self) -> str:
        """Return a line, once, on steps that are smaller because the network is deep; else nothing."""
        wanted = self._corrector.wanted
        if self._depth_told or wanted.of_depth == 1:
            return ""
        self._depth_told = True
        seen = f"{wanted.depth.matrices} matrices stand in a row, without residual connections or batch norms"
        if wanted.depth.branches > BRANCHES:
            seen = f"what {wanted.depth.branches} residual branches change adds up"
        return f"{seen}: steps have {wanted.of_depth:.2g} of their size"

    def _unseen(self, measurement: Measurement) -> str:
        """Return a line, once, if the loss after a step is never known; else nothing."""
        if self.looks and self._blind >= 0:
            self._blind = self._blind + 1 if math.isnan(measurement.summary.get("loss_change", math.nan)) else -1
        if self._blind != BLIND:
            return ""
        self._blind = -1
        why = measurement.why("edge", SUMMARY)
        return f"steps that go too far are not noticed: {why}; learning rates are corrected all the same"

    def _length(self, measurement: Measurement) -> str:
        """Return a line on a notable change of the length of steps since the last one; else nothing."""
        length, (before, gave_up) = self._corrector.step_length, self._length_told
        if length.probing:
            return ""
        longer = length.factor / before
        moved = 1 / longer >= TOLD or (longer >= TOLD and length.factor <= NEARLY) or length.factor == 1 > before
        if not moved and length.given_up == gave_up:
            return ""
        self._length_told = length.factor, length.given_up
        if length.given_up:
            return f"{GIVEN_UP}; steps keep their length"
        if length.factor == 1:
            return "steps have their full size again"
        if length.factor > before:
            return f"steps are made longer again: {length.factor:.2g} of their size"
        why = f"edge {length.edge:.2g}: shorter ones would have lowered the loss further"
        if not math.isfinite(measurement.summary["edge"]):
            why = "this one goes uphill on its own batch: those before went past the lowest point"
        return f"steps go too far ({why}); they are shortened to {length.factor:.2g} of their size"


def _most(changes: Sequence[Change], measurement: Measurement) -> str:
    """Return a line on the number of corrected learning rates and the largest change."""
    most = max(changes, key=lambda change: change.factor)
    name, count = names_in(measurement, [most.layer]), len(changes)
    begin = f"{count} learning rates corrected; the largest change: {name}" if count > 1 else f"{name}: learning rate"
    return f"{begin} x {most.before:.3g} -> x {most.after:.3g} ({_sizes(most)})"


def _sizes(change: Change) -> str:
    return f"{change.quantity} is {change.observed:.2g}, should be {change.wanted:.2g}"


def held(changes: Sequence[Change], measurement: Measurement) -> str:
    """Return a sentence on learning rates that are at the limit of the correction."""
    change = changes[0]
    names = names_in(measurement, [each.layer for each in changes])
    return (
        f"{names}: learning rates are held at the limit of the correction (x {change.after:.3g}), though "
        f"{_sizes(change)}: {TOO_SMALL if change.observed < change.wanted else TOO_LARGE}; {FURTHER}"
    )
