"""Findings: single layers held against their limits at one measurement, healthy or not, before evidence is weighed.

Limits were found on the development half of the recipe suite (``benchmarks/recipes``) and are reported on the other.
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
"""A step that moves a matrix by its own norm, again and again, learns nothing that the next one keeps."""
WEIGHT_BAND: Band = (1 / 30, 10.0)
"""Gain of the weights over the median; recipes begin residual branches with up to 14 times smaller ones."""
SIZE_LIMIT, DRIFT_LIMIT = 100.0, 10.0
"""Natural norm of weights that have come this many times the norm they began with."""
EMBEDDING_BAND: Band = (1 / 300, 30.0)
"""Root mean square of an embedding's largest row."""
RATE_LIMIT = 7.0
"""A learning rate this many times off the others' is off by itself, unless it is so on purpose."""
VECTOR_LIMIT, VECTOR_STEP = 30.0, 1.0
"""The same of biases, gains and temperatures over matrices, where a step changes their entries by more than 1, and by
more than the size they began with.
"""
SUSPECT = 2.5
"""A learning rate that is off by this much narrows the band of the update."""
READOUT_ROOM = 4.0
"""A readout's update may be larger than those of hidden layers by this much more, where none is like Adam's."""
ROUNDING = 0.25
"""An update below this many times the distance between neighbouring numbers, relative to the weights, is rounded."""
NO_STEP = "no optimizer made a step"
COMPILED_STEP = "the optimizer's step is compiled, where updates cannot be seen"
DIVIDED = "several optimizers step the parameters it is computed from"
"""Why no update was measured."""
AT_ONCE = 1.0 + 1e-9
"""The scale of a finding for which whatever is outside its band is evidence enough."""
SMALLEST = 5e-324
"""Of floats: anything but 0."""
_MOVES = ("update_natural", "update_fro", "update_norm", "contribution")


@dataclass(frozen=True)
class Finding:
    """A value, what it is held against and how far from that it may be.

    Attributes:
        check: which check it is: ``"dead"``, ``"cut_off"``, ``"rate"``, ``"vector_rate"``, ``"exploding"``,
            ``"grown"``, ``"rounding"``, ``"reference"``, ``"weights"`` or ``"embedding"``.
        layer: its name.
        quantity: what was looked at.
        value: of it.
        reference: where it should be.
        band: value over reference that is healthy.
        scale: factor beyond the band that is evidence enough by itself; :data:`AT_ONCE` if any is.
        against: what the reference is, in words.
        lr: learning rate that goes with the reference; NaN if it has none.
        layers: those it is about, where that is neither one layer nor the whole network; else empty.
    """

    check: str
    layer: str
    quantity: str
    value: float
    reference: float
    band: Band
    scale: float = 2.0
    against: str = "typical"
    lr: float = math.nan
    layers: tuple[str, ...] = ()

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
        """Return how far outside, as a factor >= 1; below 1 inside."""
        low, high = self.band
        if self.ratio == 0:
            return math.inf if low else 0.0
        return max(low / self.ratio, self.ratio / high)

    @property
    def evidence(self) -> float:
        """Return what this measurement adds: 1 is enough for a verdict, below 0 speaks against it."""
        if self.excess == math.inf:
            return math.inf if self.scale <= 1 else 0.5  # exactly nothing moved: once may be chance
        if self.excess == 0:
            return -math.inf  # nothing could be further inside
        return math.log(self.excess) / math.log(self.scale)

    def inside(self, hysteresis: float = 1.0) -> bool:
        """Return whether it is in the band, or in the part of it that ``hysteresis`` leaves on the log scale."""
        low, high = self.band
        return bool(low**hysteresis <= self.ratio <= high**hysteresis)


