"""The size of a layer's update, or NaN where a correction cannot use it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from spectral_monitor.layers import Layer
from spectral_monitor.measurement import LOST, Measurement
from spectral_monitor.parametrization.tying import TiedLayers

ROUNDING = 0.25
"""An update can be read if its norm is at least this times eps times the norm of the weights.

Rounding a sum moves a weight by at most half its last digit, 0.2 eps in the root mean square, and removes any smaller
change: most of an update comes through, or hardly anything. From a quarter of eps on, 0.6 to 1.4 times its norm is
left, mostly within 10 %; at a tenth of that only a tenth may be left.
"""

HALF_EPS = 1e-4
"""Dtypes with at least this eps are half precision."""
NO_GRADIENT = 10.0
"""A gradient below so many eps of the largest one is rounding, such as that of a shift that softmax ignores."""
LEAVING = 3.0
"""A weight leaves zero while the next step makes it more than so many times as large."""
CANCELLED = 0.01
"""Below this ratio to its matrix's gradient, a bias's gradient has cancelled out and is rounding.

Biases that batch norm or softmax cancels have 1e-8 to 2e-6 in float32, up to 0.005 in bfloat16. Others have at least
0.02, and mostly about 1.
"""


def observed(measurement: Measurement, quantity: str, layer: Layer, i: int) -> float:
    """Return the update of layer ``i``; NaN if it is none, has no gradient behind it, or is mostly rounding."""
    value, contribution, lr = (float(measurement.values[key][i]) for key in (quantity, "contribution", "lr"))
    if _is_rounded(measurement, layer, i) or contribution == 0 or not lr > 0:
        return math.nan
    return value if math.isfinite(value) else math.nan


def shows_contribution(layer: Layer) -> bool:
    """Return whether the contribution of a layer's block can be read.

    That of gains and biases in half precision cannot: rounding takes most of their updates, and no norm shows it.
    """
    return layer.is_matrix or _eps(layer) < HALF_EPS


def block_contributions(
    measurement: Measurement, layers: Sequence[Layer], blocks: Sequence[TiedLayers], rates: Sequence[float]
) -> list[float]:
    """Return the contributions of blocks to the decrease of the loss; NaN where the gradient, or a matrix's update, is
    mostly rounding.

    Contributions for each unit of learning rate are squares of gradients, so limits of rounding are squares of eps.
    """
    contributions = [_contribution(measurement, layers, block) for block in blocks]
    squares = [abs(x) / rate if rate > 0 else math.nan for x, rate in zip(contributions, rates, strict=True)]
    largest = max(filter(math.isfinite, squares), default=math.nan)
    limits = [(NO_GRADIENT * _eps(layers[block.leader])) ** 2 * largest for block in blocks]
    rows = zip(contributions, squares, limits, strict=True)
    return [contribution if square > limit else math.nan for contribution, square, limit in rows]


def leaves_zero(measurement: Measurement, indices: Sequence[int], aims: Sequence[float]) -> bool:
    """Return whether the next step makes some weight close to zero several times as large.

    Gradients of other layers pass through it and grow with it: in a branch whose last matrix begins at zero, as in
    Fixup, or whose norm has a gain of 0, a thousandfold from one step to the next. Through biases no gradient passes.

    ``indices``: of layers; ``aims``: the wanted sizes of their updates.
    """
    names = [measurement.layers[i].name for i in indices]
    sizes = ((float(measurement.values[key][i]) for key in ("weight_natural", "update_natural")) for i in indices)
    return any(
        update > 0 and size + update + aim > LEAVING * size
        for name, (size, update), aim in zip(names, sizes, aims, strict=True)
        if not name.endswith("bias")
    )


def cancelled(measurement: Measurement, layers: Sequence[Layer], squared: Sequence[bool]) -> set[int]:
    """Return the indices of biases and gains whose gradients are rounding.

    ``squared``: for each layer, whether its contribution for each unit of learning rate is the square of a gradient, as
    under SGD, not its size, as under Adam.
    """
    pairs = enumerate(zip(layers, squared, strict=False))
    sizes = [_gradient_entry(measurement, layer, i, square) for i, (layer, square) in pairs]
    largest = max(filter(math.isfinite, sizes), default=math.nan)
    matrices = {layer.block: i for i, layer in reversed(list(enumerate(layers))) if layer.is_matrix and layer.block}
    rounded = set()
    for i, layer in enumerate(layers):
        matrix = matrices.get(layer.block)
        if layer.is_matrix or (matrix is None and measurement.why("contribution", layer.info.name) == LOST):
            continue  # a lost update of a gain of 1 may have had a real gradient
        if sizes[i] < (NO_GRADIENT * _eps(layer) * largest if matrix is None else CANCELLED * sizes[matrix]):
            rounded.add(i)
    return rounded


def _gradient_entry(measurement: Measurement, layer: Layer, i: int, square: bool) -> float:
    """Return the size of the entries of a gradient, estimated from the contribution."""
    contribution, lr = (abs(float(measurement.values[key][i])) for key in ("contribution", "lr"))
    size = contribution / lr / math.prod(layer.info.shape) if lr > 0 else math.nan
    return math.sqrt(size) if square else size


def _contribution(measurement: Measurement, layers: Sequence[Layer], block: TiedLayers) -> float:
    values = measurement.values["contribution"]
    if not shows_contribution(layers[block.leader]) or any(
        _is_rounded(measurement, layers[i], i) for i in block.members
    ):
        return math.nan
    contributions = [x for i in block.members if math.isfinite(x := float(values[i])) and x != 0]
    return sum(contributions) if contributions else math.nan


def remnant(measurement: Measurement, quantity: str, layer: Layer, i: int, wanted: float) -> float:
    """Return the size of an update that rounding has mostly removed; NaN if it is another case, or unclear.

    A gradient must arrive, and the wanted update must exceed rounding, which is about eps for weights of natural norm
    1: a schedule that ends at 0 must not drive up multipliers. Where no layer moved at all, the optimizer may have
    skipped the step, after an overflow of scaled gradients or to accumulate them.
    """
    values = measurement.values
    value = float(values[quantity][i])
    owner = layer.tied_to or layer.info.name  # the layer that the contribution is listed under
    contribution = measurement.value("contribution", owner)
    arrives = 0 < abs(contribution) < math.inf or measurement.why("contribution", owner) == LOST
    is_small = 0 <= value < wanted and (value == 0 or _is_rounded(measurement, layer, i))
    if is_small and arrives and wanted > _eps(layer) and bool((values[quantity].abs() > 0).any()):
        return value
    return math.nan


def _is_rounded(measurement: Measurement, layer: Layer, i: int) -> bool:
    """Return whether rounding may be so large a part of an update that its size means little.

    It is never so for biases and gains, whose norms are NaN.
    """
    update, weight = (float(measurement.values[key][i]) for key in ("update_fro", "weight_fro"))
    return update < ROUNDING * _eps(layer) * weight


def _eps(layer: Layer) -> float:
    return torch.finfo(layer.sources[0].dtype).eps
