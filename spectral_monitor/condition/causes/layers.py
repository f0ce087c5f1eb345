"""Causes of findings on single layers, the most certain first."""

from __future__ import annotations

import math
from collections.abc import Callable

from spectral_monitor.condition.causes.explanation import NO_CAUSE, Explanation, at_peak
from spectral_monitor.condition.causes.network import MOSTLY_CLIPPED, ORDINARY
from spectral_monitor.condition.causes.silent import cut_off, dead, left_out, lr_zero
from spectral_monitor.condition.findings import SUSPECT, UPDATE_LIMIT, Finding
from spectral_monitor.condition.network import MOVED, Network
from spectral_monitor.condition.row import Row
from spectral_monitor.condition.verdict import Remedy, short
from spectral_monitor.fitting.medians import geometric_median

HEAVY = 5.0
"""Weights that began this many times above or below the median explain a finding."""
SAME = 1.05
"""Numbers that follow one rule differ by less than this factor."""
SIMILAR = 3.0
"""Updates whose natural norms differ by less than this factor are similar."""
MEMORY = 10_000
"""Steps over which weight decay may remove a weight, about as with published values."""
COUPLED = 1e-4
"""A usual weight decay if an optimizer like Adam adds it to the gradient."""
MILD = 1e-3
"""Such a decay of an optimizer like Adam is usual, and only outweighs unusually small gradients."""
HARDLY_MOVES = 2e-4
"""Relative update, at the peak of the schedule, below which a layer hardly moves; fine-tuning at 1e-5 has 5e-4."""
NEW_HARDLY_MOVES = 2e-3
"""The same in a new network: a tenth of the least healthy step."""
PACE, SLOW_PACE = 0.1, 0.005
"""A usual pace of new layers, and one at which they hardly move; that of healthy networks is 0.01 to 0.4."""
OVERWRITES = 0.5
"""Relative update from which on steps are too large: twice the largest healthy one."""
STILL = 0.1
"""A layer whose drift is below this part of the median hardly moves."""


def of_layer(finding: Finding, row: Row, network: Network) -> Explanation:
    """Return the first explanation that fits."""
    for explain in _BY_CHECK[finding.check]:
        if (explanation := explain(finding, row, network)) is not None:
            return explanation
    return Explanation(NO_CAUSE, f"{_deviation(finding)}; none of the known causes fits")


def _deviation(finding: Finding) -> str:
    """Describe how far a layer deviates from the reference."""
    noun = "update" if finding.quantity.startswith("update") else "weights"
    size = f"{short(1 / finding.ratio)}x smaller" if finding.ratio < 1 else f"{short(finding.ratio)}x larger"
    return f"{noun} {size} than {finding.against}"


def _rate(finding: Finding, row: Row, network: Network) -> Explanation | None:
    """Explain by a learning rate that differs from those of the others, or from the profile's."""
    rate = network.rates.get(row.name)
    from_profile = not math.isnan(finding.lr)
    if rate is None or (rate.purpose and not from_profile):
        return None
    usual_lr = finding.lr if from_profile else rate.usual_lr
    factor = row.lr / usual_lr
    large = factor >= SUSPECT
    if not (large or factor <= 1 / SUSPECT) or large != (finding.check == "exploding" or finding.ratio > 1):
        return None
    own_lr, advised_lr = at_peak(row, row.lr), at_peak(row, usual_lr)
    reference = "the profile's" if from_profile else "that of the other layers"
    others = [network.rates[peer.name] for peer in network.peers_of(row) if peer.name in network.rates]
    if not from_profile and not all(math.isclose(usual_lr, other.usual_lr, rel_tol=0.05) for other in others):
        reference = "the rule that the others follow gives"
    code = "lr_too_large" if large else "lr_too_small"
    comparison = f"its learning rate is {own_lr:.3g}, {reference} {advised_lr:.3g}"
    certain = from_profile or finding.check == "exploding" or row.name in network.expected
    if not certain and (size := _size_if_similar(row, network)):
        return Explanation(
            code,
            f"{comparison}; its update is {short(size)} times theirs in the natural norm, and would be "
            f"{short(size / factor)} times at that rate: if this is intended, set expected={{{row.name!r}: "
            f"{factor:.3g}}}",
        )
    if not from_profile and (reason := _why_others_are_off(row, network, large)):
        return Explanation(code, f"{comparison}, at which {reason}: use one of the two for all layers")
    return Explanation(code, f"{comparison}: use {advised_lr:.3g}", Remedy("set_lr", (row.name,), advised_lr))


