"""Causes of findings on the network as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from spectral_monitor.condition.causes.explanation import SIZE_OR_RATES, Explanation
from spectral_monitor.condition.causes.outputs import USUAL_GAIN, collapsed, vanish
from spectral_monitor.condition.causes.silent import forgotten
from spectral_monitor.condition.findings import Finding
from spectral_monitor.condition.network import GAINS, Network
from spectral_monitor.condition.verdict import Remedy, short
from spectral_monitor.fitting.medians import geometric_median, nanmax

TOO_FAST = 20.0
"""Learning rates are too large by about this times the square root of the median layer's relative update: steps that
are too large lead to larger ones, so updates grow faster than the rate.
"""
ORDINARY = 0.1
"""Many healthy networks reach this relative update of the median layer."""
ONE_WAY = (0.7, 2.0)
"""Range of the distance from the start over the number of steps times the largest step, if all steps point one way.
Above it, steps that were not measured must have been larger.
"""
SLOWEST = 0.05
"""A healthy geometric mean of the fastest layer's relative update and the natural norm of the median layer's."""
FASTEST = 0.1
"""Largest relative update that the advice to raise learning rates may give the fastest layer."""
MOST, MOST_UNEVEN = 100.0, 10.0
"""Largest factor in such advice: under Adam, and under optimizers whose updates grow with the gradients."""
LARGE = 2.0
"""Weights that began this many times above the largest usual gain explain small steps."""
MOSTLY_CLIPPED = 1 / 2
"""Clipping to less than this part of the gradients may be why steps are small."""
EMBEDDING_STEP = 0.5
"""Embeddings whose largest row takes at most this natural step keep their rates if the others' are too large: with
steps up to 0.4 development recipes then end lower, with 1.2 higher.
"""


class History(NamedTuple):
    """Facts about the run so far that explanations need."""

    pace: float = math.nan  # largest relative update of the median layer so far
    first_pace: float = math.nan  # first known relative update of the median layer
    large_outputs: str = ""  # first layer whose outputs were too large at the start; empty if there is none
    fastest: float = 0.0  # relative update of the fastest layer at the peak of its learning rate; 0 if none is known
    bad_batch: bool = False  # whether no layer's outputs were finite once although weights were
    huge_at_start: str = ""  # a sentence on outputs that were far too large before the first step; empty if none were


def of_network(finding: Finding, network: Network, history: History) -> Explanation:
    """Explain a finding on the network as a whole."""
    if finding.check in _SENTENCES:
        code, template = _SENTENCES[finding.check]
        sentence = template.format(finding=finding, size=short(finding.value), history=history)
        return Explanation(code, sentence, Remedy("check"))
    return _EXPLAINERS[finding.check](finding, network, history)


def _divisor(pace: float, least: float) -> float:
    """Return the factor, in one digit, to divide learning rates by for healthy steps; at least ``least``."""
    return max(least, float(f"{TOO_FAST * math.sqrt(pace):.1g}")) if 0 < pace < math.inf else max(least, 10.0)


def _symptom(finding: Finding, network: Network) -> str:
    """Describe in words what steps that are too large have done."""
    if finding.quantity == "loss":
        return f"the loss is {finding.value:.2g} at step {network.step}, and {finding.against}"
    if finding.quantity == "loss_change_predicted":
        return f"by its gradient each step would take {short(finding.value)} times the loss off it, more than there is"
    if finding.quantity == "feature_rms":
        return f"the outputs of a hidden layer have grown to RMS {short(finding.value)} by step {network.step}"
    return f"weights have moved {short(finding.value)} times the size they began with by step {network.step}"


def _rates(finding: Finding, network: Network, spared: tuple[str, ...] = ()) -> str:
    """Name the learning rates that should change, or the setting of the correction that they follow."""
    if network.corrected:
        return SIZE_OR_RATES
    every = "every learning rate but those of embeddings" if spared else "every learning rate"
    owners = {row.settings.owner for row in network.rows if row.settings.optimizer}
    return f"{every} of the optimizer that trains {finding.layers[0]}" if finding.layers and len(owners) > 1 else every


def _spared(finding: Finding, network: Network) -> tuple[str, ...]:
    """Return the embeddings that may keep their learning rates although steps are too large; all or none.

    The best rate of an embedding does not depend on the width of the network, and each row rarely moves.
    """
    rows = [row for row in network.rows if not finding.layers or row.name in finding.layers]
    steps = {row.name: row.get("update_natural") * row.to_peak for row in rows if row.info.role == "embedding"}
    moved = {name: step for name, step in steps.items() if step > 0}
    small = all(step <= EMBEDDING_STEP for step in moved.values())
    return tuple(moved) if small and len(steps) < len(rows) and not network.corrected else ()


def _too_large(finding: Finding, network: Network, history: History) -> Explanation:
    symptom, pace = _symptom(finding, network), history.pace
    low, high = ONE_WAY
    if finding.quantity == "drift_ratio" and 0 < pace < ORDINARY and low < finding.value / (pace * network.step) < high:
        return Explanation(
            "one_direction",
            f"{symptom}, by steps of ordinary size ({short(pace)} of the weights) that all point one way: gradients "
            "that are not cleared, several steps for each batch, or targets or rewards far larger than the outputs",
            Remedy("check"),
        )
    divisor, spared = _divisor(pace, 3.0), _spared(finding, network)
    return Explanation(
        "rates_too_large",
        f"{symptom}: steps are too large; divide {_rates(finding, network, spared)} by about {divisor:.0f}",
        Remedy("scale_lr", finding.layers, 1 / divisor, spared),
    )


def _large_weights(finding: Finding, network: Network, history: History) -> Explanation:
    return Explanation(
        "weights_too_large",
        f"most weights began large enough to multiply features by {short(finding.value)} or more in each layer: divide "
        f"initial weights by about {short(finding.value / USUAL_GAIN)}",
        Remedy("scale_weights", (), USUAL_GAIN / finding.value),
    )


def _overshoots(finding: Finding, network: Network, history: History) -> Explanation:
    peak = nanmax(row.lr * row.to_peak for row in network.rows)
    change = f" ({peak:.2g} -> {peak / finding.value:.2g})" if peak > 0 else ""
    return Explanation(
        "global_lr_too_large",
        f"steps are {short(finding.value)} times as long as lowers the loss most, and from twice on it rises: divide "
        f"every learning rate by about {short(finding.value)}{change}",
        Remedy("scale_lr", (), 1 / finding.value),
    )


def _too_small(finding: Finding, network: Network, history: History) -> Explanation:
    relative_gain = geometric_median(
        network.initial_sizes.get(row.name, math.nan) for row in network.peers if not network.began_small(row)
    )
    if relative_gain > LARGE:
        gain = relative_gain * GAINS[1]
        return Explanation(
            "weights_too_large",
            "steps are small beside the weights, of which most began large enough to multiply features by "
            f"{short(gain)} or more: divide initial weights by about {short(gain / USUAL_GAIN)}",
            Remedy("scale_weights", (), USUAL_GAIN / gain),
        )
    limit = FASTEST / history.fastest if history.fastest else math.inf  # gates may hold back all other layers
    rows = [row for row in network.peers if not finding.layers or row.name in finding.layers]
    normalized = all(row.settings.family == "adam" and "adagrad" not in row.settings.optimizer.lower() for row in rows)
    most = MOST if normalized else MOST_UNEVEN
    factor = min(most, float(f"{max(min(SLOWEST / finding.value, limit), 2.0):.1g}"))
    times = f"{factor:.0f} or more" if factor == most else f"about {factor:.0f}"
    advice = f"multiply {_rates(finding, network)} by {times}"
    # Only steps of SGD depend on the size of gradients.
    if any(row.settings.family == "sgd" for row in rows) and network.clip_factor < MOSTLY_CLIPPED:
        advice += f", or clip gradients less: they are {short(1 / network.clip_factor)} times smaller for it"
    return Explanation(
        "rates_too_small",
        f"the largest steps so far have changed layers by about {short(finding.value)} of their size: {advice}",
        Remedy("scale_lr", finding.layers, factor),
    )


def _warmup(finding: Finding, network: Network, history: History) -> Explanation:
    trained = (row.settings for row in network.rows if not row.settings.frozen)
    peak = max(settings.peak for settings in trained if settings.reached == finding.value)
    return Explanation(
        "warmup_too_long",
        f"when training ends the learning rate will only have come to {peak:.2g} ({peak / finding.value:.2g} is set): "
        "its warm-up is longer than training, as one that is meant for batches and stepped after each epoch",
        Remedy("check"),
    )


def _diverged(finding: Finding, network: Network, history: History) -> Explanation:
    if history.bad_batch:
        return Explanation(
            "diverged",
            "no layer's outputs are finite although all weights were before the step: the batch holds NaN or inf, or "
            "values too large for its dtype; look for them in the data, and go back to earlier weights",
            Remedy("check"),
        )
    if history.huge_at_start:
        return Explanation("diverged", history.huge_at_start, Remedy("check"))
    divisor = _divisor(history.first_pace, 10.0)
    return Explanation(
        "diverged",
        "weights, updates or outputs are NaN or inf, or so large that they soon will be: go back to a checkpoint and "
        f"divide {_rates(finding, network)} by {divisor:.0f}",
        Remedy("scale_lr", (), 1 / divisor),
    )


def _eps(finding: Finding, network: Network, history: History) -> Explanation:
    eps = max((row.settings.eps for row in network.peers if row.settings.eps > 0), default=math.nan)
    if network.clip_factor < 1 < network.over_eps:
        clip, remedy = short(1 / network.clip_factor), Remedy("check")
        advice = (
            f"clipping makes gradients {clip} times smaller, and eps {eps:g} is larger than what is left: clip less"
        )
    elif eps <= 1e-8:
        remedy = Remedy("set_eps", (), 1e-15)
        advice = f"gradients are smaller than eps {eps:g}; multiply the loss by 1000 or more, or use eps 1e-15"
    else:
        remedy = Remedy("set_eps", (), 1e-8)
        advice = f"eps {eps:g} is larger than the gradients; use 1e-8"
    return Explanation(
        "eps",
        f"entries move by {short(finding.value)} of the learning rate, where Adam moves them by 0.3 to 1 in the first "
        f"steps: {advice}",
        remedy,
    )


def _momentum(finding: Finding, network: Network, history: History) -> Explanation:
    momentum = max(row.settings.momentum for row in network.peers)
    return Explanation(
        "momentum",
        f"momentum {momentum:g} averages about {short(1 / (1 - momentum))} steps, which outlasts what they were "
        "computed for: use 0.9",
        Remedy("set_momentum", (), 0.9),
    )


def _ntk(finding: Finding, network: Network, history: History) -> Explanation:
    effect = "hidden layers hardly learn while the readout does, the more so the wider they are"
    sentence = (
        f"weights have entries of size 1, so the forward pass divides by sqrt(fan_in): {effect}; divide by fan_in at "
        "the readout, and multiply learning rates by the width"
    )
    if network.ntk_rates:
        sentence = f"learning rates go with 1/fan_in, under SGD: {effect}; make them proportional to fan_out/fan_in"
    return Explanation("ntk_scaling", sentence, Remedy("check"))


def _readout(finding: Finding, network: Network, history: History) -> Explanation:
    percent = short(100 * min(finding.value, 1.0))  # above 100 if hidden layers raise the loss
    return Explanation(
        "readout_takes_all",
        f"the readout takes {percent} % of what a step takes off the loss, for long: hidden layers hardly learn "
        "features; give them larger learning rates or the readout a smaller one, and standardize targets that are far "
        "larger than the outputs begin",
        Remedy("check"),
    )


_SENTENCES = {
    "faded": (
        "schedule_too_short",
        "the learning rate {finding.against}: its schedule ends too early, as one that is meant for epochs and "
        "stepped after each batch",
    ),
    "nothing_trains": ("nothing_trains", "{finding.against}"),
    "features": (
        "input_scale",
        "the outputs of {history.large_outputs} had RMS {size} when first measured, where about 1 is usual, though its "
        "weights are of ordinary size: its inputs are too large; if they are data, normalize them to mean 0 and "
        "variance 1, else look at what makes them",
    ),
    "targets": (
        "target_scale",
        "outputs must move by at least {size} times their usual size before the loss can be 0: standardize targets or "
        "rewards to mean 0 and variance 1 (if they are so already, the loss hardly depends on the outputs: look at its "
        "temperature)",
    ),
    "sgd_rule": (
        "sgd_rule_under_adam",
        "learning rates are proportional to fan_out/fan_in, the rule for SGD; under Adam updates then grow with "
        "fan_out: make them proportional to 1/fan_in",
    ),
    "stale_gradients": (
        "stale_gradients",
        "a step used the gradients of the step before again: call optimizer.zero_grad() before each backward pass, and "
        "optimizer.step() once for each",
    ),
    "symmetric": (
        "symmetric",
        "two consecutive matrices have rank 1, as constants have, so all units between them are alike and learn the "
        "same: draw weights at random, as torch.nn does by default",
    ),
    "eval_mode": (
        "eval_mode",
        "{finding.value:.0%} of the dropouts and batch norms are in evaluation mode: call model.train() before "
        "training and after each evaluation; models that are loaded often begin in evaluation mode",
    ),
    "dropout": (
        "dropout",
        "a dropout drops {finding.value:.0%} of what it is given: its argument is the part that is dropped, not the "
        "part that is kept",
    ),
    "loss_input": (
        "loss_input",
        "the loss is given what is no input for it, such as the outputs of a softmax or a ReLU: cross_entropy and "
        "binary_cross_entropy_with_logits take logits, nll_loss and ctc_loss take the outputs of log_softmax",
    ),
}
"""Check -> its only cause, and a sentence on it; the remedy is no setting of the optimizer."""

_EXPLAINERS: dict[str, Callable[[Finding, Network, History], Explanation]] = {
    "rates_too_large": _too_large,
    "features_grow": _too_large,
    "loss_returns": _too_large,
    "beyond_loss": _too_large,
    "global_lr_too_large": _overshoots,
    "rates_too_small": _too_small,
    "warmup": _warmup,
    "diverged": _diverged,
    "large_weights": _large_weights,
    "features_vanish": lambda finding, network, history: vanish(finding, network),
    "features_collapsed": lambda finding, network, history: collapsed(finding, network),
    "eps": _eps,
    "momentum": _momentum,
    "ntk": _ntk,
    "readout_takes_all": _readout,
    "left_out": lambda finding, network, history: forgotten(network),
}
"""Check -> function that explains it."""
