"""The network as a whole: does it train, does it diverge, are all of its steps too large or too small?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from spectral_monitor.condition.causes import History
from spectral_monitor.condition.findings import AT_ONCE, NO_STEP, SMALLEST, Finding
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.row import Row
from spectral_monitor.condition.verdict import NETWORK
from spectral_monitor.functional.medians import geometric_median
from spectral_monitor.measurement import NOT_FINITE, Measurement

SPEED_LIMIT = 1.1
"""Healthy weights have moved by less than this, times the root of the number of steps, of the size they began with."""
SLOW = 0.0065
"""The root of the fastest layer's relative update times the median layer's natural one, at the learning rate's peak:
more than four times this in networks that are tuned for the steps they have, about this at published rates that are
meant for many more steps than a small network needs.
"""
NARROW = 32
"""Layers with fewer inputs take steps that are as much smaller at the rates that people use for them."""
SETTLED = 16
"""From this step on a network that hardly moves is said to."""
RACING = 0.35
"""A relative update of the median layer that few healthy networks reach, and only in their first steps."""
RETURN, SMALL_PART, PROGRESS = 3.0, 0.25, 0.9
"""A loss of ``RETURN`` times the lowest so far is back, if it is above ``SMALL_PART`` of the first; one above
``PROGRESS`` of the first has not been lowered. Both are a matter of the learning rate in networks that race only:
targets that move, as in reinforcement learning, do the same.
"""
FEATURE_LIMIT = 25.0
"""Root mean square of a layer's outputs at the start; of healthy networks at most 2.5."""
GROWN_LIMIT = 50.0
"""The same of hidden layers later on, at most 6 in healthy networks."""
GROWTH = 4.0
"""What was large from the start has grown if it is this many times as large."""
DISTANCE_LIMIT = 25.0
"""``loss_distance`` at the start over the size of the outputs, or over 1 where they are smaller; at most 2.3 in healthy
networks.
"""
FEATURE_LEAST = 1e-4
"""The same of the smallest outputs that the next matrix does not read at usual size, at least 0.0026."""
HEAVY = 5.0
"""A gain that explains large outputs."""
SIZE = 1e4
"""A natural norm of weights, or the size of a layer's outputs, that is on its way to infinity."""
EFFICIENT, EARLY = 0.05, 8
"""RMS entry of Adam's update over the learning rate, which is 0.3 to 1 in the first steps."""
LASTING = 0.995
"""Momentum from here on averages the last 200 steps and more."""
FROZEN = "every layer is frozen"
_MOVES = ("update_fro", "update_natural", "update_norm", "update_ratio")
EDGE, EDGES = 2.0, 5
"""Steps of this edge no longer lower the loss of their own batch; so many of them have a median. Networks that train,
with momentum and small batches too, stay below 1.3, and at 2 where full batches make the rate settle there. Where
gradients are not those of the loss (straight-through estimators, targets that are held fixed) it may be 3 in training
that goes well; hence the loss is looked at too.
"""
HARDLY = 0.1
"""Weights that have moved by more of their size are not held back."""
USUAL_EPS = 3e-8
"""What is not larger is not to blame."""
FAST = ("adamax", "adafactor", "adagrad", "lion", "rmsprop", "sign")
"""Parts of names of optimizers of Adam's family whose eps does not work like Adam's."""


