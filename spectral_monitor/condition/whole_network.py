"""Findings on the network as a whole: whether it trains or diverges, its steps, its outputs and its settings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from spectral_monitor.condition.causes import History, huge_at_start
from spectral_monitor.condition.findings import AT_ONCE, NOT_ZERO, Finding
from spectral_monitor.condition.network import GAINS, MIN_SPREAD, Network
from spectral_monitor.condition.optimizers.frozen import copies_of_trained, frozen_at_random
from spectral_monitor.condition.optimizers.left_out import OTHERS
from spectral_monitor.condition.trends.losses import LossTrend
from spectral_monitor.condition.trends.memory import Memory
from spectral_monitor.condition.trends.movement import movement_of
from spectral_monitor.condition.trends.outputs import OutputTrend
from spectral_monitor.condition.trends.pace import SETTLED, PaceTrend
from spectral_monitor.condition.verdict import NETWORK
from spectral_monitor.fitting.medians import geometric_median, nanmax
from spectral_monitor.measurement import NOT_FINITE, Measurement

SIZE = 1e4
"""Natural norms of weights, or sizes of outputs, above this are on their way to infinity."""
EFFICIENT, BELOW_EPS = 0.05, 0.15
"""Smallest healthy RMS entry of Adam's update over the learning rate, in general and if gradients are below eps. It is
0.3 to 1 in usual first steps.
"""
LASTING = 0.995
"""Momentum from this value on averages the last 200 steps or more."""
MOSTLY_EVAL = 0.5
"""Share of dropouts and batch norms that may be in evaluation mode, as in parts that are frozen on purpose."""
MOST_DROPPED = 0.75
"""Largest part of its inputs that a dropout may drop; 0.9 is mostly a mistake for the part to keep."""
LARGE_WEIGHTS = 3.0
"""Gain of the median layer's initial weights over the largest usual one; at most 1.6 in healthy networks."""
TINY_WEIGHTS = 0.02
"""The same gain below which weights are too small whatever follows. A SIREN, whose forward pass multiplies by 30, has
0.05; other healthy networks have 0.14 or more.
"""
IN_USE = 1 / 4
"""If outputs are smaller than this part of the gain, the forward pass divides the weights."""
UNIT = 1.8
"""Weights that the forward pass divides have entries between this and its inverse; 0.58 to 1.41 is usual."""
RECURRENT = re.compile(r"weight_[ih]h(_l\d+)?(_reverse)?$")
"""Names of the weights of torch's recurrent layers, whose outputs are not seen."""
THIRD = 3
"""Features have collapsed if one layer in this number of layers has inputs that do not differ."""
UNITS = 4
"""With fewer inputs or outputs a random matrix may be close to rank 1 by chance."""
HARDLY = 0.1
"""With a drift above this, eps has not kept weights from moving."""
USUAL_EPS = 3e-8
"""A larger eps may be to blame for small steps."""
FAST = ("adamax", "adafactor", "adagrad", "lion", "rmsprop", "sign")
"""Parts of names of optimizers of Adam's family whose eps does not work like Adam's."""


