"""A measurement as the judge reads it: every layer with its values and settings, and what is typical of its kind."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from spectral_monitor.condition.comparison import Comparison
from spectral_monitor.condition.optimizers.across import rates_of
from spectral_monitor.condition.optimizers.hyperparameters import UNKNOWN, Hyperparameters
from spectral_monitor.condition.optimizers.left_out import FRESH, cut_off, never_trained
from spectral_monitor.condition.optimizers.rates import LEVEL, Rate, Rated, follows, rule_of
from spectral_monitor.condition.row import Columns, Row
from spectral_monitor.fitting.medians import geometric_median
from spectral_monitor.measurement import DENSE, Measurement

WIDE = 32
"""Fewer inputs than this tell entries of size 1 from entries of size 1/sqrt(fan_in) badly."""
GAINS = (0.1, 1.6)
"""Median gain of the weights of healthy networks at the start."""
MOVED = 1.0
"""Weights that have come this many times the norm they began with are not a matter of initialisation."""
EXPLODED = 1.0
"""A step that is larger than the weights, which no healthy run comes near (0.25), has nothing left of them."""

EARLY = 8
"""Training has just begun up to this step."""

NEXT_TO_ZERO = 0.1
"""Part of the usual gain below which the first steps of weights may be larger than they are."""

SMALL_GAIN = 1e-3
"""Gains of residual branches begin at 1e-4 to 1e-6, if not at 1 or 0."""

NOTHING_LEFT = 1e-3
"""A loss above this has not come to its end where no gradient arrives: the network is dead."""

PART = 3
"""Operators and readouts of one optimizer that are judged as a network of their own."""

ALL = -1
"""In the place of an optimizer's number: all of them."""

READ_SIZE = 0.2
"""RMS of a matrix's outputs over its gain: inputs that are smaller are of no usual size."""