def _vector_rate(finding: Finding, row: Row, network: Network) -> Explanation | None:
    advised_lr = at_peak(row, finding.reference)
    return Explanation(
        "lr_too_large",
        f"its learning rate is {at_peak(row, row.lr):.3g}, that of matrices {advised_lr:.3g}, and a step may change "
        f"its entries by {short(row.vector_step)}: use {advised_lr:.3g}",
        Remedy("set_lr", (row.name,), advised_lr),
    )


def _at_usual_rate(row: Row, network: Network) -> list[Row]:
    """Return the other layers that have the usual learning rate."""
    rates = network.rates
    return [
        peer
        for peer in network.peers_of(row)
        if peer is not row and peer.name in rates and rates[peer.name].factor == 1
    ]


def _why_others_are_off(row: Row, network: Network, large: bool) -> str:
    """Return why the rate of the others may be wrong instead, if this layer takes ordinary steps; else nothing."""
    others = _at_usual_rate(row, network)
    if large and network.fresh:
        own, pace = _pace(row, network), geometric_median(_pace(peer, network) for peer in others)
        return "they hardly move" if pace < SLOW_PACE and own * pace < PACE**2 else ""
    own = network.largest_steps.get(row.name, math.nan)
    pace = geometric_median(network.largest_steps.get(peer.name, math.nan) for peer in others)
    if large:
        return "they hardly move" if pace < HARDLY_MOVES and 0 < own < ORDINARY else ""
    least = NEW_HARDLY_MOVES if network.fresh else HARDLY_MOVES
    return f"steps change them by {short(pace)} of their size" if pace > OVERWRITES and own > least else ""


def _pace(row: Row, network: Network) -> float:
    """Return the root of the relative size times the natural norm of a layer's largest update; NaN if unknown."""
    largest, ratio = network.largest_steps.get(row.name, math.nan), row.get("update_ratio")
    return largest * math.sqrt(row.update / ratio) if ratio > 0 and row.update > 0 else math.nan


def _size_if_similar(row: Row, network: Network) -> float:
    """Return a layer's update over the median of layers at their usual rates, in the natural norm; 0 unless similar.

    The spectral condition asks for learning rates that make updates similar in this norm.
    """
    size = row.update / geometric_median(peer.update for peer in _at_usual_rate(row, network))
    return size if 1 / SIMILAR < size < SIMILAR else 0.0


def _frobenius(finding: Finding, row: Row, network: Network) -> Explanation | None:
    """Explain by a rule that makes each layer's step proportional to the Frobenius norm of its weights."""
    if not _is_frobenius(network):
        return None
    share = row.get("update_fro") / row.get("weight_fro")
    return Explanation(
        "frobenius_rule",
        f"{_deviation(finding)}: each step is {short(share)} of the Frobenius norm of the weights in every layer, as "
        "with LARS and LAMB, which is off by sqrt(min(fan_in, fan_out)); divide each layer's learning rate by that",
        Remedy("scale_lr", (row.name,), 1 / finding.ratio),
    )


def _is_frobenius(network: Network) -> bool:
    """Return whether layers share one update-to-weight ratio in the Frobenius norm but differ in the natural norm."""
    rows = [row for row in network.peers if row.get("update_fro") > 0 and row.get("weight_fro") > 0]
    if len({min(row.info.fan_in, row.info.fan_out) for row in rows}) < 2 or len({row.info.fan_in for row in rows}) < 2:
        return False  # if all layers have the same number of inputs, the first step of Adam looks like this too
    ratios = [row.get("update_fro") / row.get("weight_fro") for row in rows]
    sizes = [row.get("update_natural") for row in rows]
    return len(rows) > 2 and max(ratios) < SAME * min(ratios) and max(sizes) > SAME * min(sizes)


