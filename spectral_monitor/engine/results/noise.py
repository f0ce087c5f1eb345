"""The noise scale of gradients, of each layer and of the whole network, or why there is none."""

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
"""Values of the whole network: the ends of the interval."""
COLUMNS = 7
"""Of the moments of a layer in a process: of how many layers they are, and six moments."""

UNKNOWN = "defined for a single matrix only, which is called once and sees each sample's inputs and gradients"
FEW = f"it takes {MIN_SAMPLES} samples in each process"
DIVIDED = "processes share out the features of a batch"
DIFFERENT = "the processes saw different layers"
NO_SIGNAL = "by the samples of this batch, the mean gradient may be zero: look at noise_scale_low, or at larger batches"
NO_BOUND = "by the samples of this batch, the mean gradient may be zero"


def settle_noise(raw: Raw, facts: StepContext) -> dict[str, tuple[float, str]]:
    """Put the noise scales of layers, and tell ``facts`` why others are missing.

    Returns:
        The values of the whole network, by name, each with the reason if it is NaN.
    """
    whole: dict[str, tuple[float, str]] = {}
    for i, scalars in raw.items():
        if MOMENTS not in scalars:
            continue
        table = torch.as_tensor(scalars[MOMENTS], dtype=torch.float64, device="cpu").view(-1, COLUMNS)
        found, why = noise_scale(table[:, 1:]), facts.why_not.get((KEY, NETWORK), "") or _reason(table)
        if i == NETWORK:
            ends = {KEY: (found.value, NO_SIGNAL), LOW: (found.low, ""), HIGH: (found.high, NO_BOUND)}
            for name, (value, reason) in ends.items():
                known = math.isfinite(value) and not why
                whole[name] = (value, "") if known else (math.nan, why or reason)
        elif why or math.isnan(found.value):
            facts.why_not[KEY, i] = why or NO_SIGNAL
        else:
            scalars[KEY] = [found.value]
    return whole


def _reason(table: Tensor) -> str:
    """Return why moments (processes, 7) give no noise scale, as far as that is known."""
    if not table.isfinite().all():
        return NOT_FINITE
    counted, samples = table[:, 0], table[:, 1]
    if not counted.all():
        return UNKNOWN
    if len(counted.unique()) > 1:
        return DIFFERENT
    return "" if samples.all() else FEW
