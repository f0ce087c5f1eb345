"""Update sizes that policies want, and those that the settings imply, as pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from spectral_monitor.condition.optimizers.hyperparameters import Hyperparameters
from spectral_monitor.fitting.medians import geometric_median
from spectral_monitor.layers import Layer
from spectral_monitor.measurement import SUMMARY, Measurement

SHARES = {"operator": 1.0, "readout": 1.0, "embedding": 1.0, "vector": 0.04}
"""Policy ``"target"``: wanted size of an update over that of an operator's, where weights began with size 1.

Sizes must not depend on the width, but should differ between kinds of layers: biases and gains move all rows alike
(docs/correction.md).
"""
SIZE_POWERS = {"operator": 0.5, "readout": 0.5, "embedding": 1 / 3}
"""A share grows with this power of the size that weights began with; that of biases and gains does not.

At 1 every update would be the same part of its weights, at 0 of the same size. The best recipes lie between the two:
small weights take larger steps for their size than large ones.
"""
SMALLEST_START = {"operator": 1 / 8, "readout": 1.0, "embedding": 0.02}
"""Weights that began smaller, such as zeros, count as this large."""
LARGEST_START = {"readout": 2.0}
"""Weights that began larger count as this large: PyTorch draws readouts whose natural norm grows with the width."""
TRAINED_SHARE = 1 / 4
"""Factor on steps of weights that an earlier training left: they should keep what they have learnt."""
LONE_READOUT_SHARE = 4.0
"""Factor on steps of a readout that is trained alone: no later layer depends on its outputs."""
REFERENCE_MOMENTUM = {"muon": 0.95}
"""Momentum with which steps have their full size; 0.9 under other optimizers."""
SGD_SHARE = 0.7
"""Factor on steps of optimizers that move weights in proportion to the gradient. All of such a step goes where the loss
is steepest, while Adam spreads it over every direction.
"""
REFERENCE_INPUTS = 48
"""The share of the operator that reads the data is the fourth root of the number of its inputs over this: inputs are no
width, and many of them, such as neighbouring pixels, carry the same information.
"""


def share(layer: Layer, began: float, input_rms: float | None = None, trained: bool = False) -> float:
    """Return the wanted size of a layer's update over that of an operator that began with natural norm 1.

    Args:
        layer: the layer.
        began: natural norm that its weights began with; NaN counts as 1.
        input_rms: RMS of the data, if the layer is the operator that reads them.
        trained: whether an earlier training left its weights.
    """
    role = layer.info.role
    factor = TRAINED_SHARE if trained else 1.0
    if role == "vector":
        return factor * SHARES[role]
    taps = math.sqrt(layer.layout.taps)  # the factor on a convolution's natural norm if entries are as in a matrix
    smallest, largest = SMALLEST_START[role] * taps, LARGEST_START.get(role, math.inf) * taps
    size = 1.0 if math.isnan(began) else min(max(began, smallest), largest)
    wanted = factor * SHARES[role] * math.pow(size, SIZE_POWERS[role])
    if input_rms is None:
        return wanted
    return wanted * math.pow(layer.info.fan_in * layer.layout.taps / REFERENCE_INPUTS, 0.25) / math.sqrt(input_rms)


def momentum_share(settings: Hyperparameters) -> float:
    """Return the wanted size of steps under an optimizer over that of steps under Adam with a momentum of 0.9.

    Where gradients are mostly noise, steps with momentum ``b`` go as far as steps without momentum that are
    ``sqrt((1 + b) / (1 - b))`` times as large. Where gradients agree, a step goes ``1 / (1 - b)`` times as far.
    Good recipes lie between full compensation of the first and equal sizes (docs/correction.md).

    Args:
        settings: of the layer; under an unknown kind of optimizer steps have the full size.

    Example:
        >>> adam, sgd = Hyperparameters(family="adam", base_momentum=0.9), Hyperparameters(family="sgd")
        >>> momentum_share(adam), round(momentum_share(sgd), 2)
        (1.0, 1.87)
    """
    if not settings.family:
        return 1.0
    reference = REFERENCE_MOMENTUM.get(settings.family, 0.9)
    ratio = _persistence(reference) / _persistence(settings.base_momentum)
    return (SGD_SHARE if settings.family == "sgd" else 1.0) * math.pow(ratio, 1 / 3)


def _persistence(momentum: float) -> float:
    momentum = min(max(momentum, 0.0), 0.999)
    return (1 + momentum) / (1 - momentum)


def explained(layer: Layer, family: str) -> tuple[float, float]:
    """Return the smallest and the largest ordinary size of updates at a learning rate of 1; NaN if unknown.

    Sign-like optimizers move every entry by about 1. The natural norm is then the number of inputs if all entries move
    one way, and its root if their signs are random. Orthogonalizing optimizers give a matrix equal singular values, in
    one of two conventions.
    ``family`` is that of :func:`~spectral_monitor.condition.optimizers.hyperparameters.family`.
    """
    info, inputs = layer.info, layer.layout.taps * layer.info.fan_in
    if family == "adam":
        return (math.sqrt(inputs), float(inputs)) if info.is_dense else (1.0, 1.0)
    if family == "muon" and info.is_dense:
        shape = math.sqrt(info.fan_in / info.fan_out)
        ends = (max(1.0, shape), 0.2 * math.sqrt(max(info.fan_in, info.fan_out)) * shape)
        return min(ends), max(ends)
    return math.nan, math.nan


def balanced(observed: Sequence[float], multipliers: Sequence[float]) -> list[float]:
    """Return equal updates (L,): the median of those that layers would have with a multiplier of 1; NaN where nothing
    was observed.

    An update is taken to be proportional to its multiplier. The median is geometric: unlike the mean, it does not move
    with a layer that is far off, and so the learning rates of healthy layers do not move either.

    Example:
        >>> balanced([0.1, 0.2, 80.0], [1.0, 1.0, 1.0]), balanced([0.1, 0.2, 0.8], [1.0, 1.0, 0.01])
        ([0.2, 0.2, 0.2], [0.2, 0.2, 0.2])
    """
    readable = [size > 0 and math.isfinite(size) for size in observed]
    rows = zip(observed, multipliers, readable, strict=True)
    median = geometric_median(size / multiplier for size, multiplier, is_readable in rows if is_readable)
    return [median if is_readable else math.nan for is_readable in readable]


def wanted_decrease(measurement: Measurement, polyak: float | None) -> float:
    """Return the decrease of the loss in a step that policy "fsc" wants, over the learning rate.

    Raises:
        ValueError: it depends on the loss, which is not known.
    """
    if polyak is None:
        return 1.0
    loss = measurement.summary.get("loss", math.nan)
    if math.isnan(loss):
        raise ValueError(f"polyak needs the loss; {measurement.why('loss', SUMMARY)}")
    return loss - polyak


def median_multipliers(
    multipliers: Mapping[nn.Parameter, float],
    missing: frozenset[nn.Parameter],
    optimizers: Iterable[Sequence[Sequence[nn.Parameter]]],
) -> dict[nn.Parameter, float]:
    """Return multipliers for parameters that have none: the median of their group, or else of their optimizer.

    Args:
        multipliers: parameter -> its multiplier.
        missing: parameters without one; those of optimizers without any multiplier are left out.
        optimizers: the parameters of each one's groups.
    """
    medians: dict[nn.Parameter, float] = {}
    for groups in optimizers if missing else ():
        overall = geometric_median(multipliers[p] for group in groups for p in group if p in multipliers)
        for group in groups:
            own = geometric_median(multipliers[p] for p in group if p in multipliers)
            medians |= dict.fromkeys(missing.intersection(group), overall if math.isnan(own) else own)
    return {p: multiplier for p, multiplier in medians.items() if multiplier > 0}