def _heavy(finding: Finding, row: Row, network: Network) -> Explanation | None:
    """Explain by weights that began too large or too small."""
    factor = network.initial_gain(row)
    large = factor > HEAVY
    if not (large or 0 < factor < 1 / HEAVY) or not network.as_drawn(row) or row.name in network.from_zero:
        return None
    if finding.check == "reference" and large == (finding.ratio > 1):
        return None  # under most optimizers heavy weights get small updates, not large ones
    size = short(max(factor, 1 / factor))
    code, advice = "weights_too_small", f"smaller than typical: multiply them by {size}"
    if large:
        code, advice = "weights_too_large", f"larger than typical: divide them by {size}"
        if row.info.role == "readout":
            code, advice = "readout_init", f"{advice}, or initialize them to 0"
    return Explanation(
        code, f"its initial weights are {size}x {advice}", Remedy("scale_weights", (row.name,), 1 / factor)
    )


def _embedding(finding: Finding, row: Row, network: Network) -> Explanation | None:
    size = network.initial_rows(row)
    if row.info.role != "embedding" or not (0 < size < 0.02 or size > 1):
        return None
    target = 1.0 if size > 1 else 0.02
    if finding.check == "exploding" and finding.value * size >= target * UPDATE_LIMIT:
        return None  # its steps would be too large for entries of the usual size as well
    advice = f"divide its initial weights by {short(size / target)}"
    if size < target:
        advice = f"multiply its initial weights by {short(target / size)}"
    return Explanation(
        "embedding_scale",
        f"the entries of its largest row are about {short(size)}, where 0.02 to 1 is usual: {advice}",
        Remedy("scale_weights", (row.name,), target / size),
    )


def _embedding_grown(finding: Finding, row: Row, network: Network) -> Explanation | None:
    if finding.ratio < 1:
        return None
    return Explanation(
        "weights_grown",
        f"the entries of its largest row began at about {short(network.initial_rows(row))} and are now "
        f"{short(finding.value)}: lower its learning rate, or keep them smaller with weight decay",
        Remedy("check", (row.name,)),
    )


def _theory(finding: Finding, row: Row, network: Network) -> Explanation | None:
    if finding.quantity != "weight_natural" or finding.against != "the theory's":
        return None
    if row.get("drift_ratio") > MOVED:
        return Explanation("weights_grown", f"{_deviation(finding)}: its updates have made them grow since the start")
    fan_in, fan_out = row.info.fan_in, row.info.fan_out
    deviation = short(min(1.0, math.sqrt(fan_out / fan_in)) / math.sqrt(fan_in))
    code, size = "weights_too_small", f"{short(1 / finding.ratio)} times too small"
    if finding.ratio > 1:
        code = "readout_init" if row.info.role == "readout" else "weights_too_large"
        size = f"{short(finding.ratio)} times too large"
    return Explanation(
        code,
        f"its initial weights are {size}: use standard deviation {deviation}, times 1.4 if a ReLU follows",
        Remedy("scale_weights", (row.name,), 1 / finding.ratio),
    )


def _readout_width(finding: Finding, row: Row, network: Network) -> Explanation | None:
    if row.info.role != "readout" or finding.ratio < 1 or row.settings.family == "adam":
        return None
    return Explanation(
        "readout_width",
        f"{_deviation(finding)}: under {row.settings.optimizer or 'SGD'} the update of an output layer grows with its "
        f"number of inputs ({row.info.fan_in}); initialize it to 0, or lower its learning rate",
    )


def _vanishing(finding: Finding, row: Row, network: Network) -> Explanation | None:
    drift, median = row.get("drift_ratio"), network.comparison.others("drift_ratio", row)
    if finding.ratio > 1 or not drift < STILL * median or row.name in network.late_layers:
        return None
    symptom = f"it has moved by {short(drift)} of its size since the start, the others by {short(median)}"
    gradient, eps, clip = row.gradient_entry, row.settings.eps, network.clip_factor
    if gradient * clip < eps < gradient:
        return Explanation(
            "eps",
            f"{symptom}: clipping makes gradients {short(1 / clip)} times smaller, and eps {eps:g} is larger than what "
            "is left of its own: clip less",
            Remedy("check", (row.name,)),
        )
    return Explanation(
        "vanishing",
        f"{symptom}: hardly any gradient arrives; check the layers after it, and whether its inputs are tiny",
        Remedy("check", (row.name,)),
    )


def _exploding(finding: Finding, row: Row, network: Network) -> Explanation | None:
    divisor = 10 * finding.value
    return Explanation(
        "exploding",
        f"each step moves it by {short(finding.value)} of its own size, so each overwrites what the previous one "
        f"learned: divide its learning rate by about {short(divisor)}",
        Remedy("scale_lr", (row.name,), 1 / divisor),
    )


