"""Findings: each layer compared with its limits at one measurement, healthy or not.

The limits were chosen on the development half of the recipe suite (``benchmarks/recipes``) and tested on the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from spectral_monitor.condition.network import GAINS, Network
from spectral_monitor.condition.optimizers.plans import FADED
from spectral_monitor.condition.row import Row
from spectral_monitor.condition.settings import Band, SpectralCondition

UPDATE_LIMIT = 1.0
"""Largest update-to-weight ratio: steps as large as the matrix itself overwrite what earlier steps learned."""
WEIGHT_BAND: Band = (1 / 30, 10.0)
"""Gain of the initial weights over the median gain; recipes initialize residual branches up to 14 times smaller."""
SIZE_LIMIT, DRIFT_LIMIT = 100.0, 10.0
"""Largest natural norm of weights that have moved by more than ``DRIFT_LIMIT`` times their initial norm."""
EMBEDDING_BAND: Band = (1 / 300, 30.0)
"""Root mean square of an embedding's largest row."""
EMBEDDING_START = 10.0
"""Largest one at the start of a new network; 4 if normal rows of size 1 have a single entry."""
RATE_LIMIT = 7.0
"""A learning rate that differs from the others' by this factor is a finding, unless the difference is on purpose."""
VECTOR_LIMIT, VECTOR_STEP = 30.0, 1.0
"""The rate of a bias, gain or temperature is a finding if it is above ``VECTOR_LIMIT`` times that of matrices, and a
step changes the entries by more than ``VECTOR_STEP`` and by more than their initial size.
"""
SUSPECT = 2.5
"""A learning rate that differs by this factor narrows the band of the update."""
READOUT_FACTOR = 4.0
"""A readout's update may be larger than a hidden layer's by this factor, except under optimizers like Adam."""
ROUNDING = 0.25
"""Updates below this many times the spacing of floating-point numbers near the weights are lost to rounding."""
NO_STEP = "no optimizer made a step"
COMPILED_STEP = "the optimizer's step is compiled, so updates cannot be seen"
DIVIDED = "several optimizers update the parameters it is computed from"
ON_TRIAL = "its learning rate is not found yet, and its steps are small trials"
"""Reasons why no update was measured, or why it is not judged under a correction."""
AT_ONCE = 1.0 + 1e-9
"""Scale of a finding that is evidence enough as soon as it is outside its band."""
SMALLEST = 5e-324
"""The smallest positive float."""
NOT_ZERO: Band = (SMALLEST, math.inf)
_MOVES = ("update_natural", "update_fro", "update_norm", "contribution")


@dataclass(frozen=True)
class Finding:
    """A value, its reference and the healthy range of their ratio."""

    check: str  # name of the check, such as ``"dead"`` or ``"exploding"``
    layer: str
    quantity: str
    value: float
    reference: float  # where the value should be
    band: Band  # healthy range of value over reference
    scale: float = 2.0  # factor beyond the band that is evidence enough by itself; :data:`AT_ONCE` if any is
    against: str = "typical"  # the reference in words
    lr: float = math.nan  # learning rate of the profile; NaN for other references
    layers: tuple[str, ...] = ()  # layers that a finding on a part of the network is about; else empty
    measured: bool = True  # False if the value only stands for yes or no and is not shown

    @property
    def ratio(self) -> float:
        """Value over reference."""
        return self.value / self.reference

    @property
    def limits(self) -> Band:
        """The band in the units of the value."""
        low, high = self.band
        return (0.0 if low == SMALLEST else low * self.reference, high * self.reference)

    @property
    def excess(self) -> float:
        """Distance from the band as a factor: above 1 outside, below 1 inside."""
        low, high = self.band
        if self.ratio == 0:
            return math.inf if low else 0.0
        return max(low / self.ratio, self.ratio / high)

    @property
    def evidence(self) -> float:
        """Evidence of this measurement: 1 is enough for a verdict; below 0 it is evidence against one."""
        if self.excess == math.inf:
            return math.inf if self.scale <= 1 else 0.5  # a single update of exactly 0 may be chance
        if self.excess == 0:
            return -math.inf
        return math.log(self.excess) / math.log(self.scale)

    def inside(self, hysteresis: float = 1.0) -> bool:
        """Return whether the ratio is inside the band, narrowed by ``hysteresis`` on the log scale."""
        low, high = self.band
        return bool(low**hysteresis <= self.ratio <= high**hysteresis)