@dataclass(frozen=True)
class Network:
    """All layers at one measurement.

    Attributes:
        step: of the measurement.
        rows: matrices that are judged.
        vectors: biases and gains by name.
        compared: names of the layers that may be compared with others.
        from_zero: names of the layers that began at zero.
        expected: layer -> factor on its learning rate that the user has declared.
        fresh: whether weights began as they are drawn, not as an earlier training left them.
        new: layers that began as they are drawn although the network did not.
        thawed: layers that were frozen at an earlier measurement.
        largest_steps: layer -> its largest relative update so far that a gradient was behind, at the peak of its
            learning rate; 0 before there was one.
        loss: of the step; NaN if it is not known.
        initial_sizes: layer -> gain of its weights over the usual one when it was first measured; of an
            embedding, the size of its largest row.
    """

    step: int
    rows: tuple[Row, ...]
    vectors: Mapping[str, Row] = field(default_factory=dict)
    compared: frozenset[str] = frozenset()
    from_zero: frozenset[str] = frozenset()
    expected: Mapping[str, float] = field(default_factory=dict)
    fresh: bool = True
    new: frozenset[str] = frozenset()
    thawed: frozenset[str] = frozenset()
    largest_steps: Mapping[str, float] = field(default_factory=dict)
    initial_sizes: Mapping[str, float] = field(default_factory=dict)
    loss: float = math.nan

    @classmethod
    def read(
        cls,
        measurement: Measurement,
        known: Columns,
        settings: Mapping[str, Hyperparameters] | None = None,
        tied: Mapping[str, str] | None = None,
        expected: Mapping[str, float] | None = None,
    ) -> Network:
        """Return the rows of a measurement.

        Of a matrix that is embedding and readout at once the readout counts.

        Args:
            measurement: of which the step and the layers count.
            known: its :func:`columns`, and those that were measured before but not this time.
            settings: layer -> its optimizer's settings.
            tied: layer -> layer that counts its parameters.
            expected: as the attribute.
        """
        tied, settings = tied or {}, settings or {}
        roles = {info.name: info.role for info in measurement.layers}
        read_by = {owner: name for name, owner in tied.items() if roles.get(name) in DENSE}
        hidden = (set(tied) - set(read_by.values())) | {
            owner for owner, name in read_by.items() if roles.get(owner) == "embedding"
        }
        hidden |= {name for owner, name in read_by.items() if owner not in hidden}  # counted there already
        all_rows = []
        for info in measurement.layers:
            row = Row(info, {key: column[info.name] for key, column in known.items() if info.name in column})
            its = settings.get(info.name, UNKNOWN)
            # Networks that are trained against each other are frozen in turns.
            its = replace(its, frozen=False) if its.frozen and abs(row.get("contribution")) > 0 else its
            all_rows.append(replace(row, settings=its))
        rows = tuple(row for row in all_rows if row.info.is_matrix and row.info.name not in hidden)
        vectors = {row.info.name: row for row in all_rows if row.info.role == "vector"}
        # The first steps of RAdam are no updates of its kind.
        compared = frozenset(row.info.name for row in rows if row.settings.rectified > 0)
        loss = measurement.summary.get("loss", math.nan)
        return cls(measurement.step, rows, vectors, compared, expected=expected or {}, loss=loss)

    def row(self, name: str) -> Row | None:
        """Return a layer by its name; ``None`` if it is not judged."""
        return self._by_name.get(name)

    def parameter(self, name: str) -> Row | None:
        """Return a layer, bias or gain by its name; ``None`` if it is not judged."""
        return self.row(name) or self.vectors.get(name)

    @cached_property
    def _by_name(self) -> dict[str, Row]:
        return {row.info.name: row for row in self.rows}

    @cached_property
    def peers(self) -> tuple[Row, ...]:
        """Operators and readouts, compared with each other."""
        return tuple(row for row in self.rows if row.dense and row.info.name in self.compared)

    @cached_property
    def moved_by_rate(self) -> tuple[Row, ...]:
        """Peers whose steps follow from a learning rate."""
        return tuple(row for row in self.peers if not row.settings.sizes_own_steps)

    def peers_of(self, row: Row) -> tuple[Row, ...]:
        """Return the layers that a layer is compared with, itself included: those of the same optimizer.

        None are, where the optimizer sizes the steps of every entry by itself.
        """
        return self._by_owner.get((row.settings.owner, row.settings.family), ())

    @cached_property
    def _by_owner(self) -> dict[tuple[int, str], tuple[Row, ...]]:
        found: dict[tuple[int, str], list[Row]] = defaultdict(list)
        for row in self.moved_by_rate:
            found[row.settings.owner, row.settings.family].append(row)
        return {key: tuple(some) for key, some in found.items()}

    @cached_property
    def parts(self) -> dict[int, Network]:
        """The layers of each optimizer, by its number, where several have enough of them to be judged apart; else the
        network.

        Networks that are trained against each other, or side by side, need not move at one pace.
        """
        found: dict[int, list[Row]] = defaultdict(list)
        for row in self.moved_by_rate:
            found[row.settings.owner].append(row)
        large = {owner: rows for owner, rows in found.items() if len(rows) >= PART}
        if len(large) < 2:
            return {ALL: self}
        return {owner: replace(self, rows=tuple(rows)) for owner, rows in large.items()}

    @cached_property
    def rates(self) -> dict[str, Rate]:
        """Every matrix's learning rate beside the usual one of its optimizer."""
        return rates_of(self)

    @cached_property
    def _comparison(self) -> Comparison:
        return Comparison(self)

    def relative_size(self, row: Row) -> float:
        """Return the size of a layer's update over the typical one, 1 for the median layer; NaN if it has no peers."""
        return self._comparison.relative_size(row)

    def others(self, quantity: str, row: Row) -> float:
        """Return the geometric median of a quantity over the peers but one."""
        return self._comparison.others(quantity, row)

    @cached_property
    def corrected(self) -> bool:
        """Return whether a correction multiplies learning rates; updates are then meant to have equal natural norms."""
        return any(row.values.get("lr_multiplier", 1.0) != 1.0 for row in self.rows)

    @property
    def is_early(self) -> bool:
        """Return whether training has just begun."""
        return self.step <= EARLY

    @property
    def looks_fresh(self) -> bool:
        """True if the median weight is as random as a Gaussian one; trained weights have less stable rank."""
        return not geometric_median(row.randomness for row in self.peers) < FRESH

    @property
    def just_drawn(self) -> frozenset[str]:
        """The layers that are as random as Gaussian matrices, where the network is not."""
        drawn = (row.info.name for row in self.peers if row.randomness > FRESH)
        return frozenset() if self.looks_fresh else frozenset(drawn)

    @cached_property
    def finished(self) -> bool:
        """Return whether no layer gets a gradient although gradients have moved them: the loss of this batch is exactly
        0.
        """
        silent = [not row.has_gradient for row in self.peers]
        drift = geometric_median(row.get("drift_ratio") for row in self.peers)
        taught = any(self.largest_steps.get(row.info.name, 0.0) > 0 for row in self.peers)
        return bool(silent) and all(silent) and taught and drift > 0.01 and not self.loss > NOTHING_LEFT

    def usual_gain(self, row: Row) -> float:
        """Return the median gain of the other layers' weights, no further off than healthy ones ever are."""
        low, high = GAINS
        return min(max(self.others("weight_natural", row), low), high)  # NaN stays what it is

    @cached_property
    def drift(self) -> float:
        """The way of the median layer since the start, relative to its size then; NaN of fewer than two layers."""
        drifts = [row.get("drift_ratio") for row in self.moved_by_rate if not self.began_small(row)]
        return geometric_median(drifts) if sum(drift > 0 for drift in drifts) > 1 else math.nan

    @cached_property
    def left_out(self) -> dict[str, str]:
        """Layers that no optimizer trains, though it trains most in equal places: name -> these.

        Where some have thawed, others will, or are meant to stay frozen.
        """
        rows = [row for row in self.rows if not (self.thawed and row.settings.frozen)]
        return never_trained(rows, self.fresh)

    @cached_property
    def cut_off(self) -> frozenset[str]:
        """Layers that an optimizer holds but no gradient has reached, though it reaches others."""
        return cut_off(self.rows)

    @cached_property
    def exploded(self) -> bool:
        """Return whether most layers have made steps larger than their weights, so that sizes tell of no beginning."""
        steps = [self.largest_steps.get(row.info.name, math.nan) for row in self.peers]
        return sum(step > EXPLODED for step in steps) > len(steps) / 2

    def as_drawn(self, row: Row) -> bool:
        """Return whether a layer began as its weights were drawn."""
        return self.fresh or row.info.name in self.new

    def initial_gain(self, row: Row) -> float:
        """Return how many times the usual gain a layer's weights had as they began; NaN once updates replaced them.

        It is the first that was measured, for weight decay changes the weights, and what is usual. After an explosion
        it is told all the same, so that what set it off is still known.
        """
        if self.exploded:
            return self.initial_sizes.get(row.info.name, math.nan)
        moved = row.get("drift_ratio") > MOVED and self.step > 1  # the first step begins with what was drawn
        return math.nan if moved else self.initial_sizes.get(row.info.name, row.gain / self.usual_gain(row))

    def began_small(self, row: Row) -> bool:
        """Return whether a layer began at zero or so near that relative to its size any step is large."""
        began = self.initial_sizes.get(row.info.name, math.nan)
        return row.info.name in self.from_zero or began < NEXT_TO_ZERO

    def initial_rows(self, row: Row) -> float:
        """Return the size of an embedding's largest row when it was first measured."""
        return self.initial_sizes.get(row.info.name, row.get("weight_natural"))

    def is_read(self, row: Row) -> bool:
        """Return whether the next matrix gets inputs of usual size although a layer's weights are small.

        A residual stream passes by the layer, or a norm comes in between.
        """
        following = self.rows[self.rows.index(row) + 1 :]
        reader = next((other for other in following if other.dense and other.get("feature_rms") >= 0), None)
        return reader is not None and reader.get("feature_rms") > READ_SIZE * reader.gain

    @cached_property
    def matrix_rate(self) -> float:
        """The learning rate of the median matrix; NaN if none is known."""
        return geometric_median(row.lr for row in self.moved_by_rate if row.lr > 0)

    @cached_property
    def below_eps(self) -> bool:
        """Return whether gradients are smaller than the eps of an optimizer like Adam, in the median layer.

        Their entries are at least as large as the update's contribution over its size (Cauchy-Schwarz).
        """
        sizes = [row.gradient_entry / row.settings.eps for row in self.peers if row.settings.eps > 0]
        return geometric_median(sizes) < 1

    @cached_property
    def has_small_gains(self) -> bool:
        """Return whether gains next to zero, as of LayerScale, hold gradients of layers back until they have grown."""
        gains = (row.get("weight_natural") for name, row in self.vectors.items() if not name.endswith("bias"))
        return any(0 < gain < SMALL_GAIN for gain in gains)

    @cached_property
    def top_lr(self) -> float:
        """Largest learning rate, NaN if none is known."""
        return max((row.lr for row in self.rows if not math.isnan(row.lr)), default=math.nan)

    @cached_property
    def family(self) -> str:
        """The family of the optimizers, empty if there are several."""
        found = {row.settings.family for row in self.peers}
        return found.pop() if len(found) == 1 else ""

    @cached_property
    def _rated(self) -> list[Rated]:
        return [(row.info, row.lr) for row in self.peers]

    @cached_property
    def rule(self) -> str:
        """The rule by which learning rates are spread over layers; empty if none fits."""
        return rule_of(self._rated)

    @cached_property
    def sgd_rule_under_adam(self) -> bool:
        """Return whether learning rates are spread by the rule of another family of optimizers."""
        return self.family == "adam" and self.rule == "fan_out/fan_in" and not self.corrected

    @cached_property
    def ntk_rates(self) -> bool:
        """Return whether learning rates are those of the neural tangent parametrization."""
        ambiguous = follows("fan_out/fan_in", self._rated)
        return self.family == "sgd" and self.rule == "1/fan_in" and not ambiguous and not self.corrected

    @cached_property
    def ntk_weights(self) -> bool:
        """True if weights are those of the neural tangent parametrization, entries of size 1 at any width, under SGD.

        Under Adam entries move by the learning rate whatever their gradients, and features with them.
        """
        sizes = [row.get("weight_fro") / math.sqrt(math.prod(row.info.shape)) for row in self.peers]
        wide = max((row.info.fan_in for row in self.peers), default=0) >= WIDE
        drifts = [row.get("drift_ratio") for row in self.peers]  # no init is this large, but what exploded is
        alike = all(1 / LEVEL < size < LEVEL for size in sizes)
        return self.family == "sgd" and wide and alike and not any(drift > 1 for drift in drifts)
