"""The least distance from the outputs to those at which the loss is 0, whatever the loss function."""

from __future__ import annotations

import math
from collections.abc import Sequence

from spectral_monitor.engine.results.raw import Raw
from spectral_monitor.engine.results.reasons import StepContext
from spectral_monitor.layers import Layer

NO_LOSS = "the loss that the backward pass began with is not known: probe.report_loss(loss) tells it"
NO_OUTPUTS = "the gradients of the network's outputs are not known"
NOT_POSITIVE = "the loss is not above 0"
NO_GRADIENT = "the gradients of the network's outputs are 0"


def loss_distance(loss: float, layers: Sequence[Layer], raw: Raw, facts: StepContext) -> tuple[float, str]:
    """Return the least RMS change of the network's outputs that could bring the loss to 0, or NaN and the reason.

    A loss that is convex in the outputs ``h`` lies above its tangents: with ``b`` its gradient there,
    ``L(h) - L(h + r) <= |b|_F |r|_F``. Where it is at least 0, ``r`` is as long as ``L / |b|_F``, so that over N
    entries ``rms(r) >= L / (N rms(b))``. The factor of the loss, and whether it is a sum or a mean, cancel. It is half
    the RMS of the residuals for squared errors, and their mean for absolute ones.

    Args:
        loss: that the backward pass began with, before it was divided and scaled.
        layers: of the network; outputs are those of its readouts.
        raw: the numbers.
        facts: of the step.
    """
    if not math.isfinite(loss) or loss <= 0:
        return math.nan, NO_LOSS if math.isnan(loss) else NOT_POSITIVE
    squares, entries = 0.0, 0.0
    for i in facts.called:
        if layers[i].info.role != "readout":
            continue
        some = raw.get(i, {})
        if i not in facts.graded or not {"b.fro", "b.rows", "h.size", "h.rows"} <= some.keys():
            return math.nan, NO_OUTPUTS
        fro, seen, size, rows = (float(some[key][0]) for key in ("b.fro", "b.rows", "h.size", "h.rows"))
        squares += fro**2 * rows / seen  # of some rows only
        entries += size
    if not entries:
        return math.nan, NO_OUTPUTS
    gradient = math.sqrt(squares) * facts.accumulated / facts.loss_scale  # of the loss as it was
    return (loss / (gradient * math.sqrt(entries)), "") if gradient > 0 else (math.nan, NO_GRADIENT)
