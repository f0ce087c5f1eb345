"""Lines that say what a correction did."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from spectral_monitor.correction import Change, Corrector
from spectral_monitor.correction.policies import TRAINED
from spectral_monitor.measurement import SUMMARY, Measurement
from spectral_monitor.reporting.content.headline import names_in

NEARLY = 0.8
"""Part of their length from which on only the whole of it is worth a line."""
TOLD = 1.5
"""Factor on a matrix's learning rate, either way, from which a correction says so in a line."""
BLIND = 3
"""Looks at the loss that saw nothing, after which that is said."""
TOO_SMALL = "see whether gradients reach all entries of these weights, and are larger than the optimizer's eps"
TOO_LARGE = "see what makes the gradients of these layers so large, and clip them"
FURTHER = "wider limits=(low, high) let the correction go further"
"""What to do where learning rates are held at the limit of a correction."""
GIVEN_UP = "the loss does not follow its gradients, however short steps are (a straight-through estimator, say)"


class CorrectionReport:
    """Tells what a corrector did at each measurement, as far as it is worth a line.

    Attributes:
        looks: whether the loss after the step is looked at in this step.
    """

    def __init__(self, corrector: Corrector) -> None:
        self._corrector = corrector
        self._length_told = 1.0, False  # the factor on the length of steps, and whether it was given up
        self._trained_told = False
        self.looks, self._blind = False, 0  # looks that saw nothing; -1 once one saw something, or it was said

    def resume(self) -> None:
        """Take what the corrector has loaded for told."""
        self._length_told = self._corrector.step_length.factor, self._corrector.step_length.given_up
        self._trained_told = bool(self._corrector.wanted.trained)

    def lines(self, measurement: Measurement, changes: Sequence[Change]) -> Iterator[str]:
        """Yield what is worth a line; of learning rates those of matrices, for the others swing and hardly matter."""
        if said := self._trained(measurement):
            yield said
        if said := self._unseen(measurement):
            yield said
        if said := self._length(measurement):
            yield f"step {measurement.step}: {said}"
        if notable := [change for change in changes if change.factor >= TOLD]:
            yield f"step {measurement.step}: {_most(notable, measurement)}"

    def _trained(self, measurement: Measurement) -> str:
        """Return, once, whose weights an earlier training left, and what follows; empty else."""
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

    def _unseen(self, measurement: Measurement) -> str:
        """Return that the loss after a step is never known, and why, when a few looks have shown it; empty else."""
        if self.looks and self._blind >= 0:
            self._blind = self._blind + 1 if math.isnan(measurement.summary.get("loss_change", math.nan)) else -1
        if self._blind != BLIND:
            return ""
        self._blind = -1
        why = measurement.why("edge", SUMMARY)
        return f"steps that go too far are not noticed: {why}; learning rates are corrected all the same"

    def _length(self, measurement: Measurement) -> str:
        """Return what became of the length of steps since that was said last; empty if it is much the same."""
        length, (before, gave_up) = self._corrector.step_length, self._length_told
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
    """Return how many learning rates were corrected, and the largest of the changes."""
    most = max(changes, key=lambda change: change.factor)
    name, count = names_in(measurement, [most.layer]), len(changes)
    begin = f"{count} learning rates corrected; the largest change: {name}" if count > 1 else f"{name}: learning rate"
    return f"{begin} x {most.before:.3g} -> x {most.after:.3g} ({_sizes(most)})"


def _sizes(change: Change) -> str:
    return f"{change.quantity} is {change.observed:.2g}, should be {change.wanted:.2g}"


def held(changes: Sequence[Change], measurement: Measurement) -> str:
    """Return whose learning rates are as far from the user's as a correction may take them, and what to do."""
    change = changes[0]
    names = names_in(measurement, [each.layer for each in changes])
    return (
        f"{names}: learning rates are held at the limit of the correction (x {change.after:.3g}), though "
        f"{_sizes(change)}: {TOO_SMALL if change.observed < change.wanted else TOO_LARGE}; {FURTHER}"
    )