def _grown(finding: Finding, row: Row, network: Network) -> Explanation | None:
    return Explanation(
        "exploding",
        f"its weights have moved by {short(row.get('drift_ratio'))} times their initial size and amplify inputs by up "
        f"to {short(row.weight)}: divide its learning rate by about 10",
        Remedy("scale_lr", (row.name,), 0.1),
    )


def _rounding(finding: Finding, row: Row, network: Network) -> Explanation | None:
    return Explanation(
        "rounding",
        "its updates are too small for the dtype of its weights and are lost to rounding: keep weights in float32",
        Remedy("check", (row.name,)),
    )


def _logits(finding: Finding, row: Row, network: Network) -> Explanation | None:
    advice = "divide the learning rate of its queries and keys by about 10, or normalize them (q/k norms)"
    remedy = Remedy("scale_lr", (row.name,), 0.1)
    if network.corrected:  # the correction sets the learning rate
        advice = "this network needs smaller steps: divide the correction's size by 4 or more"
        remedy = Remedy("check", (row.name,))
    return Explanation(
        "logits_exploding",
        f"its largest attention logit is {short(finding.value)}, {finding.against}: heads are about to attend to a "
        f"single key; {advice}",
        remedy,
    )


def _collapsed(finding: Finding, row: Row, network: Network) -> Explanation | None:
    return Explanation(
        "attention_collapsed",
        f"one of its heads has attended to a single key for a long time (entropy {short(finding.value)} of 1), so its "
        "queries and keys get almost no gradient: initialize them smaller, or divide their learning rate by about 10",
        Remedy("scale_lr", (row.name,), 0.1),
    )


def _decay(finding: Finding, row: Row, network: Network) -> Explanation | None:
    """Explain by weight decay, and advise a smaller one that removes a weight over :data:`MEMORY` steps."""
    settings, decay = row.settings, row.settings.weight_decay
    lr = (at_peak(row, row.lr) or settings.peak) * row.multiplier
    advised = (1.0 if settings.decoupled else 1 - settings.momentum) / (MEMORY * lr) if lr > 0 else decay
    advice = f"use about {{}}, which removes 1/{MEMORY} in a step"
    if not settings.decoupled and settings.family != "sgd":
        advised, advice = COUPLED, "this optimizer adds it to the gradient, so use about {}, or AdamW with 0.01"
        if network.clip_factor < MOSTLY_CLIPPED:
            times = short(1 / network.clip_factor)
            advice = f"clipping makes gradients {times} times smaller, so clip less, or use AdamW with 0.01"
        elif decay <= MILD:
            advice += "; gradients must be tiny to lose against so small a decay: check the scale of inputs and loss"
    advised = float(f"{min(advised, decay / 10):.1g}")
    effect = f"has shrunk its weights to {short(finding.ratio)} of their initial size"
    if finding.quantity == "lr":
        effect = f"removes {100 * finding.ratio:.0f} % of its weights in each step"
    correction = (
        f", at a learning rate that the correction multiplies by {short(row.multiplier)}," if row.multiplier > 1 else ""
    )
    return Explanation(
        "decay_too_large",
        f"weight decay {decay:.3g} of {settings.optimizer or 'its optimizer'}{correction} {effect}: "
        + advice.format(f"{advised:.3g}"),
        Remedy("set_weight_decay", (row.name,), advised) if "{}" in advice else Remedy("check", (row.name,)),
    )


Explainer = Callable[[Finding, Row, Network], Explanation | None]
_BY_CHECK: dict[str, tuple[Explainer, ...]] = {
    "dead": (lr_zero, dead),
    "cut_off": (cut_off,),
    "left_out": (left_out,),
    "rate": (_rate,),
    "vector_rate": (_vector_rate,),
    "exploding": (_rate, _embedding, _exploding),
    "grown": (_rate, _grown),
    "rounding": (_rounding,),
    "reference": (_theory, _rate, _frobenius, _heavy, _vanishing, _readout_width),
    "weights": (_heavy,),
    "head": (_heavy,),
    "embedding": (_embedding, _embedding_grown),
    "decay": (_decay,),
    "logits_exploding": (_rate, _logits),
    "attention_collapsed": (_collapsed,),
}
