"""Causes of findings on the network as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from spectral_monitor.condition.causes.explanation import SIZE_OR_RATES, Explanation
from spectral_monitor.condition.causes.losses import unfit_input, without_bound
from spectral_monitor.condition.causes.outputs import (
    USUAL_GAIN,
    began_large,
    began_small,
    collapsed,
    too_small,
    too_small_to_differ,
    uncentered,
    vanish,
)
from spectral_monitor.condition.causes.silent import forgotten, frozen
from spectral_monitor.condition.findings import Finding
from spectral_monitor.condition.network import GAINS, Network
from spectral_monitor.condition.verdict import Remedy, short
from spectral_monitor.fitting.medians import geometric_median, nanmax

TOO_FAST = 20.0
"""Learning rates are too large by about this times the square root of the median layer's relative update: steps that
are too large lead to larger ones, so updates grow faster than the rate.
"""
OVERWRITTEN = 1.0
"""Above this relative update a step leaves nothing of the weights, so it does not show how much too large it is."""
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
USUAL_MOMENTUM = 0.9
"""The default of most recipes under SGD and RMSprop."""
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
    small_gain: float = 0.0  # median gain of initial weights that were too small for outputs to differ; 0 for others
    gain: float = 0.0  # gain of the median layer's initial weights; 0 if unknown


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
        return f"the loss is {finding.value:.2g} at step {network.step}, but {finding.against}"
    if finding.quantity == "loss_change_predicted":
        return (
            f"each step is predicted to lower the loss by {short(finding.value)} times its value, more than is possible"
        )
    if finding.quantity == "feature_rms":
        grown = next((row.name for row in network.rows if row.get("feature_rms") == finding.value), "a hidden layer")
        return f"the outputs of {grown} have grown to RMS {short(finding.value)} by step {network.step}"
    return f"weights have moved by {short(finding.value)} times their initial size by step {network.step}"


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
    # Drift is relative to the initial size: weights of the usual size would not have drifted too far.
    of_weights = finding.quantity == "drift_ratio" and finding.ratio * history.gain < USUAL_GAIN
    if of_weights and (small := began_small(symptom, history.gain)):
        return small
    if finding.quantity == "drift_ratio" and 0 < pace < ORDINARY and low < finding.value / (pace * network.step) < high:
        return Explanation(
            "one_direction",
            f"{symptom}, in steps of ordinary size ({short(pace)} of the weights) that all point the same way: look "
            "for gradients that are not cleared, several steps on each batch, or targets or rewards far larger than "
            "the outputs",
            Remedy("check"),
        )
    divisor, spared = _divisor(pace, 3.0), _spared(finding, network)
    return Explanation(
        "rates_too_large",
        f"{symptom}: steps are too large; divide {_rates(finding, network, spared)} by about {divisor:.0f}"
        + " or more" * (pace > OVERWRITTEN),
        Remedy("scale_lr", finding.layers, 1 / divisor, spared),
    )


def _overshoots(finding: Finding, network: Network, history: History) -> Explanation:
    peak = nanmax(row.lr * row.to_peak for row in network.rows)
    change = f" ({peak:.2g} -> {peak / finding.value:.2g})" if peak > 0 else ""
    return Explanation(
        "global_lr_too_large",
        f"steps are {short(finding.value)} times as long as the step that lowers the loss most, and beyond 2 times the "
        f"loss rises: divide every learning rate by about {short(finding.value)}{change}",
        Remedy("scale_lr", (), 1 / finding.value),
    )


def _too_small(finding: Finding, network: Network, history: History) -> Explanation:
    relative_gain = geometric_median(
        network.initial_sizes.get(row.name, math.nan) for row in network.peers if not network.began_small(row)
    )
    if relative_gain > LARGE:
        return began_large("steps are small compared with the weights, most of which began", relative_gain * GAINS[1])
    rows = [row for row in network.peers if not finding.layers or row.name in finding.layers]
    sgd = any(row.settings.family == "sgd" for row in rows)  # only its steps depend on the size of gradients
    if sgd and (small := began_small("steps are small, because gradients pass through small weights", history.gain)):
        return small
    limit = FASTEST / history.fastest if history.fastest else math.inf  # gates may hold back all other layers
    normalized = all(row.settings.family == "adam" and not row.slows_down for row in rows)
    most = MOST if normalized else MOST_UNEVEN
    factor = min(most, float(f"{max(min(SLOWEST / finding.value, limit), 2.0):.1g}"))
    times = f"{factor:.0f} or more" if factor == most else f"about {factor:.0f}"
    advice = f"multiply {_rates(finding, network)} by {times}"
    if sgd and network.clip_factor < MOSTLY_CLIPPED:
        advice += f", or clip gradients less: clipping makes them {short(1 / network.clip_factor)} times smaller"
    return Explanation(
        "rates_too_small",
        f"the largest steps so far have changed layers by only about {short(finding.value)} of their size: {advice}",
        Remedy("scale_lr", finding.layers, factor),
    )


def _warmup(finding: Finding, network: Network, history: History) -> Explanation:
    trained = (row.settings for row in network.rows if not row.settings.frozen)
    peak = max(settings.peak for settings in trained if settings.reached == finding.value)
    return Explanation(
        "warmup_too_long",
        f"the learning rate will only reach {peak:.2g} by the end of training ({peak / finding.value:.2g} is set): its "
        "warm-up is longer than training, as when a scheduler meant for batches is stepped after each epoch",
        Remedy("check"),
    )


def _diverged(finding: Finding, network: Network, history: History) -> Explanation:
    if history.bad_batch:
        return Explanation(
            "diverged",
            "no layer's outputs are finite, although all weights were finite before the step: the batch holds NaN, inf "
            "or values too large for its dtype; find them in the data, and go back to an earlier checkpoint",
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
    eps = max((row.settings.eps for row in network.peers_or_embeddings if row.settings.eps > 0), default=math.nan)
    if network.clip_factor < 1 < network.over_eps:
        clip, remedy = short(1 / network.clip_factor), Remedy("check")
        advice = (
            f"clipping makes gradients {clip} times smaller, and eps {eps:g} is larger than what is left: clip less"
        )
    elif eps <= 1e-8:
        symptom = f"gradients are smaller than eps {eps:g}, because they pass through small weights"
        if small := began_small(symptom, history.gain):
            return small
        remedy = Remedy("set_eps", (), 1e-15)
        advice = f"gradients are smaller than eps {eps:g}; multiply the loss by 1000 or more, or use eps 1e-15"
    else:
        remedy = Remedy("set_eps", (), 1e-8)
        advice = f"eps {eps:g} is larger than the gradients; use 1e-8"
    return Explanation(
        "eps",
        f"weights move by {short(finding.value)} times the learning rate in a step, where 0.3 to 1 is usual in Adam's "
        f"first steps: {advice}",
        remedy,
    )


def _momentum(finding: Finding, network: Network, history: History) -> Explanation:
    settings = max((row.settings for row in network.peers_or_embeddings), key=lambda settings: settings.momentum)
    momentum, span = settings.momentum, 1 / (1 - settings.momentum)
    sentence = (
        f"momentum {momentum:g} averages gradients over about {short(span)} steps, so most of them are out of date: "
        f"use {USUAL_MOMENTUM:g}"
    )
    if settings.sums_gradients:
        factor = span * (1 - USUAL_MOMENTUM)
        sentence += f"; if the learning rate was chosen with {momentum:g}, multiply it by about {short(factor)} too"
    return Explanation("momentum", sentence, Remedy("set_momentum", (), USUAL_MOMENTUM))


def _ntk(finding: Finding, network: Network, history: History) -> Explanation:
    effect = "the output layer learns while hidden layers hardly do, and less the wider they are"
    sentence = (
        f"weights have entries of size 1, so the forward pass divides by sqrt(fan_in): {effect}; divide by fan_in at "
        "the output layer, and multiply learning rates by the width"
    )
    if network.ntk_rates:
        sentence = (
            f"learning rates are proportional to 1/fan_in under SGD: {effect}; make them proportional to fan_out/fan_in"
        )
    return Explanation("ntk_scaling", sentence, Remedy("check"))


def _readout(finding: Finding, network: Network, history: History) -> Explanation:
    percent = short(100 * min(finding.value, 1.0))  # above 100 if hidden layers raise the loss
    return Explanation(
        "readout_takes_all",
        f"for a long time, {percent} % of the loss's decrease has come from the output layer: hidden layers hardly "
        "learn features; raise their learning rates or lower the output layer's, and standardize targets that are far "
        "larger than the initial outputs",
        Remedy("check"),
    )


_SENTENCES = {
    "faded": (
        "schedule_too_short",
        "the learning rate {finding.against}: its schedule ends too early, as when a scheduler meant for epochs is "
        "stepped after each batch",
    ),
    "nothing_trains": ("nothing_trains", "{finding.against}"),
    "features": (
        "input_scale",
        "the outputs of {history.large_outputs} had RMS {size} when first measured, where about 1 is usual, although "
        "its weights have an ordinary size: its inputs are too large; if they are data, normalize them to mean 0 and "
        "variance 1, else check what computes them",
    ),
    "targets": (
        "target_scale",
        "outputs must change by at least {size} times their usual size before the loss can reach 0: standardize "
        "targets or rewards to mean 0 and variance 1 (if they already are, the loss hardly depends on the outputs: "
        "check its temperature)",
    ),
    "sgd_rule": (
        "sgd_rule_under_adam",
        "learning rates are proportional to fan_out/fan_in, the rule for SGD; under Adam updates then grow with "
        "fan_out: make learning rates proportional to 1/fan_in",
    ),
    "stale_gradients": (
        "stale_gradients",
        "a step used the previous step's gradients again: call optimizer.zero_grad() before each backward pass, and "
        "optimizer.step() only once after it",
    ),
    "symmetric": (
        "symmetric",
        "two consecutive matrices have rank 1, like constants, so all units between them are identical and learn the "
        "same: initialize weights at random, as torch.nn does by default",
    ),
    "eval_mode": (
        "eval_mode",
        "{finding.value:.0%} of the dropout and batch-norm modules are in evaluation mode: call model.train() before "
        "training and after each evaluation; loaded models often start in evaluation mode",
    ),
    "dropout": (
        "dropout",
        "a dropout drops {finding.value:.0%} of its inputs: its argument is the share to drop, not the share to keep",
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
    "large_weights": lambda finding, network, history: began_large("most layers began with weights", finding.value),
    "tiny_weights": lambda finding, network, history: too_small("most layers began with tiny weights", finding.value),
    "features_vanish": lambda finding, network, history: vanish(finding, network),
    "signal_vanishes": lambda finding, network, history: too_small_to_differ(history.small_gain),
    "features_collapsed": lambda finding, network, history: collapsed(finding, network),
    "uncentered": lambda finding, network, history: uncentered(finding, network),
    "eps": _eps,
    "momentum": _momentum,
    "ntk": _ntk,
    "readout_takes_all": _readout,
    "left_out": lambda finding, network, history: forgotten(network),
    "frozen_random": lambda finding, network, history: frozen(finding, network),
    "loss_input": lambda finding, network, history: unfit_input(finding),
    "endless": lambda finding, network, history: without_bound(finding),
}
"""Check -> function that explains it."""