def findings(network: Network, condition: SpectralCondition) -> Iterator[Finding]:
    """Yield every check that can be made of every layer; none where a value is missing, NaN or inf."""
    for row in network.rows:
        for finding in (
            _dead(network, row),
            _cut_off(network, row),
            _left_out(network, row),
            _rate(network, row) if condition.profile is None else None,  # which has every layer's own
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
    """Return an update of exactly nothing, or one that no gradient asked for (weight decay, momentum)."""
    if network.top_lr == 0 or row.settings.frozen:
        return None
    if network.finished or (row.get("lost") > 0 and row.to_peak >= 1 / FADED):
        return None
    known = [key for key in _MOVES if not math.isnan(row.get(key))]
    if not known:
        return None
    quantity = next((key for key in known if row.get(key) == 0), known[-1])
    if math.isnan(network.top_lr) and not any(abs(other.get(quantity)) > 0 for other in network.rows):
        return None  # perhaps its learning rates are 0
    return Finding("dead", row.info.name, quantity, abs(row.get(quantity)), 1.0, (SMALLEST, math.inf))


def _cut_off(network: Network, row: Row) -> Finding | None:
    """Return whether gradients reach it; only of layers whose outputs are known."""
    cut_off = row.info.name in network.cut_off
    if math.isnan(row.get("unused")) and not cut_off:
        return None
    value = 0.0 if cut_off else 1.0
    return Finding("cut_off", row.info.name, "update_natural", value, 1.0, (SMALLEST, math.inf), against="a gradient")


def _left_out(network: Network, row: Row) -> Finding | None:
    """Return whether it is trained; only of layers in a place that others have too."""
    pattern = network.left_out.get(row.info.name, "")
    if not pattern and math.isnan(row.get("drift_ratio")):
        return None
    value, against = 0.0 if pattern else 1.0, pattern or "others in equal places"
    return Finding("left_out", row.info.name, "weight_natural", value, 1.0, (SMALLEST, math.inf), against=against)


def _rate(network: Network, row: Row) -> Finding | None:
    """Return a learning rate beside those of the others; that needs no measurement but is certain."""
    rate = network.rates.get(row.info.name)
    if rate is None or row.values.get("lr_multiplier", 1.0) != 1.0:  # a correction has seen to it
        return None
    value = rate.usual * rate.factor
    limit = RATE_LIMIT
    band, against = (1 / limit, limit), "the other layers'"
    return Finding("rate", row.info.name, "lr", value, rate.usual, band, against=against, lr=rate.usual)


def _vector_rate(network: Network, row: Row) -> Finding | None:
    """Return the learning rate of a bias, gain or temperature whose entries change by more than outputs are large."""
    if row.settings.frozen or row.values.get("lr_multiplier", 1.0) != 1.0:  # a correction has seen to it
        return None
    began = row.get("weight_natural") / (1 + row.get("drift_ratio"))  # or less; NaN where that was 0
    if not row.lr > 0 or not row.vector_step > VECTOR_STEP * max(1.0, began):
        return None
    usual = network.matrix_rate * network.expected.get(row.info.name, 1.0)
    band, against = (0.0, VECTOR_LIMIT), "that of matrices"
    return Finding("vector_rate", row.info.name, "lr", row.lr, usual, band, against=against) if usual > 0 else None


def _exploding(network: Network, row: Row) -> Finding | None:
    if row.info.name in network.from_zero or row.gain < GAINS[0] or row.settings.sizes_own_steps:
        return None  # the first steps of a matrix that began next to zero are as large as itself
    if (
        network.is_early
        and "adagrad" in row.settings.optimizer.lower()
        and not row.get("update_natural") > UPDATE_LIMIT
    ):
        return None  # its first step moves every entry by the whole rate, the next ones by less and less
    limits = (0.0, UPDATE_LIMIT)
    return Finding("exploding", row.info.name, "update_ratio", row.get("update_ratio"), 1.0, limits, 4.0, "its size")


def _grown(row: Row) -> Finding | None:
    if not row.dense or row.settings.sizes_own_steps or math.isnan(drift := row.get("drift_ratio")):
        return None
    high = SIZE_LIMIT if drift > DRIFT_LIMIT else math.inf
    return Finding("grown", row.info.name, "weight_natural", row.weight, 1.0, (0.0, high), against="a healthy one")


def _rounding(row: Row) -> Finding | None:
    """Return an update that is smaller than what the dtype of the weights can hold beside them.

    Where nothing at all is left of it, no gradient may have arrived: that is for :func:`_dead` to tell.
    """
    weight, update = row.get("weight_fro"), row.get("update_fro")
    smallest = ROUNDING * row.settings.resolution * weight
    if row.settings.resolution < 1e-4 or not row.lr > 0 or not update > 0:  # float32 holds any update
        return None
    return Finding("rounding", row.info.name, "update_fro", update, smallest, (1.0, math.inf), 4.0, "what it can hold")


def _reference(network: Network, row: Row, condition: SpectralCondition) -> Finding | None:
    name, quantity = row.info.name, condition.quantity
    value = row.get(quantity)
    if not value > 0:
        return None
    low, high = condition.limits
    if condition.profile is not None:
        point = condition.profile.at(network.step, name)
        reference = point.update_natural
        return Finding(
            "reference", name, quantity, value, reference, (low, high), _room(low, high), "the profile's", point.lr
        )
    if not row.dense or name not in network.compared:
        return None
    if condition.reference == "theory":
        return Finding("reference", name, quantity, value, 1.0, (low, high), _room(low, high), "the theory's")
    ratio = network.relative_size(row)
    if math.isnan(ratio) or (row.settings.family == "adam" and network.below_eps):  # then no update has its size
        return None
    if row.info.role == "readout" and row.settings.family != "adam":
        high *= READOUT_ROOM
    rate = network.rates.get(name)
    if rate is not None and max(rate.factor, 1 / rate.factor) > SUSPECT:  # less of a deviation is proof of it
        low, high = math.sqrt(low), math.sqrt(high)
    return Finding("reference", name, quantity, value, value / ratio, (low, high), _room(low, high))


def _room(low: float, high: float) -> float:
    """Return how far beyond a band is evidence enough: as far as it reaches up, or down where it has no end above."""
    return high if high < math.inf else 1 / low


def _weights(network: Network, row: Row) -> Finding | None:
    """Return the size of weights as they began; how updates change it is another question."""
    if not row.dense or not network.as_drawn(row) or row.info.name in network.from_zero or row.scaled:
        return None
    if network.ntk_weights:  # which is said of all of them at once
        return None
    value, ratio = row.get("weight_natural"), network.initial_gain(row)
    low, high = WEIGHT_BAND
    if not ratio > 0 or (ratio < low and network.is_read(row)):
        return None
    # Many recipes begin readouts next to zero, and what is added to a trained network.
    low = 0.0 if row.info.role == "readout" or not network.fresh else low
    return Finding("weights", row.info.name, "weight_natural", value, value / ratio, (low, high))


def _embedding(network: Network, row: Row) -> Finding | None:
    if row.info.role != "embedding" or row.info.name not in network.compared:
        return None
    if row.info.name in network.from_zero:
        return None
    size = network.initial_rows(row) if network.exploded else row.get("weight_natural")
    if size < EMBEDDING_BAND[0] and network.is_read(row):
        return None
    return Finding("embedding", row.info.name, "weight_natural", size, 1.0, EMBEDDING_BAND, against="usual")