def findings(network: Network, condition: SpectralCondition) -> Iterator[Finding]:
    """Yield the findings on every layer, except where a value is missing, NaN or inf."""
    for row in network.rows:
        for finding in (
            _dead(network, row),
            _cut_off(network, row),
            _left_out(network, row),
            _rate(network, row) if condition.profile is None else None,  # a profile has its own learning rates
            _exploding(network, row),
            _grown(row),
            _rounding(row),
            _reference(network, row, condition),
            _weights(network, row) if condition.reference != "theory" else None,  # which is stricter
            _embedding(network, row),
        ):
            if finding is not None and math.isfinite(finding.value) and finding.reference > 0:
                yield finding
    if condition.profile is None:
        for row in network.vectors.values():
            if (finding := _vector_rate(network, row)) is not None:
                yield finding


def _dead(network: Network, row: Row) -> Finding | None:
    """Check that an update is not exactly 0, and that a gradient caused it (not only weight decay or momentum)."""
    lost_to_schedule = row.get("lost") > 0 and row.to_peak >= 1 / FADED
    if network.top_lr == 0 or row.settings.frozen or network.finished or lost_to_schedule:
        return None
    measured = [key for key in _MOVES if not math.isnan(row.get(key))]
    if not measured:
        return None
    quantity = next((key for key in measured if row.get(key) == 0), measured[-1])
    if math.isnan(network.top_lr) and not any(abs(other.get(quantity)) > 0 for other in network.rows):
        return None  # all learning rates may be 0
    return Finding("dead", row.name, quantity, abs(row.get(quantity)), 1.0, NOT_ZERO)


def _cut_off(network: Network, row: Row) -> Finding | None:
    """Check that gradients reach a layer whose outputs are known."""
    is_cut_off = row.name in network.cut_off
    if math.isnan(row.get("unused")) and not is_cut_off:
        return None
    value = 0.0 if is_cut_off else 1.0
    return Finding("cut_off", row.name, "update_natural", value, 1.0, NOT_ZERO, against="a gradient")


def _left_out(network: Network, row: Row) -> Finding | None:
    """Check that a layer is trained if most layers in equal places are."""
    pattern = network.left_out.get(row.name, "")
    if not pattern and math.isnan(row.get("drift_ratio")):
        return None
    value, against = 0.0 if pattern else 1.0, pattern or "others in equal places"
    quantity = "weight_natural" if row.get("weight_natural") == 0 else "drift_ratio"
    return Finding("left_out", row.name, quantity, value, 1.0, NOT_ZERO, against=against)


def _rate(network: Network, row: Row) -> Finding | None:
    """Compare a learning rate with those of the other layers."""
    rate = network.rates.get(row.name)
    if rate is None or row.multiplier != 1.0:  # already corrected
        return None
    value, band = rate.usual_lr * rate.factor, (1 / RATE_LIMIT, RATE_LIMIT)
    return Finding("rate", row.name, "lr", value, rate.usual_lr, band, against="the other layers'")


def _vector_rate(network: Network, row: Row) -> Finding | None:
    """Compare the learning rate of a bias, gain or temperature with that of matrices, if its steps are large."""
    if row.settings.frozen or row.multiplier != 1.0:  # already corrected
        return None
    # A lower bound of the initial size; NaN if that was 0.
    initial_size = row.get("weight_natural") / (1 + row.get("drift_ratio"))
    if not row.lr > 0 or not row.vector_step > VECTOR_STEP * max(1.0, initial_size):
        return None
    matrix_lr = network.matrix_rate * network.expected.get(row.name, 1.0)
    band, against = (0.0, VECTOR_LIMIT), "that of matrices"
    return Finding("vector_rate", row.name, "lr", row.lr, matrix_lr, band, against=against) if matrix_lr > 0 else None


