"""A measurement as the judge reads it: each layer with its values and settings, and what is typical of its peers."""

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
from spectral_monitor.fitting.medians import geometric_median, nanmax
from spectral_monitor.measurement import DENSE, Measurement

SPREADING_INPUTS = 8
"""From this fan_in on, the inputs of a matrix should not lie along one direction."""
MIN_SPREAD = 0.0025
"""Inputs do not differ if their stable rank is this close to 1; in healthy networks it is at least 1.03."""
WIDE = 32
"""With fewer inputs, entries of size 1 and of size 1/sqrt(fan_in) are hard to distinguish."""
GAINS = (0.1, 1.6)
"""Range of the median gain of healthy networks at the start."""
MOVED = 1.0
"""Weights that have moved by more than this many times their initial norm tell nothing about initialization."""
EXPLODED = 1.0
"""A step larger than the weights replaces them; healthy runs stay below 0.25."""
EARLY = 8
"""Last step of the beginning of training."""
NEXT_TO_ZERO = 0.1
"""Weights below this part of the usual gain may take first steps larger than themselves."""
SMALL_GAIN = 1e-3
"""Gains of residual branches begin at 1e-4 to 1e-6, if not at 1 or 0."""
NOTHING_LEFT = 1e-3
"""If no gradient arrives although the loss is above this, the network is dead rather than finished."""
PART = 3
"""From this number of operators and readouts on, the layers of one optimizer are judged as a network of their own."""
ALL = -1
"""Stands for all layers where other keys are the numbers of optimizers."""
READ_SIZE = 0.2
"""If the RMS of a matrix's outputs over its gain is below this, its inputs are unusually small."""


