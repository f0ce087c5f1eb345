"""Values of the whole network that follow from its loss: the edge of a step, and the distance to a loss of 0.

The edge is the length of a step, relative to the one along the same line at which the loss is lowest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from spectral_monitor.engine.results.raw import Raw
from spectral_monitor.engine.results.reasons import StepContext
from spectral_monitor.layers import Layer

DIGITS = 0.01
"""Limit of the rounding, relative to the edge."""

ACCUMULATED = "gradients are accumulated: the loss after the step is known only for the last micro-batch"
SEVERAL_OPTIMIZERS = "there are several optimizers, and the loss after a step belongs to one of them"
NO_LOSS = (
    "the loss after the step is not known: only some samples were run again (replay_samples=None runs all), or the "
    "call that is run again does not return the loss; in a loop of your own, call probe.report_loss(loss, again=...)"
)
OTHER_LOSS = "the loss is not finite, or the model does not return the whole loss that was trained on"
NO_PREDICTION = "the predicted change of the loss is not known"
STILL = "no change of the loss is predicted"
UPHILL = "the step does not lead downhill on this batch"
FEW_DIGITS = "the change of the loss is too close to its rounding error"
NOT_CONVEX = "the loss does not curve upwards along the step"
NO_RATE = "no learning rate above 0 is known"
NOT_BEGUN = "the loss on which backward was called is not known: pass it to probe.report_loss(loss)"
NO_OUTPUTS = "the gradients of the network's outputs are not known"
NOT_POSITIVE = "the loss is not above 0"
NO_GRADIENT = "the gradients of the network's outputs are 0"


def why_unknown(optimizers: int, facts: StepContext, complete: bool = False) -> str:
    """Return why a step has no edge, whatever the loss after it; empty if it may have one.

    ``complete``: whether the loss after the step is that of all micro-batches.
    """
    if facts.accumulated > 1 and not complete:
        return ACCUMULATED
    return SEVERAL_OPTIMIZERS if optimizers > 1 else ""


def edge(
    summary: Mapping[str, float], loss: float, no_loss: str, optimizers: int, facts: StepContext
) -> tuple[dict[str, float], dict[str, str]]:
    """Return ``edge`` and ``critical_lr``, and the reason for each that is NaN.

    To second order the loss changes by ``p + c / 2`` where ``p = <g, dW>`` is the predicted change and
    ``c = dW^T H dW`` the curvature along the step, so ``edge = -c / p``. A step ``s`` times as long changes it by
    ``s p + s^2 c / 2``, which is lowest at ``s = 1 / edge`` and 0 at ``2 / edge``. The critical learning rate of
    Kalra and others (arXiv 2601.16979) is the one of the second length.

    Args:
        loss: before the step.
        no_loss: why its change is not known, if it is not.
    """
    change, predicted = summary["loss_change"], summary["loss_change_predicted"]
    value = 2 * (1 - change / predicted) if predicted else math.nan
    eps = max(facts.eps.values(), default=0.0) if facts.loss_eps is None else facts.loss_eps
    rounding = eps * abs(loss)
    reason = why_unknown(optimizers, facts, complete=facts.no_loss == "")
    reason = (facts.no_loss or reason) if reason else "" if math.isfinite(change) else no_loss
    if reason:
        return {"edge": math.nan, "critical_lr": math.nan}, {"edge": reason, "critical_lr": reason}
    if not math.isfinite(predicted):
        reason = NO_PREDICTION
    elif predicted == 0:
        reason = STILL
    elif 2 * rounding > DIGITS * abs(value * predicted):
        reason = FEW_DIGITS
    elif predicted > 0:
        reason = UPHILL
    rate = max((lr for lr in facts.lr.values() if lr > 0), default=math.nan)
    no_rate = reason or (NOT_CONVEX if value <= 0 else "") or (NO_RATE if math.isnan(rate) else "")
    values = {"edge": math.nan if reason else value, "critical_lr": math.nan if no_rate else 2 * rate / value}
    return values, {key: text for key, text in (("edge", reason), ("critical_lr", no_rate)) if text}


def loss_distance(loss: float, layers: Sequence[Layer], raw: Raw, facts: StepContext) -> tuple[float, str]:
    """Return the least RMS change of the network's outputs that could bring the loss to 0, or NaN and the reason.

    A loss that is convex in the outputs ``h`` lies above its tangents: with its gradient ``b`` at ``h``,
    ``L(h) - L(h + r) <= |b|_F |r|_F``. If the loss is at least 0, a change ``r`` to a loss of 0 has a length of at
    least ``L / |b|_F``, so over N entries ``rms(r) >= L / (N rms(b))``. The factor of the loss, and whether it is a sum
    or a mean, cancel. The bound is half the RMS of the residuals for squared errors, and their mean for absolute ones.

    ``loss``: with which the backward pass began, before it was divided and scaled.
    """
    if not math.isfinite(loss) or loss <= 0:
        return math.nan, NOT_BEGUN if math.isnan(loss) else NOT_POSITIVE
    squares, entries = 0.0, 0.0
    for i in facts.called:
        if layers[i].info.role != "readout":
            continue
        scalars = raw.get(i, {})
        if i not in facts.with_gradients or not {"b.fro", "b.rows", "h.size", "h.rows"} <= scalars.keys():
            return math.nan, NO_OUTPUTS
        fro, sampled, size, rows = (float(scalars[key][0]) for key in ("b.fro", "b.rows", "h.size", "h.rows"))
        squares += fro**2 * rows / sampled
        entries += size
    if not entries:
        return math.nan, NO_OUTPUTS
    gradient = math.sqrt(squares) * facts.accumulated / facts.loss_scale  # of the loss before it was divided and scaled
    return (loss / (gradient * math.sqrt(entries)), "") if gradient > 0 else (math.nan, NO_GRADIENT)
