"""Update sizes that policies want, and those that the settings imply, as pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from spectral_monitor.capture.replay.loss_graph import Depth
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
RECURRENT_READOUT_SHARE = 2.0
"""Factor on steps of a readout that reads recurrent layers, if updates do not grow with the gradient.

Gates and tanh bound its inputs: their RMS is 0.1 to 0.3 at the start and stays below 1. The factor is the root of 4, as
for data of RMS 1/4.
"""
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
SHALLOW, ADDS_UP = 6, 2.0
"""In a chain of more matrices than the first number, their changes add up: steps are multiplied by the second over the
number of matrices. On noisy digits the best size of perceptrons of 2, 4, 8 and 14 layers is 1/4, 1/16, 1/32 and 1/32,
with layer norms too. The rule does not hold for other losses: the squared error of autoencoders of 8, 10 and 12 layers
is 1.4 to 1.6 times as large with the smaller steps.
"""
BRANCHES = 9
"""With more residual branches than this, steps are multiplied by the root of this over the number of branches.

Changes by branches add up on the residual stream. The recipes that sizes were tuned on have at most nine. With 25
branches a ViT ends 6 % lower at half the size, one with PyTorch's weights 1 %.
"""
UNEVEN_START = 0.4
"""Ratio between the initial entries of half of the operators and of the others, below which steps keep their size.

GPT-2's initialization divides the last matrix of each branch by the root of the number of branches. With eleven
branches the ratio is 0.32, with other initializations 0.64 to 1. With 25 branches GPT-2 ends 1 to 2 % higher with
smaller steps.
"""
POST_NORMS = 4
"""With n post-norm branches steps are divided by 1 + n over this.

Blocks whose sums are normalized follow each other like the matrices of a chain. On characters the best sizes of
transformers with 4, 8, 12, 16 and 24 such branches are 1/16, 1/16, 1/19, 1/22 and 1/53; on noisy digits, with 4, 8 and
12, they are 1/16, 1/32 and 1/37, with batch norms too. With two or four times the best size most learn nothing.
"""
NORMED = 2
"""With more matrices in a row that batch or group norms read, steps are multiplied by the root of this over the number.

A norm keeps the size of outputs, but changes of all matrices still reach the last one. With 32 images in a batch the
best sizes of convolutional networks are 1/8 with 2 such matrices, 1/16 with 4, 1/16 to 1/32 with 8, 1/32 with 17 and
1/64 with 49. With 128 images they are 1/8 with 4 and 1/16 with 8.
"""


def depth_rule(depth: Depth, uneven: bool = False, trained_part: float = 1.0) -> tuple[float, str]:
    """Return the factor on the size of steps in a deep network, and its reason; 1 and "" if no rule applies.

    Args:
        depth: of the network.
        uneven: whether half of its operators began much smaller than the others, as with GPT-2's initialization.
        trained_part: part of the entries of its operators that is trained. Adapters change post-norm blocks little.

    Example:
        >>> depth_rule(Depth(matrices=8))[0]
        0.25
    """
    matrices, branches, post_norms, normed = depth
    rules = [(1.0, "")]
    if matrices > SHALLOW:
        reason = f"{matrices} matrices follow each other without residual connections or batch norms"
        rules.append((ADDS_UP / matrices, reason))
    if post_norms:
        reason = f"a norm follows each of {post_norms} residual branches (post-norm)"
        rules.append((1 / (1 + trained_part * post_norms / POST_NORMS), reason))
    elif branches > BRANCHES and not uneven:
        rules.append((math.sqrt(BRANCHES / branches), f"the changes of {branches} residual branches add up"))
    if normed > NORMED:
        rules.append((math.sqrt(NORMED / normed), f"a batch or group norm follows each of {normed} matrices in a row"))
    return min(rules)


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
        settings: of the layer; under an unknown kind of optimizer, other than Adadelta, steps have the full size.

    Example:
        >>> adam, sgd = Hyperparameters(family="adam", base_momentum=0.9), Hyperparameters(family="sgd")
        >>> momentum_share(adam), round(momentum_share(sgd), 2)
        (1.0, 1.87)
    """
    if not settings.family and settings.optimizer != "Adadelta":
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