@dataclass(frozen=True)
class Network:
    """All layers at one measurement."""

    step: int
    rows: tuple[Row, ...]  # matrices that are judged
    vectors: Mapping[str, Row] = field(default_factory=dict)  # biases and gains by name
    compared: frozenset[str] = frozenset()  # layers that may be compared with others
    from_zero: frozenset[str] = frozenset()  # layers that began at zero
    late_layers: frozenset[str] = frozenset()  # the few layers that got no gradient while those were zero
    # layer -> factor on its learning rate that the user has declared
    expected: Mapping[str, float] = field(default_factory=dict)
    fresh: bool = True  # whether weights were drawn at random, not left by an earlier training
    new: frozenset[str] = frozenset()  # layers that were drawn at random although the network was not
    thawed: frozenset[str] = frozenset()  # layers that were frozen at an earlier measurement
    # layer -> its largest update-to-weight ratio caused by a gradient so far, at the rate's peak; 0 before the first
    largest_steps: Mapping[str, float] = field(default_factory=dict)
    # layer -> gain of its weights over the usual one when first measured; for an embedding, the size of its largest row
    initial_sizes: Mapping[str, float] = field(default_factory=dict)
    loss: float = math.nan  # loss of the step; NaN if unknown
    clip_factor: float = 1.0  # size of gradients after clipping over that before; 1 if unknown
    forgotten: tuple[str, ...] = ()  # parameters other than matrices that get gradients but that no optimizer holds

    @classmethod
    def read(
        cls,
        measurement: Measurement,
        columns: Columns,
        settings: Mapping[str, Hyperparameters] | None = None,
        tied: Mapping[str, str] | None = None,
        expected: Mapping[str, float] | None = None,
    ) -> Network:
        """Return the network at a measurement.

        A matrix that is both embedding and readout is judged as the readout.

        Args:
            columns: its :func:`~spectral_monitor.condition.row.columns`, and earlier ones of quantities that it lacks.
            tied: layer -> layer that counts its parameters.
            expected: layer -> factor on its learning rate that the user has declared.
        """
        tied, settings = tied or {}, settings or {}
        roles = {info.name: info.role for info in measurement.layers}
        as_readouts = {
            owner: name for name, owner in tied.items() if roles.get(name) in DENSE and roles.get(owner) == "embedding"
        }
        hidden = set(tied) - set(as_readouts.values()) | set(as_readouts)
        all_rows = []
        for info in measurement.layers:
            values = {key: column[info.name] for key, column in columns.items() if info.name in column}
            row = Row(info, values, settings.get(info.name, UNKNOWN))
            if row.settings.frozen and abs(row.get("contribution")) > 0:  # frozen in turns, as a discriminator is
                row = replace(row, settings=replace(row.settings, frozen=False))
            all_rows.append(row)
        rows = tuple(row for row in all_rows if row.info.is_matrix and row.name not in hidden)
        vectors = {row.name: row for row in all_rows if row.info.role == "vector"}
        # The first steps of RAdam are steps of SGD.
        compared = frozenset(row.name for row in rows if row.settings.rectified > 0)
        loss, clip = (measurement.summary.get(key, math.nan) for key in ("loss", "clip_factor"))
        return cls(
            measurement.step,
            rows,
            vectors,
            compared,
            expected=expected or {},
            loss=loss,
            clip_factor=clip if clip > 0 else 1.0,
        )

    def row(self, name: str) -> Row | None:
        """Return a layer by its name; ``None`` if it is not judged."""
        return self._by_name.get(name)

    def parameter(self, name: str) -> Row | None:
        """Return a layer, bias or gain by its name; ``None`` if it is not judged."""
        return self.row(name) or self.vectors.get(name)

    @cached_property
    def _by_name(self) -> dict[str, Row]:
        return {row.name: row for row in self.rows}

    @cached_property
    def peers(self) -> tuple[Row, ...]:
        """Operators and readouts, which are compared with each other."""
        return tuple(row for row in self.rows if row.dense and row.name in self.compared)

    @cached_property
    def peers_or_embeddings(self) -> tuple[Row, ...]:
        """The peers; the embeddings of a network that has no other matrices, such as word2vec."""
        rows = self.peers if any(row.dense for row in self.rows) else self.rows
        return tuple(row for row in rows if row.name in self.compared)

    @cached_property
    def moved_by_rate(self) -> tuple[Row, ...]:
        """Peers whose steps follow from a learning rate."""
        return tuple(row for row in self.peers if not row.settings.sizes_own_steps)

    def peers_of(self, row: Row) -> tuple[Row, ...]:
        """Return the layers that a layer is compared with: those of the same optimizer, itself included.

        There are none if the optimizer does not scale its steps by the learning rate.
        """
        return self._by_owner.get((row.settings.owner, row.settings.family), ())

    @cached_property
    def _by_owner(self) -> dict[tuple[int, str], tuple[Row, ...]]:
        groups: dict[tuple[int, str], list[Row]] = defaultdict(list)
        for row in self.moved_by_rate:
            groups[row.settings.owner, row.settings.family].append(row)
        return {key: tuple(rows) for key, rows in groups.items()}

    @cached_property
    def parts(self) -> dict[int, Network]:
        """The layers of each optimizer, by its number, if several have enough layers; else the whole network.

        Networks that are trained against each other, or side by side, need not move at one pace.
        """
        by_owner: dict[int, list[Row]] = defaultdict(list)
        trained = [row for row in self.moved_by_rate if row.settings.owner >= 0]  # unlike target networks and teachers
        for row in trained:
            by_owner[row.settings.owner].append(row)
        large = {owner: rows for owner, rows in by_owner.items() if len(rows) >= PART}
        if len(large) < 2:
            return {ALL: replace(self, rows=tuple(trained)) if trained else self}
        return {owner: replace(self, rows=tuple(rows)) for owner, rows in large.items()}

    @cached_property
    def rates(self) -> dict[str, Rate]:
        """The learning rate of each matrix, and the usual one of its optimizer."""
        return rates_of(self)

    @cached_property
    def comparison(self) -> Comparison:
        """The layers compared with each other."""
        return Comparison(self)

    @cached_property
    def corrected(self) -> bool:
        """True if a correction multiplies learning rates, so that updates should have equal natural norms."""
        return any(row.multiplier != 1.0 for row in self.rows)

    @property
    def is_early(self) -> bool:
        """True if training has just begun."""
        return self.step <= EARLY

    @property
    def looks_fresh(self) -> bool:
        """True if the median weight is as random as a Gaussian one; trained weights have a lower stable rank."""
        return not geometric_median(row.randomness for row in self.peers) < FRESH

    @property
    def just_drawn(self) -> frozenset[str]:
        """The layers that are as random as Gaussian matrices, if the network is not."""
        drawn = (row.name for row in self.peers if row.randomness > FRESH)
        return frozenset() if self.looks_fresh else frozenset(drawn)

    @cached_property
    def finished(self) -> bool:
        """True if no layer gets a gradient any more, because the loss of this batch is exactly 0."""
        silent = not any(row.has_gradient for row in self.peers)
        drift = geometric_median(row.get("drift_ratio") for row in self.peers)
        learned = any(self.largest_steps.get(row.name, 0.0) > 0 for row in self.peers)
        return silent and learned and drift > 0.01 and not self.loss > NOTHING_LEFT

    def usual_gain(self, row: Row) -> float:
        """Return the median gain of the other layers' weights, clipped to the range of healthy networks."""
        low, high = GAINS
        return min(max(self.comparison.others("weight_natural", row), low), high)  # NaN stays what it is

    @cached_property
    def drift(self) -> float:
        """The drift of the median layer relative to its initial size; NaN for fewer than two layers."""
        drifts = [row.get("drift_ratio") for row in self.moved_by_rate if not self.began_small(row)]
        return geometric_median(drifts) if sum(drift > 0 for drift in drifts) > 1 else math.nan

    @cached_property
    def left_out(self) -> dict[str, str]:
        """The layers that no optimizer trains although most in equal places are trained: name -> pattern of the places.

        Frozen layers do not count once some have thawed: others may follow, or stay frozen on purpose.
        """
        rows = [row for row in self.rows if not (self.thawed and row.settings.frozen)]
        return never_trained(rows, self.fresh)

    @cached_property
    def cut_off(self) -> frozenset[str]:
        """The layers that an optimizer holds but no gradient has reached, although gradients reach others."""
        return cut_off(self.rows)

    @cached_property
    def exploded(self) -> bool:
        """True if most layers have taken a step larger than their weights, which replaces the initial ones."""
        steps = [self.largest_steps.get(row.name, math.nan) for row in self.peers]
        return sum(step > EXPLODED for step in steps) > len(steps) / 2

    def as_drawn(self, row: Row) -> bool:
        """Return whether a layer began with randomly drawn weights."""
        return self.fresh or row.name in self.new

    def initial_gain(self, row: Row) -> float:
        """Return the initial gain of a layer's weights over the usual one; NaN once updates have replaced them.

        It is the first measured one, because weight decay changes both. After an explosion it is still returned,
        because it may be the cause.
        """
        if self.exploded:
            return self.initial_sizes.get(row.name, math.nan)
        moved = row.get("drift_ratio") > MOVED and self.step > 1  # the first step begins with the initial weights
        return math.nan if moved else self.initial_sizes.get(row.name, row.gain / self.usual_gain(row))

    def began_small(self, row: Row) -> bool:
        """Return whether a layer began so close to zero that any step is large relative to its size."""
        return row.name in self.from_zero or self.initial_sizes.get(row.name, math.nan) < NEXT_TO_ZERO

    def initial_rows(self, row: Row) -> float:
        """Return the size of an embedding's largest row when it was first measured."""
        return self.initial_sizes.get(row.name, row.get("weight_natural"))

    def is_read(self, row: Row) -> bool:
        """Return whether the next matrix gets inputs of usual size although a layer's weights are small.

        A residual connection may bypass the layer, or a norm may follow it.
        """
        following = self.rows[self.rows.index(row) + 1 :]
        reader = next((other for other in following if other.dense and other.get("feature_rms") >= 0), None)
        return reader is not None and reader.get("feature_rms") > READ_SIZE * reader.gain

    @cached_property
    def matrix_rate(self) -> float:
        """The learning rate of the median matrix; NaN if none is known."""
        return geometric_median(row.lr for row in self.moved_by_rate if row.lr > 0)

    @cached_property
    def over_eps(self) -> float:
        """The size of gradients before clipping over the eps of an optimizer like Adam, in the median layer."""
        return geometric_median(row.gradient_entry / row.settings.eps for row in self.peers if row.settings.eps > 0)

    @property
    def below_eps(self) -> bool:
        """True if the gradients that the optimizer gets are smaller than eps in the median layer."""
        return self.over_eps * self.clip_factor < 1

    @cached_property
    def input_spreads(self) -> dict[str, float]:
        """The stable rank of each matrix's inputs less 1, which is 0 if they are the same for all samples.

        Empty if the data are a few coordinates: these may lie along a line, which has stable rank 1.
        """
        embedded = any(row.info.role == "embedding" for row in self.rows)
        first_info = self.peers[0].info if self.peers else None
        if first_info is None or (not embedded and math.prod(first_info.shape) < SPREADING_INPUTS * first_info.fan_out):
            return {}
        ranks = {row.name: row.get("input_stable_rank") for row in self.peers if row.info.fan_in >= SPREADING_INPUTS}
        return {name: max(rank - 1, 0.0) for name, rank in ranks.items() if not math.isnan(rank)}

    @cached_property
    def has_small_gains(self) -> bool:
        """True if gains next to zero, such as those of LayerScale, shrink gradients until the gains have grown."""
        gains = (row.get("weight_natural") for name, row in self.vectors.items() if not name.endswith("bias"))
        return any(0 < gain < SMALL_GAIN for gain in gains)

    @cached_property
    def top_lr(self) -> float:
        """The largest learning rate; NaN if none is known."""
        return nanmax(row.lr for row in self.rows)

    @cached_property
    def family(self) -> str:
        """The family of the optimizers; empty if there are several."""
        families = {row.settings.family for row in self.peers}
        return families.pop() if len(families) == 1 else ""

    @cached_property
    def _rated(self) -> list[Rated]:
        return [(row.info, row.lr) for row in self.peers]

    @cached_property
    def sgd_rule_under_adam(self) -> bool:
        """True if learning rates follow the rule for SGD under an optimizer like Adam."""
        return self.family == "adam" and not self.corrected and rule_of(self._rated) == "fan_out/fan_in"

    @cached_property
    def ntk_rates(self) -> bool:
        """True if learning rates are those of the neural tangent parametrization."""
        is_ntk = rule_of(self._rated) == "1/fan_in" and not follows("fan_out/fan_in", self._rated)
        return self.family == "sgd" and not self.corrected and is_ntk

    @cached_property
    def ntk_weights(self) -> bool:
        """True if weights are those of the neural tangent parametrization (entries of size 1 at any width) under SGD.

        Under Adam it does no harm, because entries move by the learning rate whatever their gradients.
        """
        if self.family != "sgd" or not any(row.info.fan_in >= WIDE for row in self.peers):
            return False
        if any(row.get("drift_ratio") > 1 for row in self.peers):  # weights that exploded may have such entries too
            return False
        sizes = (row.get("weight_fro") / math.sqrt(math.prod(row.info.shape)) for row in self.peers)
        return all(1 / LEVEL < size < LEVEL for size in sizes)
