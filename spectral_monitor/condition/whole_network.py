"""The network as a whole: does it train, does it diverge, and what do its steps and its outputs show?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from spectral_monitor.condition.causes import History
from spectral_monitor.condition.findings import AT_ONCE, COMPILED_STEP, DIVIDED, NO_STEP, SMALLEST, Finding
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.optimizers.plans import FADED
from spectral_monitor.condition.row import Row
from spectral_monitor.condition.trends.losses import LossTrend
from spectral_monitor.condition.trends.outputs import OutputTrend
from spectral_monitor.condition.trends.pace import PaceTrend
from spectral_monitor.condition.verdict import NETWORK
from spectral_monitor.fitting.medians import geometric_median
from spectral_monitor.measurement import NOT_FINITE, Measurement

SIZE = 1e4
"""A natural norm of weights, or the size of a layer's outputs, that is on its way to infinity."""
EFFICIENT = 0.05
"""RMS entry of Adam's update over the learning rate, which is 0.3 to 1 in the first steps."""
LASTING = 0.995
"""Momentum from here on averages the last 200 steps and more."""
MOSTLY_EVAL = 0.5
"""Share of dropouts and batch norms that may be in evaluation mode, as in parts that are not to change."""
MOST_DROPPED = 0.75
"""Part of its inputs that a dropout may drop; who drops 0.9 has mostly meant to keep that part."""
FROZEN = "every layer is frozen"
_MOVES = ("update_fro", "update_natural", "update_norm", "update_ratio")
UNITS = 4
"""Of fewer inputs or outputs a random matrix may be next to rank 1 by chance."""
HARDLY = 0.1
"""Weights that have moved by more of their size are not held back."""
USUAL_EPS = 3e-8
"""What is not larger is not to blame."""
FAST = ("adamax", "adafactor", "adagrad", "lion", "rmsprop", "sign")
"""Parts of names of optimizers of Adam's family whose eps does not work like Adam's."""


class Whole:
    """Watches what all layers have in common; the judge counts its findings like those of layers."""

    def __init__(self) -> None:
        self._pace, self._losses, self._outputs = PaceTrend(), LossTrend(), OutputTrend()
        self._stale = 0.0  # 1 if gradients are used again, as far as is known
        # Of its learning rate that Adam moved an entry by in the first steps; 0 if unknown, 1 without fault.
        self._share = 0.0

    @property
    def history(self) -> History:
        """The run so far, as causes need it."""
        return History(self._pace.pace, self._pace.first_pace, self._outputs.large_outputs, self._pace.fastest)

    def findings(self, measurement: Measurement, network: Network) -> Iterator[Finding]:
        """Yield what can be said of the network at a measurement, healthy or not."""
        yield from self._reused(measurement)
        yield from _in_code(measurement)
        diverged = self._diverged(measurement, network)
        yield diverged
        if not diverged.inside():
            yield from self._outputs.targets(measurement, network)  # which may be why
            return
        if (still := _still(measurement, network)) is not None:
            yield still
            if not still.inside():
                return
        yield from _parametrization(network)
        yield _certain("symmetric", "weight_natural", _is_symmetric(network), "random weights")
        yield from self._pace.findings(network)
        yield from self._losses.findings(measurement, network, self._pace.pace)
        yield from self._outputs.findings(measurement, network)
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

    def _eps(self, network: Network) -> Iterator[Finding]:
        """Yield how much of its learning rate an optimizer like Adam moved an entry by in the first steps."""
        eps = max((row.settings.eps for row in network.peers if not math.isnan(row.settings.eps)), default=0.0)
        share = _share_of_rate(network)
        grown = share > self._share > 0  # gradients have grown beyond eps since
        if not math.isnan(share) and (network.is_early or grown or not self._share):
            # Sparse gradients make entries move less as well. So do those of a loss that is nearly 0 later on, or of a
            # network that steps have ruined.
            blamed = (network.below_eps and not (network.drift > HARDLY or network.has_small_gains)) or (
                eps > USUAL_EPS and (network.is_early or grown)
            )
            self._share = share if blamed else 1.0
        if eps > 0 and self._share > 0:
            yield Finding("eps", NETWORK, "update_fro", self._share, EFFICIENT, (1.0, math.inf), against="Adam's usual")

    def state_dict(self) -> dict[str, Any]:
        """Return plain types."""
        own = {key: value for key, value in (("stale", self._stale), ("eps_share", self._share)) if value}
        return {**self._pace.state_dict(), **self._losses.state_dict(), **self._outputs.state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._pace.load_state_dict(state)
        self._losses.load_state_dict(state)
        self._outputs.load_state_dict(state)
        self._stale, self._share = float(state.get("stale", 0.0)), float(state.get("eps_share", 0.0))


def _in_code(measurement: Measurement) -> Iterator[Finding]:
    """Yield slips in the code of a model, which no norm shows: certain at once."""
    summary = measurement.summary
    if "unfit_loss_input" in summary:
        yield _certain("loss_input", "unfit_loss_input", summary["unfit_loss_input"] > 0, "logits")
    for check, key, most in (("eval_mode", "eval_share", MOSTLY_EVAL), ("dropout", "dropout_largest", MOST_DROPPED)):
        if key in summary:
            yield Finding(check, NETWORK, key, summary[key], 1.0, (0.0, most), AT_ONCE, "a network in training")


def _parametrization(network: Network) -> Iterator[Finding]:
    """Yield whether learning rates or weights follow a rule that does not fit the optimizer; certain at once."""
    momentum = max((row.settings.momentum for row in network.peers), default=0.0)
    for check, wrong in (
        ("sgd_rule", network.sgd_rule_under_adam),
        ("ntk", network.ntk_rates or network.ntk_weights),
        ("momentum", LASTING <= momentum < 1),
    ):
        yield _certain(check, "lr", wrong, "the rule of the optimizer")


def _is_symmetric(network: Network) -> bool:
    """Return whether a matrix whose units are alike feeds another of that kind, as constants do: the units between them
    learn the same.

    One such matrix does no harm: gradients that come through a random one tell its units apart.
    """
    large = [row for row in network.rows if row.dense and min(row.info.fan_in, row.info.fan_out) >= UNITS]
    return any(a.alike and b.alike and a.info.fan_out == b.info.fan_in for a, b in pairwise(large))


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
    """Return the largest update of all, 0 if nothing moves; ``None`` if updates were not measured, or are lost because
    the schedule has brought learning rates next to 0.

    It is 0 too if biases and gains alone move, because matrices cannot. To train those of a trained network alone, with
    all else frozen, is a method.
    """
    keys = [key for key in _MOVES if key in measurement.values]
    if not keys or not network.rows:
        return None
    faded = [row.to_peak >= 1 / FADED for row in network.moved_by_rate]
    if network.top_lr > 0 and faded and all(faded):
        return None
    matrices, vectors = (_largest(rows, keys) for rows in (network.rows, network.vectors.values()))
    reasons = {measurement.why(keys[0], row.info.name) for row in network.rows}
    if reasons <= {COMPILED_STEP, DIVIDED}:
        return None
    no_step = f"{NO_STEP} that is known of" if reasons == {NO_STEP} else ""
    certain = why_still(network)
    if certain == FROZEN and any(row.settings.elsewhere for row in network.rows):
        return None
    why = certain or no_step or "every update is 0, NaN or skipped"
    moved = no_step and any(row.get("drift_ratio") > 0 for row in network.rows)
    largest, what = max(matrices, vectors), "no update is seen" if moved else "no parameter moves"
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
