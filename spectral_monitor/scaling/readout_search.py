"""The scale of the readout, or the length of its first step, at which features move as they should (Eq. 7)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import spectral_monitor.functional as F
from spectral_monitor.layers import Layer
from spectral_monitor.scaling.trial import Blocks, EqualContributionStep, Family, Trial, equal_contributions, update_of

START = 1e-2
"""RMS of the outputs the search begins with, where the loss does not yet depend on them."""

TOLERANCE = 2e-3
"""Relative error of the sensitivity that is left."""

MAX_DISTANCE, MAX_TURNS = math.log(1e5), 60
"""How far the search goes from where it begins, in the logarithm of the factor, and how often it looks."""


def normalize_backward(
    trial: Trial, readout: Layer, blocks: Blocks, optimizer: Family
) -> tuple[float, EqualContributionStep]:
    """Return the factor of the readout that brings the sensitivity of its inputs to 1; the readout is left there.

    If the readout is zero, the factor is the learning rate of the step of its block that leads there from zero.

    The search begins where outputs are small and the sensitivity is the inverse of the factor. Once there is a factor
    on either side, it goes between the two. By turns it takes the point where the line through their logarithms meets
    0, and the middle.

    Raises:
        ValueError: no factor does; a zero readout without a gradient; see :func:`equal_contributions`.
    """
    weight = readout.sources[0]
    start, along = [torch.zeros_like(weight)], [weight.detach().clone()]
    moved: Sequence[nn.Parameter] = [weight]
    if not along[0].any():
        moved, along = _first_update(trial, readout, blocks, optimizer)
        start = [parameter.detach().clone() for parameter in moved]
    length = next(float(F.frobenius_norm(part.flatten(1))) for p, part in zip(moved, along, strict=True) if p is weight)
    first = place = math.log(START * math.sqrt(readout.layout.fan_out) / length)
    above: tuple[float, float] | None = None  # logarithms of a factor and of the sensitivity there
    below: tuple[float, float] | None = None
    turn = 0
    while abs(place - first) < MAX_DISTANCE and turn < MAX_TURNS:
        with torch.no_grad():
            for parameter, origin, part in zip(moved, start, along, strict=True):
                parameter.copy_(origin.add(part, alpha=math.exp(place)))
        found = equal_contributions(trial, readout, blocks, optimizer)
        if abs(found.sensitivity - 1) < TOLERANCE:
            return math.exp(place), found
        size = math.log(found.sensitivity)
        above, below = ((place, size), below) if size > 0 else (above, (place, size))
        if above is None or below is None:
            place += math.copysign(min(max(abs(size), 0.02), 3.0), size)
        elif turn % 2:
            place = (above[0] + below[0]) / 2
        else:
            place = (above[0] * below[1] - below[0] * above[1]) / (below[1] - above[1])
        turn += 1
    raise ValueError(
        f"no scale of the readout, {readout.info.name!r}, gives Eq. 7: what it is given changes by "
        f"{found.sensitivity:.3g} per unit of loss at a factor of {math.exp(place):.2g}"
    )


def _first_update(
    trial: Trial, readout: Layer, blocks: Blocks, optimizer: Family
) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Return the parameters of the readout's block and their first update per unit of learning rate."""
    weight = readout.sources[0]
    members = next(some for some in blocks.values() if any(parameter is weight for _, parameter in some))
    parameters = [parameter for _, parameter in members]
    gradients = trial.look(readout, parameters).gradients
    if not any(bool(g.any()) for p, g in zip(parameters, gradients, strict=True) if p is weight):
        raise ValueError(
            f"the readout, {readout.info.name!r}, is zero and has no gradient: draw it, as by nn.init.normal_"
        )
    return parameters, update_of(gradients, optimizer)
