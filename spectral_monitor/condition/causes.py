"""What a finding likely is, and what to do: a code and a sentence for people who have not read the papers."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import takewhile

from spectral_monitor.condition.checks import SUSPECT, Finding
from spectral_monitor.condition.network import Network, Row
from spectral_monitor.condition.verdict import short

CAUSES = {
    "lr_zero": "its learning rate is 0 while others learn",
    "lr_too_large": "its learning rate is larger than that of the others",
    "lr_too_small": "its learning rate is smaller than that of the others",
    "sgd_rule_under_adam": "learning rates follow fan_out/fan_in, which is for SGD, under an optimizer like Adam",
    "ntk_scaling": "learning rates, or factors in the forward pass, let hidden updates vanish with width",
    "readout_init": "the readout's weights are too large for its width",
    "weights_too_large": "its weights are far larger than those of the others",
    "weights_too_small": "its weights are far smaller than the theory has them",
    "weights_elsewhere": "another layer's weights are far too large",
    "embedding_scale": "an embedding's rows are far too large or too small",
    "lr_elsewhere": "another layer's learning rate is far from that of the others",
    "exploding": "steps as large as the weights, or weights that grow without end",
    "dead": "no gradient arrives: it is dead, or cut off from the loss",
    "dead_input": "its inputs are all zero",
    "dead_above": "no gradient arrives, for a later layer is dead",
    "unmoved": "it has a learning rate but does not move",
    "fan_in": "one learning rate for matrices of very different fan_in, under an optimizer like Adam",
    "readout_width": "the readout's update grows with width",
    "vanishing": "it has hardly moved since the start",
    "unknown": "none of the above",
}
"""Every code a verdict may carry."""

EXPLAINS = 0.4
"""A factor is taken for the cause of a ratio if it explains this part of it, on a log scale."""
NOTABLE = 2.0
"""Learning rates that differ by less are no cause."""
HEAVY = 5.0
"""Weights this many times the median are a cause."""
MOVED = 3.0
"""Weights that have come this many times the norm they began with are not a matter of initialisation."""
STILL = 0.1
"""A drift below this part of the median is hardly any."""

Told = tuple[str, str]


def cause(finding: Finding, network: Network) -> Told:
    """Code and sentence; the first explanation that fits, the most certain first.

    Example:
        >>> from spectral_monitor import LayerInfo
        >>> infos = [LayerInfo(name, "operator", 8, 8, (8, 8)) for name in "abc"]
        >>> rates = {"a": 1.0, "b": 1.0, "c": 100.0}
        >>> rows = tuple(Row(info, {"lr": rates[info.name], "update_natural": rates[info.name]}) for info in infos)
        >>> network = Network(10, rows, compared=frozenset("abc"), family="adam")
        >>> finding = Finding("reference", "c", "update_natural", 90.0, 1.0, (0.25, 4.0))
        >>> print(cause(finding, network)[1])
        update 90 times its share: learning rate 100 times that of the other layers; divide it by about 90
    """
    row = next(row for row in network.rows if row.info.name == finding.layer)
    for explanation in _BY_CHECK[finding.check]:
        told = explanation(finding, row, network)
        if told is not None:
            code, sentence = told
            return code, f"{_what(finding, row)}: {sentence}"
    return "unknown", f"{_what(finding, row)}, and none of the known causes fits"


def _what(finding: Finding, row: Row) -> str:
    """What was seen, before any explanation."""
    if finding.check == "dead":
        if finding.quantity != "contribution":
            return "it does not move at all"
        return "nothing of its gradient is in its update" if row.get("lost") > 0 else "no gradient reaches its weights"
    if finding.check == "exploding":
        return f"each step moves it by {short(finding.value)} of its own size"
    noun = "update" if finding.quantity.startswith("update") else "weights"
    times = f"1/{short(1 / finding.ratio)} of" if finding.ratio < 1 else f"{short(finding.ratio)} times"
    return f"{noun} {times} {finding.against}"


def _large(finding: Finding) -> bool:
    return finding.ratio > 1 or finding.check == "exploding"


def _explains(factor: float, finding: Finding) -> bool:
    """Whether a factor goes the way of the finding, and far enough."""
    return factor > 0 and (factor > 1) == (finding.ratio > 1) and factor != 1 and _share(factor, finding) >= EXPLAINS


def _share(factor: float, finding: Finding) -> float:
    return math.log(factor) / math.log(finding.ratio)


def _lr_zero(finding: Finding, row: Row, network: Network) -> Told | None:
    if row.get("lr") != 0:
        return None
    return "lr_zero", "its learning rate is 0 while others learn; give it one, or freeze it with requires_grad_(False)"


def _dead(finding: Finding, row: Row, network: Network) -> Told | None:
    """Which of a chain of dead layers is to blame: the last one whose bias is dead too, if biases are measured."""
    dead = [other for other in network.rows if _silent(other) and other.get("lr") != 0]
    if row.get("lost") > 0:
        return "unmoved", (
            "gradients arrive, but its updates are lost, most likely as too small for the precision of its weights; "
            "keep them in float32, or raise its learning rate"
        )
    if row not in dead:
        return "unmoved", "a learning rate but no update: no gradient arrives, or updates too small for its precision"
    if len(dead) == len(network.rows):
        return (
            "dead",
            "nor does any other layer: the loss does not depend on them, is exactly 0, or one of them is dead",
        )
    chain = list(takewhile(lambda other: other in dead, network.rows[network.rows.index(row) :]))
    blamed = [other for other in chain if not _bias(other, network)]
    if row not in blamed:
        return "dead_input", "a gradient reaches its bias, so its inputs are all zero: the layer before it is dead"
    if blamed[-1] is not row:
        return "dead_above", f"a later layer ({blamed[-1].info.name}) is dead and lets no gradient through"
    size = network.vectors.get(f"{row.info.name}.bias", row).get("weight_natural")
    never = f" (biases of size {short(size)})" if size > 10 else ""
    return "dead", f"its outputs are cut off, as by a ReLU that never opens{never}, or detached; initialise it anew"


def _silent(row: Row) -> bool:
    """Whether no gradient arrives: it contributes nothing, and not because its update was lost."""
    return row.get("contribution") == 0 and not row.get("lost") > 0


def _bias(row: Row, network: Network) -> bool:
    """Whether a gradient arrives at its bias; not if it has none or that was not measured."""
    bias = network.vectors.get(f"{row.info.name}.bias")
    return bias is not None and not math.isnan(bias.get("contribution")) and not _silent(bias)


def _lr(finding: Finding, row: Row, network: Network) -> Told | None:
    """Its learning rate stands out from that of the profile, or from the rule that the others follow."""
    known = not math.isnan(finding.lr)
    factor = row.get("lr") / finding.lr if known and finding.lr > 0 else network.lr_factor(row)
    whose = "the profile's" if known else "that of the other layers"
    if not factor > 0 or max(factor, 1 / factor) < NOTABLE:
        return None
    if finding.check == "exploding":
        if factor < 1:
            return None
        return "lr_too_large", f"learning rate {short(factor)} times {whose}; divide it by about {short(factor)}"
    if not _explains(factor, finding):
        return None
    if factor > 1:
        return (
            "lr_too_large",
            f"learning rate {short(factor)} times {whose}; divide it by {_span(finding.ratio, factor)}",
        )
    by = _span(1 / finding.ratio, 1 / factor)
    return "lr_too_small", f"learning rate 1/{short(1 / factor)} of {whose}; multiply it by {by}"


def _span(seen: float, known: float) -> str:
    """What was measured; where that is far from what the settings say, such as after growth, both."""
    near = max(seen / known, known / seen) < 3
    return f"about {short(seen)}" if near else f"{short(min(seen, known))} to {short(max(seen, known))}"


def _sgd_rule(finding: Finding, row: Row, network: Network) -> Told | None:
    if not network.sgd_rule_under_adam or not row.dense:
        return None
    return "sgd_rule_under_adam", (
        "learning rates are proportional to fan_out/fan_in, the rule for SGD; under Adam updates then grow with "
        "fan_out: make them proportional to 1/fan_in"
    )


def _ntk(finding: Finding, row: Row, network: Network) -> Told | None:
    """The neural tangent scaling, by its learning rates or by its multipliers; readouts then outrun hidden layers."""
    if not row.dense or _large(finding) == (row.info.role == "operator"):
        return None
    seen = "hidden layers hardly learn while the readout does, the more so the wider they are"
    if network.ntk_rates:
        return "ntk_scaling", (
            f"learning rates are proportional to 1/fan_in, under SGD: {seen}; make them proportional to fan_out/fan_in"
        )
    if network.ntk_weights:
        return "ntk_scaling", (
            f"weights have entries of size 1, so the forward pass divides by sqrt(fan_in): {seen}; "
            "divide by fan_in at the readout, and multiply learning rates by the width"
        )
    return None


def _heavy(finding: Finding, row: Row, network: Network) -> Told | None:
    """Its own weights are too large: so they began, or so they have become."""
    size = row.get("weight_natural")
    factor = size / network.others("weight_natural", row)
    if not factor > HEAVY:
        return None
    if _grew(row, network):
        return _outgrown(finding, row, network)
    if row.info.role == "readout":
        return "readout_init", (
            f"its weights stretch by {short(size)} where 1 would do; initialise it with standard deviation 1/fan_in = "
            f"{short(1 / row.info.fan_in)}, or with zero"
        )
    return "weights_too_large", f"initialised {short(factor)} times larger than the others; divide its weights by that"


def _grew(row: Row, network: Network) -> bool:
    """Whether its weights are as large as updates have made them."""
    return row.get("drift_ratio") > MOVED or row.info.name in network.from_zero


def _outgrown(finding: Finding, row: Row, network: Network) -> Told:
    drift = row.get("drift_ratio")
    far = "come all the way from zero" if math.isnan(drift) else f"moved {short(drift)} times the size they began with"
    return "exploding", (
        f"its weights have {far}, and stretch by {short(row.get('weight_natural'))}; lower its learning rate"
    )


def _heavy_elsewhere(finding: Finding, row: Row, network: Network) -> Told | None:
    heavy = max(network.peers, key=lambda other: other.get("weight_natural") or 0.0, default=row)
    factor = heavy.get("weight_natural") / network.others("weight_natural", heavy)
    if heavy is row or not factor > HEAVY or _grew(heavy, network):
        return None
    return "weights_elsewhere", (
        f"the weights of {heavy.info.name} are {short(factor)} times the median of the others; see to it first"
    )


def _lr_elsewhere(finding: Finding, row: Row, network: Network) -> Told | None:
    factors = {other.info.name: network.lr_factor(other) for other in network.peers if other is not row}
    name = max(factors, key=lambda name: factors[name] if factors[name] > 0 else 0.0, default="")
    if not name or not factors[name] > SUSPECT:
        return None
    return "lr_elsewhere", (
        f"the learning rate of {name} is {short(factors[name])} times that of the other layers; see to it first"
    )


def _theory(finding: Finding, row: Row, network: Network) -> Told | None:
    if finding.quantity != "weight_natural":
        return None
    fan_in, fan_out = row.info.fan_in, row.info.fan_out
    deviation = short(min(1.0, math.sqrt(fan_out / fan_in)) / math.sqrt(fan_in))
    code = "weights_too_small"
    if _large(finding):
        code = "readout_init" if row.info.role == "readout" else "weights_too_large"
    return code, f"initialise it with standard deviation about {deviation}, times 1.4 where a ReLU follows"


def _embedding(finding: Finding, row: Row, network: Network) -> Told | None:
    if row.info.role != "embedding":
        return None
    size = short(row.get("weight_natural"))
    return "embedding_scale", (
        f"the entries of its largest row are about {size}, where 0.02 to 1 is usual; change its initialisation"
    )


def _fan_in(finding: Finding, row: Row, network: Network) -> Told | None:
    """Under Adam and one learning rate the share of a layer is that of its fan_in."""
    if network.family != "adam" or network.rule() != "one rate" or not row.dense:
        return None
    middle = network.usual_fan_in(finding.quantity)
    factor = row.info.fan_in / middle
    if not _explains(factor, finding):
        return None
    by = f"divide its learning rate by about {short(factor)}"
    if factor < 1:
        by = f"multiply its learning rate by about {short(1 / factor)}"
    return "fan_in", (
        f"it has {row.info.fan_in} inputs, the others about {short(middle)}: under Adam updates grow with the number "
        f"of inputs; {by}"
    )


def _readout_width(finding: Finding, row: Row, network: Network) -> Told | None:
    if row.info.role != "readout" or not _large(finding) or network.family == "adam":
        return None
    return "readout_width", (
        f"a readout's update grows with its {row.info.fan_in} inputs, the hidden layers' does not; initialise it with "
        f"zero or standard deviation 1/fan_in, and divide its learning rate by about {short(finding.ratio)}"
    )


def _vanishing(finding: Finding, row: Row, network: Network) -> Told | None:
    drift, middle = row.get("drift_ratio"), network.others("drift_ratio", row)
    if _large(finding) or not drift < STILL * middle:
        return None
    return "vanishing", (
        f"it has moved by {short(drift)} of its size since the start, the others by {short(middle)}: hardly any "
        f"gradient arrives; see what follows it, or multiply its learning rate by about {short(1 / finding.ratio)}"
    )


def _exploding(finding: Finding, row: Row, network: Network) -> Told | None:
    drift = row.get("drift_ratio")
    gone = f", and it has gone {short(drift)} times the size it began with" if drift > 1 else ""
    return (
        "exploding",
        f"nothing it learns is kept{gone}; divide its learning rate by about {short(10 * finding.value)}",
    )


Explanation = Callable[[Finding, Row, Network], Told | None]
_BY_CHECK: dict[str, tuple[Explanation, ...]] = {
    "dead": (_lr_zero, _dead),
    "exploding": (_sgd_rule, _lr, _embedding, _lr_elsewhere, _heavy_elsewhere, _exploding),
    "grown": (_lr, _lr_elsewhere, _outgrown),
    "reference": (
        _theory,
        _sgd_rule,
        _ntk,
        _lr,
        _fan_in,
        _heavy,
        _lr_elsewhere,
        _heavy_elsewhere,
        _vanishing,
        _readout_width,
    ),
    "weights": (_lr, _lr_elsewhere, _heavy),
    "embedding": (_embedding,),
}
