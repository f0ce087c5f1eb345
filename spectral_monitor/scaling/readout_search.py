"""The scale of the readout, or the length of its first step, that gives its inputs a sensitivity of 1 (Eq. 7)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import spectral_monitor.functional as F
from spectral_monitor.layers import Layer
from spectral_monitor.scaling.trial import Blocks, EqualContributionStep, Family, Trial, equal_contributions, update_of

START_RMS = 1e-2
"""RMS of the outputs where the search begins: so small that the loss does not depend on them yet."""

TOLERANCE = 2e-3
"""Relative error of the sensitivity at which the search ends."""

MAX_DISTANCE, MAX_TURNS = math.log(1e5), 60
"""The largest distance from the beginning, in the logarithm of the factor, and the largest number of trials."""


def normalize_backward(
    trial: Trial, readout: Layer, blocks: Blocks, optimizer: Family
) -> tuple[float, EqualContributionStep]:
    """Return the factor of the readout that gives its inputs a sensitivity of 1, and the step there.

    The readout keeps that factor. If it is zero at first, the factor is the learning rate of its block's step that
    leads there from zero.

    The search begins where outputs are small and the sensitivity is the inverse of the factor. Once there is a factor
    on either side, it stays between the two. It takes in turn the point where the line through their logarithms
    crosses 0, and the middle.

    Raises:
        ValueError: no factor does; a zero readout without a gradient; see :func:`equal_contributions`.
    """
    weight = readout.sources[0]
    parameters: Sequence[nn.Parameter] = [weight]
    origins, directions = [torch.zeros_like(weight)], [weight.detach().clone()]
    if not directions[0].any():
        parameters, directions = _first_update(trial, readout, blocks, optimizer)
        origins = [parameter.detach().clone() for parameter in parameters]
    norms = [float(F.frobenius_norm(d.flatten(1))) for p, d in zip(parameters, directions, strict=True) if p is weight]
    first = log_factor = math.log(START_RMS * math.sqrt(readout.layout.fan_out) / norms[0])
    above: tuple[float, float] | None = None  # logarithms of a factor and of the sensitivity there
    below: tuple[float, float] | None = None
    turn = 0
    while abs(log_factor - first) < MAX_DISTANCE and turn < MAX_TURNS:
        with torch.no_grad():
            for parameter, origin, direction in zip(parameters, origins, directions, strict=True):
                parameter.copy_(origin.add(direction, alpha=math.exp(log_factor)))
        step = equal_contributions(trial, readout, blocks, optimizer)
        if abs(step.sensitivity - 1) < TOLERANCE:
            return math.exp(log_factor), step
        log_sensitivity = math.log(step.sensitivity)
        if log_sensitivity > 0:
            above = log_factor, log_sensitivity
        else:
            below = log_factor, log_sensitivity
        if above is None or below is None:
            log_factor += math.copysign(min(max(abs(log_sensitivity), 0.02), 3.0), log_sensitivity)
        elif turn % 2:
            log_factor = (above[0] + below[0]) / 2
        else:
            log_factor = (above[0] * below[1] - below[0] * above[1]) / (below[1] - above[1])
        turn += 1
    raise ValueError(
        f"no scale of the output layer, {readout.info.name!r}, satisfies Eq. 7: its inputs change by "
        f"{step.sensitivity:.3g} per unit of loss at a factor of {math.exp(log_factor):.2g}"
    )


def _first_update(
    trial: Trial, readout: Layer, blocks: Blocks, optimizer: Family
) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Return the parameters of the readout's block and their first update per unit of learning rate."""
    weight = readout.sources[0]
    block = next(block for block in blocks.values() if any(parameter is weight for _, parameter in block))
    parameters = [parameter for _, parameter in block]
    gradients = trial.gradient_pass(readout, parameters).gradients
    if not any(bool(g.any()) for p, g in zip(parameters, gradients, strict=True) if p is weight):
        raise ValueError(
            f"the output layer, {readout.info.name!r}, is zero and has no gradient: initialize it, for example with "
            "nn.init.normal_"
        )
    return parameters, update_of(gradients, optimizer)
