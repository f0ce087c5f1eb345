"""The movement of a network: whether any parameter moves, and why not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from spectral_monitor.condition.findings import COMPILED_STEP, DIVIDED, NO_STEP, NOT_ZERO, ON_TRIAL, Finding
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.optimizers.plans import FADED
from spectral_monitor.condition.row import Row
from spectral_monitor.condition.verdict import NETWORK
from spectral_monitor.measurement import NOT_FINITE, UNUSED, Measurement

FROZEN = "every layer is frozen"
GRADIENTS_NOT_FINITE = "gradients_not_finite"
"""Summary value, for the judge alone: 1 if no optimizer stepped and some gradient is NaN or inf."""
LOOK_FOR_NAN = "look for NaN or inf in the data and the loss"
_MOVES = ("update_fro", "update_natural", "update_norm", "update_ratio")


def why_still(network: Network) -> str:
    """Return the reason why no layer can move; empty if some can."""
    rows = [row for row in network.rows if not row.settings.frozen]
    if not rows:
        return FROZEN
    if network.top_lr == 0:
        return "every learning rate is 0"
    moved = any(row.get(key) > 0 for row in rows for key in _MOVES)  # by an optimizer whose settings are unknown
    if not moved and all(row.settings.owner < 0 and math.isnan(row.lr) for row in rows):
        return "no optimizer holds its parameters"
    return ""


def movement_of(measurement: Measurement, network: Network) -> Finding | None:
    """Return a finding on the largest update, which is 0 if nothing moves.

    It is also 0 if only biases and gains move because matrices cannot. In a network that was trained before, that is a
    method rather than a mistake.

    Returns:
        ``None`` if updates were not measured, or learning rates are next to 0 by schedule.
    """
    keys = [key for key in _MOVES if key in measurement.values]
    if not keys or not network.rows:
        return None
    faded = [row.to_peak >= 1 / FADED for row in network.moved_by_rate]
    if network.top_lr > 0 and faded and all(faded):
        return None
    matrices, vectors = _largest_update(network.rows, keys), _largest_update(network.vectors.values(), keys)
    reasons = {measurement.why(keys[0], row.name) for row in network.rows}
    if reasons <= {COMPILED_STEP, DIVIDED} or ON_TRIAL in reasons:
        return None
    no_step = _why_no_step(measurement) if reasons == {NO_STEP} else ""
    cannot_move = why_still(network)
    if cannot_move == FROZEN and any(row.settings.elsewhere for row in network.rows):
        return None
    reason = cannot_move or no_step or _why_no_update(measurement, network, keys)
    moved = no_step and any(row.get("drift_ratio") > 0 for row in network.rows)
    largest, observation = max(matrices, vectors), "no update is seen" if moved else "no parameter moves"
    if largest > matrices == 0 and cannot_move and (cannot_move != FROZEN or network.fresh):
        largest, observation = 0.0, "no matrix moves, only biases and gains do"
    against = f"{observation}: {reason}"
    return Finding("nothing_trains", NETWORK, keys[0], min(largest, 1e300), 1.0, NOT_ZERO, against=against)


def _why_no_step(measurement: Measurement) -> str:
    """Return the reason why no optimizer stepped, as far as it is known."""
    if measurement.summary.get(GRADIENTS_NOT_FINITE, 0.0) > 0:
        return f"{NO_STEP}, and gradients are NaN or inf, so a gradient scaler or the loop skips it: {LOOK_FOR_NAN}"
    return f"{NO_STEP} that could be seen"


def _why_no_update(measurement: Measurement, network: Network, keys: Sequence[str]) -> str:
    """Return the reason why no update is above 0 although optimizers stepped, as far as it is known."""
    rows = [row for row in network.rows if not row.settings.frozen]
    reasons = {measurement.why(keys[0], row.name) for row in rows if math.isnan(row.get(keys[0]))}
    if reasons == {UNUSED} and all(math.isnan(row.get(keys[0])) for row in rows):
        return "no gradient arrives: the loss does not depend on any of them, or outputs are detached"
    if NOT_FINITE in reasons:
        return f"updates are NaN or inf: {LOOK_FOR_NAN}"
    measured = [row for row in rows if not math.isnan(row.get("contribution"))]
    if measured and not any(row.has_gradient for row in measured):
        return (
            "every gradient is 0: the loss does not change with the outputs, as where a ReLU or a clamp after them is "
            "closed for all samples"
        )
    return "every update is 0, NaN or skipped"


def _largest_update(rows: Iterable[Row], keys: Sequence[str]) -> float:
    """Return the largest update of these layers, each by its first known quantity; 0 if none is known."""
    updates = ((abs(row.get(key)) for key in keys if not math.isnan(row.get(key))) for row in rows)
    return max((next(sizes, 0.0) for sizes in updates), default=0.0)