class Whole:
    """Watches what all layers have in common; the judge counts its findings like those of layers.

    Attributes:
        pace: the largest relative update of the median layer so far; NaN if none is known.
        first_pace: of the first measurement that has one, when steps are not yet larger for being large.
        large_outputs: the first layer whose outputs were far too large at the first measurement; empty if none.
    """

    def __init__(self) -> None:
        self._fastest = 0.0  # relative update of the fastest layer, at the peak of its learning rate
        self._natural = 0.0  # natural update of the median layer, there too
        self._rate = math.nan  # highest learning rate at the measurement before
        self._looked = 0
        self._edges: list[tuple[float, float]] = []  # the latest ones that are known, and the losses there
        self._first: dict[str, float] = {}  # RMS of features at the first measurement
        self._smallest = 0.0  # of them, where the next matrix is left with small inputs; 0 if none is known
        self._late = False  # whether that was when training had gone on for a while
        self._distance = 0.0  # of the loss, at the first measurement that has one; 0 if none is known
        self._losses: tuple[float, ...] = ()  # the first and the lowest, if they are known
        self._stale = 0.0  # 1 if gradients are used again, as far as is known
        self._share = (
            0.0  # of its learning rate that Adam moved an entry by in the first steps; 0 if unknown, 1 without fault
        )
        self.pace = self.first_pace = math.nan
        self.large_outputs = ""

    @property
    def history(self) -> History:
        """The run so far, as causes need it."""
        return History(self.pace, self.first_pace, self.large_outputs)

    def findings(self, measurement: Measurement, network: Network) -> Iterator[Finding]:
        """Yield what can be said of the network at a measurement, healthy or not."""
        yield from self._reused(measurement)
        diverged = self._diverged(measurement, network)
        yield diverged
        if not diverged.inside():
            yield from self._targets(measurement, network)  # which may be why
            return
        if (still := _still(measurement, network)) is not None:
            yield still
            if not still.inside():
                return
        yield from _parametrization(network)
        yield from self._speed(network)
        yield from self._lost_ground(measurement, network)
        yield from self._overshooting(measurement)
        yield from self._growth(network)
        yield from self._slowness(network)
        yield from self._features(network)
        yield from self._targets(measurement, network)
        yield from self._eps(network)

    def _reused(self, measurement: Measurement) -> Iterator[Finding]:
        """Yield whether an optimizer uses gradients again; what was seen once holds until they are seen cleared."""
        seen = measurement.summary.get("stale_gradient", math.nan)
        self._stale = self._stale if math.isnan(seen) else seen
        yield _certain("stale_gradients", "stale_gradient", self._stale > 0, "a new gradient")

    def _diverged(self, measurement: Measurement, network: Network) -> Finding:
        """Return the largest weight or output, inf where some are not finite any more."""
        sizes = [size for row in network.peers for size in (row.weight, row.get("feature_rms"))]
        largest = max((size for size in sizes if not math.isnan(size)), default=0.0)
        value = min(math.inf if _not_finite(measurement) else largest, 1e300)
        return Finding("diverged", NETWORK, "weight_natural", value, 1.0, (0.0, SIZE), AT_ONCE, "a healthy network")

    def _speed(self, network: Network) -> Iterator[Finding]:
        """Yield how far the median layer has moved since the start, for so many steps."""
        ratios = [row.get("update_ratio") for row in network.moved_by_rate if row.info.name not in network.from_zero]
        ratio = geometric_median(ratios)
        self.pace = self.pace if self.pace >= ratio or math.isnan(ratio) else ratio
        self.first_pace = ratio if math.isnan(self.first_pace) else self.first_pace
        if not math.isnan(network.drift):
            usual = SPEED_LIMIT * math.sqrt(network.step)
            against = "a healthy pace"
            yield Finding("rates_too_large", NETWORK, "drift_ratio", network.drift, usual, (0.0, 1.0), against=against)

    def _lost_ground(self, measurement: Measurement, network: Network) -> Iterator[Finding]:
        """Yield the loss beside the first and the lowest one, in a network whose steps are large."""
        loss = measurement.summary.get("loss", math.nan)
        if not self._losses and network.step <= EARLY and not math.isnan(loss):
            self._losses = loss, loss
        if not self._losses or math.isnan(loss):
            return
        first, lowest = self._losses
        if min(loss, lowest) > 0 and network.step >= SETTLED and self.pace > RACING:
            limits = [(PROGRESS * first, f"it began with {first:.2g}")]
            if loss >= SMALL_PART * first:
                limits.append((RETURN * lowest, f"it was {lowest:.2g} before"))
            limit, against = min(limits)
            yield Finding("loss_returns", NETWORK, "loss", loss, limit, (0.0, 1.0), 1.5, against)
        self._losses = first, min(loss, lowest)

    def _overshooting(self, measurement: Measurement) -> Iterator[Finding]:
        """Yield how long steps have been along their own lines, once there are enough; 1 where the loss falls."""
        edge, loss = (measurement.summary.get(key, math.nan) for key in ("edge", "loss"))
        if not math.isnan(edge):
            self._edges = [*self._edges, (edge, loss)][-EDGES:]
        if len(self._edges) < EDGES:
            return
        losses = [loss for _, loss in self._edges]
        falls = max(losses[-2:]) < min(losses[:2])
        median = statistics.median(edge for edge, _ in self._edges)
        if median > 0:
            median = min(median, 1.0) if falls else median
            against = "the step after which the loss is lowest"
            yield Finding("global_lr_too_large", NETWORK, "edge", median, 1.0, (0.0, EDGE), 1.5, against)

    def _slowness(self, network: Network) -> Iterator[Finding]:
        """Yield how large steps have been so far, if the network was not trained before and has taken its time."""
        moving = [row for row in network.moved_by_rate if row.get("update_ratio") > 0 and row.has_gradient]
        own = [row for row in moving if row.info.name not in network.from_zero]
        rises, self._rate = network.top_lr > 1.01 * self._rate, network.top_lr
        if not own:
            return
        self._looked += 1
        self._fastest = max(self._fastest, *(row.get("update_ratio") * row.to_peak for row in own))
        # The maximum of a number and NaN is that number.
        self._natural = max(self._natural, geometric_median(row.update * row.to_peak for row in own))
        if network.step < SETTLED or self._looked < 4 or rises or not network.fresh or not self._natural:
            return
        value = math.sqrt(self._fastest * self._natural)
        inputs = geometric_median(row.info.fan_in * row.taps for row in own)
        slow = SLOW * min(1.0, inputs / NARROW)
        yield Finding("rates_too_small", NETWORK, "update_natural", value, slow, (1.0, math.inf), 1.2, "healthy")

    def _features(self, network: Network) -> Iterator[Finding]:
        """Yield the largest and the smallest outputs of a layer at the first measurement: later, steps are to blame."""
        rows = [row for row in network.peers if row.get("feature_rms") >= 0]
        if not self._first:
            self._first = {row.info.name: row.get("feature_rms") for row in rows}
            self._late = network.step > EARLY
            own = [row for row in rows if row.info.name not in network.from_zero and not network.is_read(row)]
            self._smallest = min((x for row in own if (x := row.get("feature_rms")) > 0), default=0.0)
            # Later on only the first layer tells: the inputs of the others may have grown.
            hidden = [row.info.name for row in network.peers if row.info.role == "operator"]
            seen = [row for row in rows if row.info.name in hidden[:1]] if self._late else rows
            self.large_outputs = next((row.info.name for row in seen if row.get("feature_rms") > FEATURE_LIMIT), "")
        if not self._first:
            return
        own = network.row(self.large_outputs)
        bias = network.vectors.get(f"{self.large_outputs}.bias")
        heavy = own is not None and own.gain > HEAVY  # then its weights are to blame, or its bias, not its inputs
        heavy |= bias is not None and bias.get("weight_natural") > FEATURE_LIMIT / 2
        largest = self._first.get(self.large_outputs, 1.0 if self._late else max(self._first.values()))
        if not heavy and (network.fresh or not self._late):
            yield Finding("features", NETWORK, "feature_rms", largest, 1.0, (0.0, FEATURE_LIMIT), 1.5, "usual")
        if self._smallest and network.fresh and not self._late:
            band = (FEATURE_LEAST, math.inf)
            yield Finding("features_vanish", NETWORK, "feature_rms", self._smallest, 1.0, band, 1.5, "usual")

    def _targets(self, measurement: Measurement, network: Network) -> Iterator[Finding]:
        """Yield how far the loss wanted the outputs to move at the start, beside what networks begin with: size 1."""
        distance = measurement.summary.get("loss_distance", math.nan)
        if not (self._distance or math.isnan(distance)) and network.step <= EARLY:
            sizes = [row.get("feature_rms") for row in network.peers if row.info.role == "readout"]
            self._distance = distance / max([1.0, *sizes])  # NaN is no maximum of what comes before it
        if self._distance > 0:
            limits = (0.0, DISTANCE_LIMIT)
            yield Finding("targets", NETWORK, "loss_distance", self._distance, 1.0, limits, 1.5, "usual")

    def _eps(self, network: Network) -> Iterator[Finding]:
        """Yield how much of its learning rate an optimizer like Adam moved an entry by in the first steps."""
        eps = max((row.settings.eps for row in network.peers if not math.isnan(row.settings.eps)), default=0.0)
        share = _share_of_rate(network)
        grown = share > self._share > 0  # gradients have grown beyond eps since
        if not math.isnan(share) and (network.step <= EARLY or grown or not self._share):
            # Sparse gradients make entries move less as well. So do those of a loss that is nearly 0 later on, or of a
            # network that steps have ruined.
            blamed = (network.below_eps and not network.drift > HARDLY) or (
                eps > USUAL_EPS and (network.step <= EARLY or grown)
            )
            self._share = share if blamed else 1.0
        if eps > 0 and self._share > 0:
            yield Finding("eps", NETWORK, "update_fro", self._share, EFFICIENT, (1.0, math.inf), against="Adam's usual")

    def _growth(self, network: Network) -> Iterator[Finding]:
        """Yield the largest outputs of a hidden layer after the first steps: too large steps let them grow."""
        if not self._first:
            return
        sizes = [row.get("feature_rms") for row in network.moved_by_rate if row.info.role == "operator"]
        largest = max((size for size in sizes if not math.isnan(size)), default=math.nan)
        limit = max(GROWN_LIMIT, GROWTH * max(self._first.values(), default=0.0))
        if network.step > EARLY and not math.isnan(largest):
            yield Finding("features_grow", NETWORK, "feature_rms", largest, limit, (0.0, 1.0), against="usual")

    def state_dict(self) -> dict[str, Any]:
        """Return plain types."""
        return {
            "pace": self.pace,
            "first_pace": self.first_pace,
            **{key: value for key, value in (("stale", self._stale), ("eps_share", self._share)) if value},
            "fastest": self._fastest,
            "natural": self._natural,
            "rate": self._rate,
            "looked": self._looked,
            "first": dict(self._first),
            "smallest": self._smallest,
            **({"late": True} if self._late else {}),
            "distance": self._distance,
            "losses": list(self._losses),
            "edges": [list(pair) for pair in self._edges],
            "large_outputs": self.large_outputs,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._fastest, self._looked = float(state["fastest"]), int(state["looked"])
        self._natural, self._rate = float(state["natural"]), float(state["rate"])
        self.large_outputs = str(state["large_outputs"])
        self._edges = [(float(edge), float(loss)) for edge, loss in state.get("edges", ())]
        self._first, self.pace = dict(state["first"]), float(state["pace"])
        self._late, self._smallest = bool(state.get("late", False)), float(state.get("smallest", 0.0))
        self.first_pace = float(state.get("first_pace", math.nan))
        self._stale, self._share = float(state.get("stale", 0.0)), float(state.get("eps_share", 0.0))
        self._distance = float(state.get("distance", 0.0))
        self._losses = tuple(map(float, state.get("losses", ())))


def _parametrization(network: Network) -> Iterator[Finding]:
    """Yield whether learning rates or weights follow a rule that does not fit the optimizer; certain at once."""
    momentum = max((row.settings.momentum for row in network.peers), default=0.0)
    for check, wrong in (
        ("sgd_rule", network.sgd_rule_under_adam),
        ("ntk", network.ntk_rates or network.ntk_weights),
        ("momentum", LASTING <= momentum < 1),
    ):
        yield _certain(check, "lr", wrong, "the rule of the optimizer")


def _certain(check: str, quantity: str, wrong: bool, against: str) -> Finding:
    """Return a finding of something that is wrong or not, without degrees: far outside its band, or in the middle."""
    return Finding(check, NETWORK, quantity, 4.0 if wrong else 1.0, 1.0, (0.5, 2.0), against=against)


def why_still(network: Network) -> str:
    """Return why no layer can move, in words; empty if some can."""
    rows = [row for row in network.rows if not row.settings.frozen]
    if not rows:
        return FROZEN
    if network.top_lr == 0:
        return "every learning rate is 0"
    moved = any(row.get(key) > 0 for row in rows for key in _MOVES)  # then its settings are just not known
    if not moved and all(row.settings.owner < 0 and math.isnan(row.lr) for row in rows):
        return "no optimizer holds its parameters"
    return ""


def _still(measurement: Measurement, network: Network) -> Finding | None:
    """Return the largest update of all, 0 if nothing moves; ``None`` if updates were not measured.

    It is 0 too if biases and gains alone move, because matrices cannot. To train those of a trained network alone, with
    all else frozen, is a method.
    """
    keys = [key for key in _MOVES if key in measurement.values]
    if not keys or not network.rows:
        return None
    matrices, vectors = (_largest(rows, keys) for rows in (network.rows, network.vectors.values()))
    reasons = {measurement.why(keys[0], row.info.name) for row in network.rows}
    no_step = f"{NO_STEP} that is known of" if reasons == {NO_STEP} else ""
    certain = why_still(network)
    why = certain or no_step or "every update is 0, NaN or skipped"
    largest, what = max(matrices, vectors), "no parameter moves"
    if largest > matrices == 0 and certain and (certain != FROZEN or network.fresh):
        largest, what = 0.0, "no matrix moves, only biases and gains do"
    return Finding(
        "nothing_trains", NETWORK, keys[0], min(largest, 1e300), 1.0, (SMALLEST, math.inf), against=f"{what}: {why}"
    )


def _largest(rows: Iterable[Row], keys: Sequence[str]) -> float:
    """Return the largest update of some layers, each by the first of these quantities that it has; 0 without any."""
    known = ((abs(row.get(key)) for key in keys if not math.isnan(row.get(key))) for row in rows)
    return max((next(sizes, 0.0) for sizes in known), default=0.0)


def _not_finite(measurement: Measurement) -> bool:
    """Return whether some weight is NaN or inf, now or after this step."""
    for key in ("weight_fro", "weight_norm", "weight_natural", "drift_ratio", "update_fro"):
        if key in measurement.values:
            matrices = [i for i, info in enumerate(measurement.layers) if info.is_matrix]
            values = measurement.values[key][matrices]
            why = [measurement.why(key, measurement.layers[i].name) for i in matrices]
            if values.isinf().any() or NOT_FINITE in why:
                return True
    return False


def _share_of_rate(network: Network) -> float:
    """Return the RMS entry of Adam's update over the learning rate, of the median layer; NaN under other optimizers."""
    return geometric_median(
        row.size / row.get("lr")  # with a correction's multiplier, as the optimizer has it
        for row in network.peers
        if row.settings.family == "adam"
        and not math.isnan(row.get("update_fro"))
        and row.get("lr") > 0
        and not any(part in row.settings.optimizer.lower() for part in FAST)
        and row.info.name not in network.from_zero
    )
