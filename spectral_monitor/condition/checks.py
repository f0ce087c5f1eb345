"""What is looked at in every layer at one measurement: findings, before anyone asks how long they last.

Limits are what healthy runs stayed within by a factor of 1.5 at least, and planted faults did not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from spectral_monitor.condition.network import Network, Row
from spectral_monitor.condition.settings import Band, SpectralCondition

UPDATE_LIMIT = 0.5
"""A step that moves a matrix by half its norm, again and again, learns nothing that the next one keeps."""
WEIGHT_LIMIT = 10.0
"""Natural norm of the weights over the median."""
SIZE_LIMIT, DRIFT_LIMIT = 100.0, 10.0
"""Natural norm of weights that have come this many times the norm they began with."""
FIRST_ROOM = 8.0
"""The number of inputs of the first matrix is that of the data, not a width: its band is wider by up to this."""
EMBEDDING_BAND: Band = (1 / 300, 30.0)
"""Root mean square of an embedding's largest row."""
SUSPECT = 10.0
"""A learning rate this many times off the rule of the others is looked at more closely."""
SMALLEST = 5e-324
"""Of floats: anything but 0."""
_MOVES = ("update_natural", "update_fro", "update_norm", "contribution")


@dataclass(frozen=True)
class Finding:
    """A value, what it is held against and how far from that it may be.

    Attributes:
        check: which check it is: ``"dead"``, ``"exploding"``, ``"grown"``, ``"reference"``, ``"weights"`` or
            ``"embedding"``.
        layer: its name.
        quantity: what was looked at.
        value: of it.
        reference: where it should be.
        band: value over reference that is in order.
        against: what the reference is, in words.
        lr: learning rate that goes with the reference; NaN if it has none.
        suspected: whether the settings alone speak for a fault.
    """

    check: str
    layer: str
    quantity: str
    value: float
    reference: float
    band: Band
    against: str = "its share"
    lr: float = math.nan
    suspected: bool = False

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
        """How far outside, as a factor >= 1 on the log scale; below 1 inside."""
        low, high = self.band
        return max(low / self.ratio if self.ratio > 0 else math.inf, self.ratio / high)

    def inside(self, hysteresis: float = 1.0) -> bool:
        """Whether it is in the band, or in the part of it that ``hysteresis`` leaves on the log scale."""
        low, high = self.band
        return bool(low**hysteresis <= self.ratio <= high**hysteresis)


def findings(network: Network, condition: SpectralCondition) -> Iterator[Finding]:
    """Every check that can be made of every layer; none where a value is missing, NaN or inf."""
    for row in network.rows:
        for finding in (
            _dead(network, row),
            _exploding(row),
            _grown(row),
            _reference(network, row, condition),
            _weights(network, row) if condition.reference != "theory" else None,  # which is stricter
            _embedding(network, row),
        ):
            if finding is not None and math.isfinite(finding.value) and finding.reference > 0:
                yield finding


def _dead(network: Network, row: Row) -> Finding | None:
    """An update of exactly nothing, or one that no gradient asked for (weight decay, momentum)."""
    if network.top_lr == 0:
        return None
    known = [key for key in _MOVES if not math.isnan(row.get(key))]
    if not known:
        return None
    quantity = next((key for key in known if row.get(key) == 0), known[-1])
    if math.isnan(network.top_lr) and not any(abs(other.get(quantity)) > 0 for other in network.rows):
        return None  # perhaps its learning rates are 0
    return Finding("dead", row.info.name, quantity, abs(row.get(quantity)), 1.0, (SMALLEST, math.inf))


def _exploding(row: Row) -> Finding:
    limits = (0.0, UPDATE_LIMIT)
    return Finding("exploding", row.info.name, "update_ratio", row.get("update_ratio"), 1.0, limits, "its own size")


def _grown(row: Row) -> Finding | None:
    if not row.dense or math.isnan(drift := row.get("drift_ratio")):
        return None
    high = SIZE_LIMIT if drift > DRIFT_LIMIT else math.inf
    return Finding("grown", row.info.name, "weight_natural", row.get("weight_natural"), 1.0, (0.0, high), "a sound one")


def _reference(network: Network, row: Row, condition: SpectralCondition) -> Finding | None:
    name, quantity = row.info.name, condition.quantity
    value = row.get(quantity)
    if not value > 0:
        return None
    low, high = condition.limits
    if condition.profile is not None:
        point = condition.profile.at(network.step, name)
        return Finding("reference", name, quantity, value, point.update_natural, (low, high), "the profile's", point.lr)
    if not row.dense or name not in network.compared:
        return None
    if condition.reference == "theory":
        return Finding("reference", name, quantity, value, 1.0, (low, high), "what theory has")
    if row is network.peers[0]:
        room = row.info.fan_in / network.usual_fan_in(quantity)
        low, high = low * min(1.0, max(room, 1 / FIRST_ROOM)), high * max(1.0, min(room, FIRST_ROOM))
    suspected = _suspect(network, row)
    if suspected:  # less of a deviation is proof of it
        low, high = math.sqrt(low), math.sqrt(high)
    return Finding("reference", name, quantity, value, network.middle(quantity), (low, high), suspected=suspected)


def _suspect(network: Network, row: Row) -> bool:
    """Whether the settings alone speak for a fault."""
    if row.dense and (network.sgd_rule_under_adam or network.ntk_rates or network.ntk_weights):
        return True
    factor = network.lr_factor(row)
    return factor > 0 and max(factor, 1 / factor) > SUSPECT


def _weights(network: Network, row: Row) -> Finding | None:
    if not row.dense or row.info.name not in network.compared:
        return None
    value, middle = row.get("weight_natural"), network.middle("weight_natural")
    return Finding(
        "weights", row.info.name, "weight_natural", value, middle, (0.0, WEIGHT_LIMIT), "the median of the layers"
    )


def _embedding(network: Network, row: Row) -> Finding | None:
    if row.info.role != "embedding" or row.info.name not in network.compared:
        return None
    size = row.get("weight_natural")
    return Finding("embedding", row.info.name, "weight_natural", size, 1.0, EMBEDDING_BAND, "what is usual")
