"""A measurement without the changes that a correction makes on purpose, as the judge gets it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from spectral_monitor.condition.findings import ON_TRIAL
from spectral_monitor.measurement import LOST, Measurement

MOVES = ("update_natural", "update_norm", "update_fro", "update_ratio", "drift_ratio")
"""Quantities that tell how far a layer has moved."""


def adapt(
    measurement: Measurement, expected: Mapping[str, float], on_trial: Collection[str], sets_length: bool
) -> Measurement:
    """Return a measurement in which a correction's own doing is no deviation.

    Args:
        measurement: a measurement; it is not changed.
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
