"""A measurement as the judge reads it: matrices with their values, and what the layers have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from spectral_monitor.functional.norms import geometric_median
from spectral_monitor.measurement import LOST, LayerInfo, Measurement

SAME = 1.05
"""Learning rates that differ by less follow one rule."""
LEVEL = 2.0
"""A rule must tell layers apart by more than this to be recognised."""

WIDE = 32
"""Fewer inputs than this tell entries of size 1 from entries of size 1/sqrt(fan_in) badly."""

RULES: dict[str, Callable[[LayerInfo], float]] = {
    "one rate": lambda info: 1.0,
    "1/fan_in": lambda info: 1.0 / info.fan_in,
    "fan_out/fan_in": lambda info: info.fan_out / info.fan_in,
}
"""How learning rates are commonly spread over matrices, the plainest first."""

READ = frozenset(
    {"weight_natural", "weight_fro", "update_natural", "update_norm", "update_fro", "update_ratio"}
    | {"drift_ratio", "contribution", "lr"}
)
"""Quantities that verdicts and their causes are read off."""

Columns = Mapping[str, Mapping[str, float]]
"""Quantity -> layer -> value, of layers that have one."""

_ADAM = ("adam", "lion", "adafactor", "adopt", "signsgd", "sign_sgd", "radam", "nadam", "lamb")


def family(optimizers: Iterable[str]) -> str:
    """``"adam"`` where every entry moves by about the learning rate, ``"sgd"``, or ``""`` if neither or mixed.

    Args:
        optimizers: class names of the optimizers; names of their base classes may be among them.

    Example:
        >>> family(["FusedAdamW", "Optimizer"]), family(["SGD"]), family(["Muon", "AdamW"])
        ('adam', 'sgd', '')
    """
    names = [name.lower() for name in optimizers if name.lower() not in ("optimizer", "object")]
    adam = [name for name in names if any(known in name for known in _ADAM)]
    sgd = [name for name in names if name not in adam and name.endswith("sgd")]
    if "muon" in " ".join(names):
        return ""
    return "adam" if adam and not sgd else "sgd" if sgd and not adam else ""


def columns(measurement: Measurement) -> dict[str, dict[str, float]]:
    """What a measurement has of :data:`READ`, and ``lost`` beside contributions: 1 where that is 0 although a gradient
    arrives, else 0.
    """
    names = [info.name for info in measurement.layers]
    given = {key: tensor.tolist() for key, tensor in measurement.values.items() if key in READ}
    found = {key: {n: x for n, x in zip(names, some, strict=True) if not math.isnan(x)} for key, some in given.items()}
    if "contribution" in found:
        why = {
            name: measurement.why("contribution", name) if x == 0 else "" for name, x in found["contribution"].items()
        }
        found["lost"] = {name: float(reason == LOST) for name, reason in why.items()}
    return found


@dataclass(frozen=True)
class Row:
    """One layer and its values."""

    info: LayerInfo
    values: Mapping[str, float]

    def get(self, quantity: str) -> float:
        """A value, NaN if it was not measured."""
        return self.values.get(quantity, math.nan)

    @property
    def dense(self) -> bool:
        """Whether it maps dense features, and so takes part in the balance."""
        return self.info.role in ("operator", "readout")


@dataclass(frozen=True)
class Network:
    """All layers at one measurement.

    Attributes:
        step: of the measurement.
        rows: matrices that are judged.
        vectors: biases and gains by name.
        compared: names of the layers that may be compared with each other: not those whose weights are tied.
        family: of the optimizer, as :func:`family` has it.
        from_zero: names of the layers that began at zero.
    """

    step: int
    rows: tuple[Row, ...]
    vectors: Mapping[str, Row] = field(default_factory=dict)
    compared: frozenset[str] = frozenset()
    family: str = ""
    from_zero: frozenset[str] = frozenset()
    _middles: dict[str, float] = field(default_factory=dict, repr=False, compare=False)
    _factors: dict[tuple[float, int, int], float] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def read(
        cls,
        measurement: Measurement,
        known: Columns,
        optimizers: Sequence[str] = (),
        tied: Mapping[str, str] | None = None,
    ) -> Network:
        """A measurement.

        Args:
            measurement: of which the step and the layers count.
            known: its :func:`columns`, and those that were measured before but not this time.
            optimizers: their class names.
            tied: layer -> layer that counts its parameters.
        """
        tied = tied or {}
        all_rows = [
            Row(info, {key: column[info.name] for key, column in known.items() if info.name in column})
            for info in measurement.layers
        ]
        rows = tuple(row for row in all_rows if row.info.role != "vector" and row.info.name not in tied)
        vectors = {row.info.name: row for row in all_rows if row.info.role == "vector"}
        apart = frozenset(row.info.name for row in rows) - set(tied.values())
        return cls(measurement.step, rows, vectors, apart, family(optimizers))

    @cached_property
    def peers(self) -> tuple[Row, ...]:
        """Operators and readouts, compared with each other."""
        return tuple(row for row in self.rows if row.dense and row.info.name in self.compared)

    def middle(self, quantity: str) -> float:
        """Geometric median over the peers."""
        if quantity not in self._middles:
            self._middles[quantity] = geometric_median(row.get(quantity) for row in self._measures(quantity))
        return self._middles[quantity]

    def others(self, quantity: str, row: Row) -> float:
        """Geometric median over the peers but one."""
        return geometric_median(other.get(quantity) for other in self._measures(quantity) if other is not row)

    def _measures(self, quantity: str) -> Sequence[Row]:
        """Peers that others are held against: the size of what began at zero says nothing of that of weights."""
        if quantity != "weight_natural":
            return self.peers
        return [row for row in self.peers if row.info.name not in self.from_zero]

    def usual_fan_in(self, quantity: str) -> float:
        """Geometric median of the number of inputs, over the peers that make up :meth:`middle`."""
        return geometric_median(row.info.fan_in for row in self._measures(quantity) if row.get(quantity) > 0)

    @cached_property
    def top_lr(self) -> float:
        """Largest learning rate, NaN if none is known."""
        return max((lr for row in self.rows if not math.isnan(lr := row.get("lr"))), default=math.nan)

    def rule(self, rows: Sequence[Row] | None = None) -> str:
        """Which of :data:`RULES` the peers' learning rates follow, the plainest that fits; empty if none."""
        given = self.peers if rows is None else rows
        return next((name for name in RULES if self._follows(name, given)), "")

    def _follows(self, name: str, rows: Sequence[Row]) -> bool:
        moving = [row for row in rows if row.get("lr") > 0]
        sizes = [RULES[name](row.info) for row in moving]
        units = [row.get("lr") / size for row, size in zip(moving, sizes, strict=True)]
        if not units or max(units) > SAME * min(units):
            return False
        return name == "one rate" or max(sizes) > LEVEL * min(sizes)

    @cached_property
    def sgd_rule_under_adam(self) -> bool:
        """Whether learning rates are spread by the rule of another family of optimizers."""
        return self.family == "adam" and self.rule() == "fan_out/fan_in"

    @cached_property
    def ntk_rates(self) -> bool:
        """Whether learning rates are those of the neural tangent parametrization."""
        ambiguous = self._follows("fan_out/fan_in", self.peers)
        return self.family == "sgd" and self.rule() == "1/fan_in" and not ambiguous

    @cached_property
    def ntk_weights(self) -> bool:
        """Whether weights are those of the neural tangent parametrization: entries of size 1, whatever the width."""
        sizes = [row.get("weight_fro") / math.sqrt(math.prod(row.info.shape)) for row in self.peers]
        wide = max((row.info.fan_in for row in self.peers), default=0) >= WIDE
        drifts = [row.get("drift_ratio") for row in self.peers]  # no init is this large, but what exploded is
        return wide and all(1 / LEVEL < size < LEVEL for size in sizes) and not any(drift > 1 for drift in drifts)

    def lr_factor(self, row: Row) -> float:
        """Learning rate of a layer over what it would be by the rule the others follow; NaN if unknown."""
        alike = (row.get("lr"), row.info.fan_out, row.info.fan_in if row.dense else 0)
        if alike not in self._factors:  # there are hundreds of layers, but few kinds
            self._factors[alike] = self._lr_factor(row)
        return self._factors[alike]

    def _lr_factor(self, row: Row) -> float:
        lr = row.get("lr")
        others = [other for other in self.peers if other is not row and other.get("lr") > 0]
        if not others or math.isnan(lr):
            return math.nan
        if row in self.peers and lr > 0 and self.rule():
            return 1.0
        rule = RULES[(row.dense and self.rule(others)) or "one rate"]
        return lr / (geometric_median(other.get("lr") / rule(other.info) for other in others) * rule(row.info))
