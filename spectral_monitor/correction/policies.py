"""Update sizes that policies ask for, and those that the settings imply, as pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from spectral_monitor.condition.optimizers.hyperparameters import Hyperparameters
from spectral_monitor.fitting.medians import geometric_median
from spectral_monitor.layers import Layer
from spectral_monitor.measurement import SUMMARY, Measurement

SHARES = {"operator": 1.0, "readout": 1.0, "embedding": 1.0, "vector": 0.04}
"""Policy ``"target"``: size of an update over the wanted size of an operator's, where weights began with size 1.

What may not depend on width may still differ between kinds of layers, and should: biases and gains move all rows alike
(docs/correction.md).
"""
GROWTH = {"operator": 0.5, "readout": 0.5, "embedding": 1 / 3}
"""Power of the size that weights began with in the share of their updates; biases and gains go by no size.

At 1 every update would be the same part of its weights, at 0 of the same size. Best recipes lie between the two: small
weights take larger steps for their size than large ones.
"""
LEAST = {"operator": 1 / 8, "readout": 1.0, "embedding": 0.02}
"""Weights that began smaller, such as zeros, count as this large."""
MOST = {"readout": 2.0}
"""Weights that began larger count as this large: PyTorch draws readouts whose natural norm grows with the width."""
TRAINED = 1 / 4
"""Weights that an earlier training left take steps so much smaller: what they know is to be kept."""
ALONE = 4.0
"""A readout that is trained alone takes steps so much larger: no later layer depends on its outputs."""
REFERENCE_MOMENTUM = {"muon": 0.95}
"""Momentum with which steps have their full size, 0.9 under other optimizers."""
PROPORTIONAL = 0.7
"""Part of the size that steps have under optimizers that move weights in proportion to the gradient. All of such a step
goes where the loss is steepest, while Adam spreads it over every direction.
"""
PIXELS = 48
"""The share of the operator that reads the data is the fourth root of the number of its inputs over this: they are no
width, and many of them, such as pixels, say much the same.
"""


def share(layer: Layer, began: float, reads_data: bool = False, trained: bool = False) -> float:
    """Return the wanted size of a layer's update over that of an operator that began with natural norm 1.

    Args:
        layer: any.
        began: natural norm its weights began with; NaN counts as 1.
        reads_data: whether it is the operator that reads the data.
        trained: whether an earlier training left its weights.
    """
    role = layer.info.role
    kept = TRAINED if trained else 1.0
    if role == "vector":
        return kept * SHARES[role]
    taps = math.sqrt(layer.layout.taps)  # by which entries of a usual size give a convolution a larger natural norm
    size = 1.0 if math.isnan(began) else min(max(began, LEAST[role] * taps), MOST.get(role, math.inf) * taps)
    found = kept * SHARES[role] * math.pow(size, GROWTH[role])
    return found * (layer.info.fan_in * layer.layout.taps / PIXELS) ** 0.25 if reads_data else found


def momentum_share(settings: Hyperparameters) -> float:
    """Return the wanted size of steps under an optimizer over that of steps under Adam with a momentum of 0.9.

    Where gradients are mostly noise, steps with momentum ``b`` go as far as steps without that are
    ``sqrt((1 + b) / (1 - b))`` times as large. Where they agree, all go ``1 / (1 - b)`` times as far as one.
    Recipes lie between sizes that make up for the first and equal sizes (docs/correction.md).

    Args:
        settings: of the layer; an optimizer of an unknown kind has steps of the full size.

    Example:
        >>> adam, sgd = Hyperparameters(family="adam", base_momentum=0.9), Hyperparameters(family="sgd")
        >>> momentum_share(adam), round(momentum_share(sgd), 2)
        (1.0, 1.87)
    """
    if not settings.family:
        return 1.0
    reference = REFERENCE_MOMENTUM.get(settings.family, 0.9)
    longer = _persistence(reference) / _persistence(settings.base_momentum)
    return (PROPORTIONAL if settings.family == "sgd" else 1.0) * math.pow(longer, 1 / 3)


def _persistence(momentum: float) -> float:
    momentum = min(max(momentum, 0.0), 0.999)
    return (1 + momentum) / (1 - momentum)


def explained(layer: Layer, family: str) -> tuple[float, float]:
    """Return the smallest and the largest size that updates ordinarily have at a learning rate of 1; NaN if unknown.

    Sign-like optimizers move every entry by about 1: a natural norm of the number of inputs if all go one way, and of
    its root if each goes its own. Orthogonalizing ones give a matrix equal singular values, in one of two conventions.

    Args:
        layer: any.
        family: of its optimizer, as in :func:`~spectral_monitor.condition.optimizers.hyperparameters.family`.
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
    """Return updates (L,) that are all equal to what the layer in the middle would have with a multiplier of 1; NaN
    where nothing was observed.

    An update is taken to be proportional to its multiplier. The middle is the geometric median: a layer that is far off
    does not move it, as it would the mean, and with it the learning rates of layers that are in order.

    Example:
        >>> balanced([0.1, 0.2, 80.0], [1.0, 1.0, 1.0]), balanced([0.1, 0.2, 0.8], [1.0, 1.0, 0.01])
        ([0.2, 0.2, 0.2], [0.2, 0.2, 0.2])
    """
    seen = [x > 0 and math.isfinite(x) for x in observed]
    middle = geometric_median(x / m for x, m, known in zip(observed, multipliers, seen, strict=True) if known)
    return [middle if known else math.nan for known in seen]


def wanted_decrease(measurement: Measurement, polyak: float | None) -> float:
    """Return what policy "fsc" has a step take off the loss, over the learning rate.

    Raises:
        ValueError: that goes by the loss, which is not known.
    """
    if polyak is None:
        return 1.0
    loss = measurement.summary.get("loss", math.nan)
    if math.isnan(loss):
        raise ValueError(f"polyak needs the loss; {measurement.why('loss', SUMMARY)}")
    return loss - polyak


def usual_multipliers(
    known: Mapping[nn.Parameter, float],
    others: frozenset[nn.Parameter],
    optimizers: Iterable[Sequence[Sequence[nn.Parameter]]],
) -> dict[nn.Parameter, float]:
    """Return the multipliers of parameters that have none of their own: the median of their group's, or of their
    optimizer's where none in the group has one.

    Args:
        known: parameter -> its multiplier.
        others: those without; what no optimizer with a known multiplier holds is left out.
        optimizers: the parameters of each one's groups.
    """
    usual: dict[nn.Parameter, float] = {}
    for groups in optimizers if others else ():
        every = geometric_median(known[p] for group in groups for p in group if p in known)
        for group in groups:
            own = geometric_median(known[p] for p in group if p in known)
            usual |= dict.fromkeys(others.intersection(group), every if math.isnan(own) else own)
    return {p: multiplier for p, multiplier in usual.items() if multiplier > 0}