@dataclass
class WholeNetwork(Memory):
    """Watches the network as a whole; the judge treats its findings like those on layers."""

    stale: float = 0.0  # 1 if the latest known step used old gradients
    # Part of the learning rate by which Adam moved an entry in the first steps; 0 if unknown, 1 without a fault.
    eps_share: float = 0.0
    gain: float = 0.0  # gain of the median layer's initial weights as the forward pass uses them; 0 if unknown
    symmetric: bool | None = None  # whether weights began as constants; None before the first update
    bad_batch: bool = False  # whether no layer's outputs were finite although weights were
    huge_at_start: str = ""  # a sentence on outputs that were far too large before the first step; empty if none were
    # matrices that may be copies of trained ones, such as those of target networks; None before the first update
    copies: list[str] | None = None

    def __post_init__(self) -> None:
        self._pace, self._losses, self._outputs = PaceTrend(), LossTrend(), OutputTrend()
        self._trends = (self._pace, self._losses, self._outputs)

    @property
    def history(self) -> History:
        """The facts about the run so far that explanations need."""
        pace, outputs = self._pace, self._outputs
        paces, starts = (pace.pace, pace.first_pace), (self.huge_at_start, outputs.small_gain)
        return History(*paces, outputs.large_outputs, pace.fastest, self.bad_batch, *starts, self.gain)

    def findings(self, measurement: Measurement, network: Network) -> Iterator[Finding]:
        """Yield the findings on the network at a measurement, healthy or not."""
        yield from self._reused(measurement)
        yield from _in_code(measurement)
        yield from self._losses.endless(measurement, network)
        diverged = self._diverged(measurement, network)
        yield diverged
        if not diverged.inside():
            yield from self._outputs.targets(measurement, network)  # perhaps the cause
            return
        if (movement := movement_of(measurement, network)) is not None:
            yield movement
            if not movement.inside():
                return
        yield from _parametrization(network)
        symmetric = _is_symmetric(network)
        moves = any(row.get("update_natural") > 0 for row in network.peers)
        if self.symmetric is None and moves:  # decided once, because other faults may end in symmetric weights
            self.symmetric = symmetric and network.is_early
        yield _certain("symmetric", "weight_natural", symmetric and bool(self.symmetric), "random weights")
        value = 0.0 if _forgets(network) else 1.0
        yield Finding("left_out", NETWORK, "update_natural", value, 1.0, NOT_ZERO, against=OTHERS)
        yield from self._frozen(network)
        yield from self._weights(network)
        if not self._outputs.spread:  # else that is the cause
            yield from _collapse(network)
        yield from self._pace.findings(network)
        yield from self._losses.findings(measurement, network, self._pace.pace)
        yield from self._outputs.findings(measurement, network)
        yield from self._eps(network)

    def _frozen(self, network: Network) -> Iterator[Finding]:
        """Check that most of the network is not frozen at random values; once some layers have thawed, others may."""
        if self.copies is None:
            self.copies = copies_of_trained(network.rows, at_start=network.step <= 1)
        rows = () if network.thawed else frozen_at_random(network.rows, network.vectors, self.copies)
        value, names = 0.0 if rows else 1.0, tuple(row.name for row in rows)
        yield Finding("frozen_random", NETWORK, "drift_ratio", value, 1.0, NOT_ZERO, against=OTHERS, layers=names)

    def _weights(self, network: Network) -> Iterator[Finding]:
        """Compare the initial weights of the median layer with the largest usual ones."""
        if network.is_early and not self.gain and not _is_ntk(network):
            rows = [row for row in network.peers if row.name not in network.from_zero]
            gains = (row.gain for row in rows if not math.isnan(network.initial_gain(row)))
            gain = float(f"{geometric_median(gains):.2g}")
            if gain > 0:  # decided once, because outputs grow later
                self.gain = gain if _is_in_use(gain, network) else min(gain, GAINS[1])
        if network.fresh and len(network.peers) > 1 and self.gain > 0:
            limits = (0.0, LARGE_WEIGHTS)
            yield Finding("large_weights", NETWORK, "weight_natural", self.gain, GAINS[1], limits, AT_ONCE, "usual")
            if not any(row.scaled for row in network.peers):
                limits = (TINY_WEIGHTS, math.inf)
                yield Finding("tiny_weights", NETWORK, "weight_natural", self.gain, 1.0, limits, AT_ONCE, "usual")

    def _reused(self, measurement: Measurement) -> Iterator[Finding]:
        """Check that no optimizer uses old gradients; once one does, the finding lasts until gradients are new."""
        stale = measurement.summary.get("stale_gradient", math.nan)
        if not math.isnan(stale):
            self.stale = stale
        yield _certain("stale_gradients", "stale_gradient", self.stale > 0, "a new gradient")

    def _diverged(self, measurement: Measurement, network: Network) -> Finding:
        """Compare the largest weight or output with a limit; it counts as infinite if a weight is NaN or inf."""
        sizes = (size for row in network.peers for size in (row.weight, row.get("feature_rms")))
        value = min(math.inf if _not_finite(measurement) else nanmax(sizes, 0.0), 1e300)
        self.bad_batch = self.bad_batch or (value == 1e300 and _is_bad_batch(measurement, network))
        self.huge_at_start = self.huge_at_start or huge_at_start(network, SIZE)
        return Finding("diverged", NETWORK, "weight_natural", value, 1.0, (0.0, SIZE), AT_ONCE, "a healthy network")

    def _eps(self, network: Network) -> Iterator[Finding]:
        """Yield the part of the learning rate by which Adam moved an entry in the first steps."""
        eps = nanmax((row.settings.eps for row in network.peers_or_embeddings), 0.0)
        share = _share_of_rate(network)
        grown = share > self.eps_share > 0  # gradients have since grown beyond eps
        if not math.isnan(share) and (network.is_early or grown or not self.eps_share):
            # Updates may also be small because gradients are sparse, the loss is near 0 or the network is ruined.
            small = network.below_eps and not (network.drift > HARDLY or network.has_small_gains)
            large_eps = eps > USUAL_EPS and (network.is_early or grown)
            self.eps_share = share if small or large_eps else 1.0
        if eps > 0 and self.eps_share > 0:
            limits = (BELOW_EPS if network.below_eps else EFFICIENT, math.inf)
            yield Finding("eps", NETWORK, "update_fro", self.eps_share, 1.0, limits, against="Adam's usual")

    def state_dict(self) -> dict[str, Any]:
        """Return what is remembered, in plain types."""
        of_trends = {key: value for trend in self._trends for key, value in trend.state_dict().items()}
        return of_trends | super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        for trend in self._trends:
            trend.load_state_dict(state)
        super().load_state_dict(state)