def _exploding(network: Network, row: Row) -> Finding | None:
    """Compare a step with the size of the weights."""
    if row.name in network.from_zero or row.gain < GAINS[0] or row.settings.sizes_own_steps:
        return None  # a matrix that began next to zero takes first steps as large as itself
    if row.slows_down and network.is_early and not row.get("update_natural") > UPDATE_LIMIT:
        return None
    band = (0.0, UPDATE_LIMIT)
    return Finding("exploding", row.name, "update_ratio", row.get("update_ratio"), 1.0, band, 4.0, "its size")


def _grown(row: Row) -> Finding | None:
    """Compare weights that have moved far with the largest healthy ones."""
    if not row.dense or row.settings.sizes_own_steps or math.isnan(drift := row.get("drift_ratio")):
        return None
    high = SIZE_LIMIT if drift > DRIFT_LIMIT else math.inf
    return Finding("grown", row.name, "weight_natural", row.weight, 1.0, (0.0, high), against="a healthy one")


def _rounding(row: Row) -> Finding | None:
    """Compare an update with the smallest one that the dtype of the weights can hold.

    :func:`_dead` checks updates of exactly 0, because no gradient may have arrived.
    """
    update, resolution = row.get("update_fro"), row.settings.resolution
    if resolution < 1e-4 or not row.lr > 0 or not update > 0:  # float32 holds any update
        return None
    smallest = ROUNDING * resolution * row.get("weight_fro")
    return Finding("rounding", row.name, "update_fro", update, smallest, (1.0, math.inf), 4.0, "what it can hold")


def _reference(network: Network, row: Row, condition: SpectralCondition) -> Finding | None:
    """Compare a layer with the reference that the user chose; by default with the other layers."""
    value = row.get(condition.quantity)
    if not value > 0:
        return None
    low, high = condition.limits
    against, lr = "typical", math.nan
    if condition.profile is not None:
        point = condition.profile.at(network.step, row.name)
        reference, against, lr = point.update_natural, "the profile's", point.lr
    elif not row.dense or row.name not in network.compared:
        return None
    elif condition.reference == "theory":
        reference, against = 1.0, "the theory's"
    else:
        ratio = network.comparison.relative_size(row)
        if math.isnan(ratio) or (row.settings.family == "adam" and network.below_eps):  # eps then shrinks updates
            return None
        reference = value / ratio
        if row.info.role == "readout" and row.settings.family != "adam":
            high *= READOUT_FACTOR
        rate = network.rates.get(row.name)
        if rate is not None and max(rate.factor, 1 / rate.factor) > SUSPECT:  # a smaller deviation is then proof
            low, high = math.sqrt(low), math.sqrt(high)
    scale = high if high < math.inf else 1 / low  # as far beyond the band as the band is wide
    return Finding("reference", row.name, condition.quantity, value, reference, (low, high), scale, against, lr)


def _weights(network: Network, row: Row) -> Finding | None:
    """Compare the initial size of weights with that of the other layers."""
    if not row.dense or not network.as_drawn(row) or row.name in network.from_zero or row.scaled:
        return None
    if network.ntk_weights:  # a single finding on the network covers all layers
        return None
    value, ratio = row.get("weight_natural"), network.initial_gain(row)
    low, high = WEIGHT_BAND
    if not ratio > 0 or (ratio < low and network.is_read(row)):
        return None
    if row.info.role == "readout" or not network.fresh:  # many recipes begin readouts and added layers next to zero
        low = 0.0
    return Finding("weights", row.name, "weight_natural", value, value / ratio, (low, high))


def _embedding(network: Network, row: Row) -> Finding | None:
    """Compare an embedding's largest row with usual ones."""
    if row.info.role != "embedding" or row.name not in network.compared or row.name in network.from_zero:
        return None
    size = network.initial_rows(row) if network.exploded else row.get("weight_natural")
    if size < EMBEDDING_BAND[0] and network.is_read(row):
        return None
    low, high = EMBEDDING_BAND
    if network.fresh and network.initial_rows(row) > EMBEDDING_START:
        high = EMBEDDING_START
    return Finding("embedding", row.name, "weight_natural", size, 1.0, (low, high), against="usual")
