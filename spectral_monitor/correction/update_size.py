"""The size of a layer's update as a correction can use it: a number, or nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from spectral_monitor.layers import Layer
from spectral_monitor.measurement import LOST, Measurement
from spectral_monitor.parametrization.tying import TiedLayers

ROUNDING = 0.25
"""An update can be read if its norm is so many times the dtype's eps times that of the weights.

Rounding a sum moves a weight by half its last digit at most, 0.2 eps of it in the root mean square, and takes all that
is less than that half: most of an update comes through or hardly anything. From a quarter of eps on, what is left has
0.6 to 1.4 times the norm it had, mostly within 10 %; at a tenth of that it may have a tenth.
"""

HALF = 1e-4
"""Eps of dtypes from which on they are called half precision."""
NO_GRADIENT = 10.0
"""A gradient so many eps of the largest one is rounding, as that of a shift which softmax takes no notice of."""
LEAVING = 3.0
"""A weight leaves zero while the next step makes it more than so many times as large as it was."""
CANCELLED = 0.01
"""Entries of a bias's gradient that are so small beside those of its matrix cancel out but for rounding.

What batch norm or softmax takes out again does: 1e-8 to 2e-6 times in float32, to 0.005 in bfloat16. Others are at
least 0.02 times as large, and mostly as large.
"""


def observed(measurement: Measurement, quantity: str, layer: Layer, i: int) -> float:
    """Return what the update of layer ``i`` is; NaN if it says nothing: none, NaN, no gradient behind it, or mostly
    rounding.
    """
    value, contribution, lr = (float(measurement.values[key][i]) for key in (quantity, "contribution", "lr"))
    if _is_rounded(measurement, layer, i) or contribution == 0 or not lr > 0:
        return math.nan
    return value if math.isfinite(value) else math.nan


def shows_contribution(layer: Layer) -> bool:
    """Return whether the contribution of the block of a layer can be read; not that of gains and biases in half
    precision, for rounding takes most of their updates and there is no norm that tells.
    """
    return layer.is_matrix or _eps(layer) < HALF


def block_contributions(
    measurement: Measurement, layers: Sequence[Layer], blocks: Sequence[TiedLayers], rates: Sequence[float]
) -> list[float]:
    """Return what blocks contribute to the decrease of the loss; NaN where that says nothing: no gradient but rounding,
    or a matrix whose update is mostly rounding.

    Contributions for each unit of learning rate are squares of gradients, so that those of rounding are squares of eps.
    """
    found = [_contribution(measurement, layers, block) for block in blocks]
    sizes = [abs(x) / rate if rate > 0 else math.nan for x, rate in zip(found, rates, strict=True)]
    most = max((size for size in sizes if math.isfinite(size)), default=math.nan)
    least = [(NO_GRADIENT * _eps(layers[block.leader])) ** 2 * most for block in blocks]
    return [x if size > small else math.nan for x, size, small in zip(found, sizes, least, strict=True)]


def leaves_zero(measurement: Measurement, places: Sequence[int], aims: Sequence[float]) -> bool:
    """Return whether some weight is so close to zero that with the next step it will be several times as large.

    Gradients of other layers go through it and grow as it does: in a branch whose last matrix begins at zero, as in
    Fixup, or whose norm has a gain of 0, a thousandfold from one step to the next. Biases are added, not gone through.

    Args:
        measurement: with sizes of weights and updates.
        places: layers of it.
        aims: how large their updates should have been.
    """
    names = [measurement.layers[i].name for i in places]
    sizes = ((float(measurement.values[key][i]) for key in ("weight_natural", "update_natural")) for i in places)
    return any(
        update > 0 and size + update + aim > LEAVING * size
        for name, (size, update), aim in zip(names, sizes, aims, strict=True)
        if not name.endswith("bias")
    )


def cancelled(measurement: Measurement, layers: Sequence[Layer], squared: Sequence[bool]) -> set[int]:
    """Return the biases and gains whose gradients are rounding.

    Args:
        measurement: with contributions and learning rates.
        layers: in its order.
        squared: whether contributions for each unit of learning rate are squares of gradients, as under SGD, not
            their size, as under Adam.
    """
    pairs = enumerate(zip(layers, squared, strict=False))
    sizes = [_gradient_entry(measurement, layer, i, square) for i, (layer, square) in pairs]
    most = max((size for size in sizes if math.isfinite(size)), default=math.nan)
    matrices = {layer.block: i for i, layer in reversed(list(enumerate(layers))) if layer.is_matrix and layer.block}
    found = set()
    for i, layer in enumerate(layers):
        beside = matrices.get(layer.block)
        if layer.is_matrix or (beside is None and measurement.why("contribution", layer.info.name) == LOST):
            continue  # gains of 1 may have lost what is more than rounding
        if sizes[i] < (NO_GRADIENT * _eps(layer) * most if beside is None else CANCELLED * sizes[beside]):
            found.add(i)
    return found


def _gradient_entry(measurement: Measurement, layer: Layer, i: int, square: bool) -> float:
    """Return the size of the entries of a gradient, as far as the contribution shows it."""
    contribution, lr = (abs(float(measurement.values[key][i])) for key in ("contribution", "lr"))
    size = contribution / lr / math.prod(layer.info.shape) if lr > 0 else math.nan
    return math.sqrt(size) if square else size


def _contribution(measurement: Measurement, layers: Sequence[Layer], block: TiedLayers) -> float:
    values = measurement.values["contribution"]
    if not shows_contribution(layers[block.leader]) or any(
        _is_rounded(measurement, layers[i], i) for i in block.members
    ):
        return math.nan
    known = [x for i in block.members if math.isfinite(x := float(values[i])) and x != 0]
    return sum(known) if known else math.nan


def remnant(measurement: Measurement, quantity: str, layer: Layer, i: int, wanted: float) -> float:
    """Return what rounding left of an update, if it was too small for the weights; NaN if that cannot be said.

    It can where a gradient arrives and what is wanted is more than rounding itself, which is about eps, for so are
    weights of natural norm 1: a schedule that ends at 0 must not drive up multipliers. Where no layer moved at all,
    the optimizer may have skipped the step, after an overflow of scaled gradients or to gather them.
    """
    values = measurement.values
    value = float(values[quantity][i])
    owner = layer.tied_to or layer.info.name  # whose contribution it is
    contribution = measurement.value("contribution", owner)
    arrives = 0 < abs(contribution) < math.inf or measurement.why("contribution", owner) == LOST
    is_small = 0 <= value < wanted and (value == 0 or _is_rounded(measurement, layer, i))
    if is_small and arrives and wanted > _eps(layer) and bool((values[quantity].abs() > 0).any()):
        return value
    return math.nan


def _is_rounded(measurement: Measurement, layer: Layer, i: int) -> bool:
    """Return whether so much of an update may be rounding that its size means little; never for biases and gains, whose
    norms are NaN.
    """
    update, weight = (float(measurement.values[key][i]) for key in ("update_fro", "weight_fro"))
    return update < ROUNDING * _eps(layer) * weight


def _eps(layer: Layer) -> float:
    return torch.finfo(layer.sources[0].dtype).eps
