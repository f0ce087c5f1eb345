"""Lines on what a correction did, and measurements without what it did on purpose."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from spectral_monitor.condition.findings import ON_TRIAL
from spectral_monitor.correction import Change, Corrector
from spectral_monitor.correction.policies import TRAINED_SHARE
from spectral_monitor.measurement import LOST, SUMMARY, Measurement
from spectral_monitor.reporting.content.headline import names_in
from spectral_monitor.reporting.content.labels import quantity_title

NEARLY = 0.8
"""Once steps have this part of their length, only the return to full length is worth another line."""
NOTABLE = 1.5
"""Smallest factor on a matrix's learning rate, up or down, that is worth a line."""
MAX_UNKNOWN_LOSSES = 3
"""Number of times that the loss after a step may be unknown before a line says so."""
TOO_SMALL = "check that gradients reach all entries of these weights and are larger than the optimizer's eps"
TOO_LARGE = "find out why the gradients of these layers are so large, or clip them"
FURTHER = "wider limits=(low, high) let the correction go further"
"""Advice for learning rates that are held at the limit of a correction."""
MOVES = ("update_natural", "update_norm", "update_fro", "update_ratio", "drift_ratio")
"""Quantities that tell how far a layer has moved."""
GIVEN_UP = (
    "the loss does not follow its gradients, however short the steps are (for example with a straight-through "
    "estimator)"
)


def adapt(
    measurement: Measurement, expected: Mapping[str, float], on_trial: Collection[str], sets_length: bool
) -> Measurement:
    """Return a measurement in which a correction's own doing is no deviation.

    Args:
        expected: layer -> factor by which the correction enlarges its updates on purpose, which is divided out.
        on_trial: layers whose steps are small trials. How far these have moved is left out, if a gradient moved them.
            That no gradient arrives is no matter of the learning rate, and is kept.
        sets_length: whether the correction shortens steps that are too long; these are then left to it.
    """
    values, summary, reasons = dict(measurement.values), dict(measurement.summary), dict(measurement.reasons)
    names = [info.name for info in measurement.layers]
    if sets_length:
        summary.pop("edge", None)
    if "update_natural" in values:
        factors = torch.tensor([expected.get(name, 1.0) for name in names], device="cpu")
        values["update_natural"] = values["update_natural"] / factors
    lost = torch.tensor([measurement.why("contribution", name) == LOST for name in names], device="cpu")
    has_gradient = lost | (values["contribution"] != 0) if "contribution" in values else ~lost
    moved = torch.tensor([name in on_trial for name in names], device="cpu") & has_gradient
    masked = {**dict.fromkeys(MOVES, moved), "contribution": moved & lost}
    for key in values.keys() & masked.keys():
        left_out = masked[key] & ~values[key].isnan()
        values[key] = values[key].masked_fill(left_out, math.nan)
        reasons |= {f"{key}/{name}": ON_TRIAL for name, out in zip(names, left_out.tolist(), strict=True) if out}
    return replace(measurement, values=values, summary=summary, reasons=reasons)