def _in_code(measurement: Measurement) -> Iterator[Finding]:
    """Check for mistakes in the model's code that no norm shows."""
    summary = measurement.summary
    if "unfit_loss_input" in summary:
        fault, fits = summary["unfit_loss_input"], (0.0, 0.5)
        yield Finding("loss_input", NETWORK, "unfit_loss_input", fault, 1.0, fits, AT_ONCE, "logits", measured=False)
    for check, key, most in (("eval_mode", "eval_share", MOSTLY_EVAL), ("dropout", "dropout_largest", MOST_DROPPED)):
        if key in summary:
            yield Finding(check, NETWORK, key, summary[key], 1.0, (0.0, most), AT_ONCE, "a network in training")


def _parametrization(network: Network) -> Iterator[Finding]:
    """Check that learning rates, weights and momentum suit the optimizer."""
    momentum = max((row.settings.momentum for row in network.peers_or_embeddings), default=0.0)
    for check, wrong in (
        ("sgd_rule", network.sgd_rule_under_adam),
        ("ntk", network.ntk_rates or _is_ntk(network)),
        ("momentum", LASTING <= momentum < 1),
    ):
        yield _certain(check, "lr", wrong, "the rule of the optimizer")


def _collapse(network: Network) -> Iterator[Finding]:
    """Check that inputs differ between samples, in the third of the layers where they differ least."""
    spreads = sorted(network.input_spreads.values())
    if network.step >= SETTLED and network.fresh and len(spreads) >= THIRD:
        spread, band = max(spreads[len(spreads) // THIRD], MIN_SPREAD / 100), (MIN_SPREAD, math.inf)
        yield Finding("features_collapsed", NETWORK, "input_stable_rank", spread, 1.0, band, 256, "usual")


def _forgets(network: Network) -> bool:
    """Return whether no optimizer holds a new network's biases, gains or the like, although matrices are trained.

    If matrices get gradients in vain too, they have findings of their own or belong to a network that serves as a loss.
    """
    trains = any(row.settings.owner >= 0 and row.get("update_natural") > 0 for row in network.rows)
    matrices = any(row.settings.forgotten for row in network.rows)
    return bool(network.forgotten) and network.fresh and trains and not matrices


def _is_in_use(gain: float, network: Network) -> bool:
    """Return whether outputs are as large as weights of this gain make them; if none is known, judge by the entries.

    Equalized learning rates divide weights by the square root of fan_in in the forward pass, except recurrent ones.
    """
    if sum(bool(RECURRENT.search(row.name)) for row in network.peers) > len(network.peers) / 2:
        return True
    outputs = _size_of_outputs(network)
    if not math.isnan(outputs):
        return outputs > IN_USE * gain
    entry = geometric_median(row.get("weight_fro") / math.sqrt(math.prod(row.info.shape)) for row in network.peers)
    return not 1 / UNIT < entry < UNIT


def _is_ntk(network: Network) -> bool:
    """Return whether weights have entries of size 1 and outputs, if they are known, show that these are divided."""
    gain = geometric_median(row.gain for row in network.peers)
    return network.ntk_weights and not _size_of_outputs(network) > IN_USE * gain


def _size_of_outputs(network: Network) -> float:
    """Return the RMS of the median layer's outputs; NaN if fewer than two are known."""
    outputs = [size for row in network.peers if (size := row.get("feature_rms")) > 0]
    return geometric_median(outputs) if len(outputs) > 1 else math.nan


def _is_symmetric(network: Network) -> bool:
    """Return whether two consecutive matrices have equal units, as constants have: these all learn the same.

    A single such matrix does no harm, because gradients through a random neighbour differ between its units.
    """
    large = [row for row in network.rows if row.dense and min(row.info.fan_in, row.info.fan_out) >= UNITS]
    return any(
        row.has_equal_units and after.has_equal_units and row.info.fan_out == after.info.fan_in
        for row, after in pairwise(large)
    )


def _certain(check: str, quantity: str, wrong: bool, against: str) -> Finding:
    """Return a finding that is either true or not: far outside its band if wrong, else in the middle of it."""
    return Finding(check, NETWORK, quantity, 4.0 if wrong else 1.0, 1.0, (0.5, 2.0), against=against, measured=False)


def _not_finite(measurement: Measurement) -> bool:
    """Return whether some weight is NaN or inf, before or after this step."""
    matrices = [i for i, info in enumerate(measurement.layers) if info.is_matrix]
    for key in ("weight_fro", "weight_norm", "weight_natural", "drift_ratio", "update_fro"):
        if key in measurement.values:
            reasons = (measurement.why(key, measurement.layers[i].name) for i in matrices)
            if measurement.values[key][matrices].isinf().any() or NOT_FINITE in reasons:
                return True
    return False


def _is_bad_batch(measurement: Measurement, network: Network) -> bool:
    """Return whether no layer's outputs are finite although all weights had a healthy size before the step."""
    not_finite = [
        row
        for row in network.rows
        if row.get("feature_rms") == math.inf or measurement.why("feature_rms", row.name) == NOT_FINITE
    ]
    return 0 < len(not_finite) == len(network.rows) and all(row.weight < SIZE for row in network.peers)


def _share_of_rate(network: Network) -> float:
    """Return the RMS entry of Adam's update over the learning rate in the median layer; NaN for other optimizers."""
    return geometric_median(
        row.size / row.get("lr")  # the corrected one, which the optimizer uses
        for row in network.peers_or_embeddings
        if row.settings.family == "adam"
        and not math.isnan(row.get("update_fro"))
        and row.get("lr") > 0
        and not any(part in row.settings.optimizer.lower() for part in FAST)
        and row.name not in network.from_zero
    )
