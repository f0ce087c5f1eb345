"""The gradient noise scale of each layer and of the whole network, or why there is none."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spectral_monitor.engine.results.raw import NETWORK, Raw
from spectral_monitor.engine.results.reasons import StepContext
from spectral_monitor.functional.noise import MIN_SAMPLES, noise_scale
from spectral_monitor.measurement import NOT_FINITE

KEY, MOMENTS = "noise_scale", "noise.moments"
LOW, HIGH = "noise_scale_low", "noise_scale_high"
"""Values of the whole network: the ends of a confidence interval."""
COLUMNS = 7
"""Columns of the table of moments, a row for each process: the number of layers, and six moments."""

UNKNOWN = "defined only for a single matrix that is called once and sees each sample's inputs and gradients"
FEW = f"needs {MIN_SAMPLES} samples in each process"
DIVIDED = "the features of a batch are sharded over processes"
DIFFERENT = "the processes saw different layers"
NO_SIGNAL = (
    "judged by the samples of this batch, the mean gradient may be zero: look at noise_scale_low, or use larger batches"
)
NO_BOUND = "by the samples of this batch, the mean gradient may be zero"


def settle_noise(raw: Raw, facts: StepContext) -> dict[str, tuple[float, str]]:
    """Put the noise scales of layers into ``raw``, and the reasons for missing ones into ``facts``.

    Returns:
        The values of the whole network by name, each with the reason if it is NaN.
    """
    network: dict[str, tuple[float, str]] = {}
    for i, scalars in raw.items():
        if MOMENTS not in scalars:
            continue
        table = torch.as_tensor(scalars[MOMENTS], dtype=torch.float64, device="cpu").view(-1, COLUMNS)
        scale, reason = noise_scale(table[:, 1:]), facts.why_not.get((KEY, NETWORK), "") or _reason(table)
        if i == NETWORK:
            ends = {KEY: (scale.value, NO_SIGNAL), LOW: (scale.low, ""), HIGH: (scale.high, NO_BOUND)}
            for name, (value, default_reason) in ends.items():
                defined = math.isfinite(value) and not reason
                network[name] = (value, "") if defined else (math.nan, reason or default_reason)
        elif reason or math.isnan(scale.value):
            facts.why_not[KEY, i] = reason or NO_SIGNAL
        else:
            scalars[KEY] = (scale.value,)
    return network


def _reason(table: Tensor) -> str:
    """Return why moments (processes, 7) give no noise scale; empty if nothing is wrong with them."""
    if not table.isfinite().all():
        return NOT_FINITE
    counted, samples = table[:, 0], table[:, 1]
    if not counted.all():
        return UNKNOWN
    if len(counted.unique()) > 1:
        return DIFFERENT
    return "" if samples.all() else FEW