class CorrectionReport:
    """Reports notable corrections in lines.

    Attributes:
        measures_loss: whether the loss after the step is measured in this step.
    """

    def __init__(self, corrector: Corrector) -> None:
        self._corrector = corrector
        self._reported_length = 1.0, False  # last reported factor on the length of steps, and whether it was given up
        self._reported_trained = self._reported_depth = False
        self.measures_loss = False
        self._unknown_losses = 0  # -1 once a loss was known, or after the line

    def resume(self) -> None:
        """Treat the state that the corrector has loaded as reported."""
        self._reported_length = self._corrector.step_length.factor, self._corrector.step_length.given_up
        self._reported_trained, self._reported_depth = bool(self._corrector.wanted.trained), True

    def lines(self, measurement: Measurement, changes: Sequence[Change]) -> Iterator[str]:
        """Yield a line on each notable change."""
        yield from filter(None, (self._trained(measurement), self._depth(), self._unknown(measurement)))
        if line := self._length(measurement):
            yield f"step {measurement.step}: {line}"
        if notable := [change for change in changes if change.factor >= NOTABLE]:
            yield f"step {measurement.step}: {_largest(notable, measurement)}"

    def _trained(self, measurement: Measurement) -> str:
        """Return a line, once, on weights that an earlier training left; else nothing."""
        matrices = [info.name for info in measurement.layers if info.is_dense]
        trained = self._corrector.wanted.trained.intersection(matrices)
        if self._reported_trained or not trained:
            return ""
        self._reported_trained = True
        return (
            f"weights of {len(trained)} of {len(matrices)} matrices look pretrained: their steps are multiplied by "
            f"{TRAINED_SHARE:.2g}; if they were trained for long, set a smaller size"
        )

    def _depth(self) -> str:
        """Return a line, once, on steps that are smaller because the network is deep; else nothing."""
        factor, reason = self._corrector.wanted.depth_rule
        if self._reported_depth or factor == 1:
            return ""
        self._reported_depth = True
        return f"{reason}: steps are multiplied by {factor:.2g}"

    def _unknown(self, measurement: Measurement) -> str:
        """Return a line, once, if the loss after a step is never known; else nothing."""
        if self.measures_loss and self._unknown_losses >= 0:
            is_unknown = math.isnan(measurement.summary.get("loss_change", math.nan))
            self._unknown_losses = self._unknown_losses + 1 if is_unknown else -1
        if self._unknown_losses != MAX_UNKNOWN_LOSSES:
            return ""
        self._unknown_losses = -1
        reason = measurement.why("edge", SUMMARY)
        return f"learning rates are corrected, but steps that are too long cannot be noticed: {reason}"

    def _length(self, measurement: Measurement) -> str:
        """Return a line on a notable change of the length of steps since the last one; else nothing."""
        length, (before, gave_up) = self._corrector.step_length, self._reported_length
        if length.probing:
            return ""
        growth = length.factor / before
        notable = (
            1 / growth >= NOTABLE or (growth >= NOTABLE and length.factor <= NEARLY) or length.factor == 1 > before
        )
        if not notable and length.given_up == gave_up:
            return ""
        self._reported_length = length.factor, length.given_up
        if length.given_up:
            return f"{GIVEN_UP}; steps keep their length"
        if length.factor == 1:
            return "steps have their full size again"
        if length.factor > before:
            return f"steps are lengthened again, to {length.factor:.2g} of their full size"
        reason = f"edge {length.edge:.2g}: shorter steps would have lowered the loss more"
        if not math.isfinite(measurement.summary["edge"]):
            reason = "this step goes uphill on its own batch, because earlier steps went past the lowest point"
        return f"steps are too long ({reason}); they are shortened to {length.factor:.2g} of their full size"


def _largest(changes: Sequence[Change], measurement: Measurement) -> str:
    """Return a line on the number of corrected learning rates and the largest change."""
    largest = max(changes, key=lambda change: change.factor)
    name, count = names_in(measurement, [largest.layer]), len(changes)
    begin = f"{count} learning rates corrected; the largest change: {name}" if count > 1 else f"{name}: learning rate"
    return f"{begin} x {largest.before:.3g} -> x {largest.after:.3g} ({_sizes(largest)})"


def _sizes(change: Change) -> str:
    return f"the {quantity_title(change.quantity)} is {change.observed:.2g}, should be {change.wanted:.2g}"


def limits_reached(changes: Sequence[Change], measurement: Measurement) -> str:
    """Return a sentence on learning rates that are at the limit of the correction."""
    change = changes[0]
    names = names_in(measurement, [each.layer for each in changes])
    return (
        f"{names}: learning rates are held at the limit of the correction (x {change.after:.3g}), although "
        f"{_sizes(change)}: {(TOO_SMALL if change.observed < change.wanted else TOO_LARGE)}; {FURTHER}"
    )
