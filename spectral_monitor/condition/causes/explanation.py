"""The codes of all causes, and explanations that carry one."""

from __future__ import annotations

import math
from typing import NamedTuple

from spectral_monitor.condition.row import Row
from spectral_monitor.condition.verdict import Remedy

SIZE_OR_RATES = 'the size of the correction, or every learning rate if that is "lr",'
"""The setting that steps follow under a correction whose settings are unknown."""
CAUSES = {
    "lr_zero": "its learning rate is 0 while others learn",
    "lr_too_large": "its learning rate is far larger than that of the other layers",
    "lr_too_small": "its learning rate is far smaller than that of the other layers",
    "rates_too_large": "the steps of the whole network are too large",
    "global_lr_too_large": "steps are so long that the loss rises along them",
    "stale_gradients": "gradients of an earlier step are used again",
    "one_direction": "steps have an ordinary size but all point in the same direction",
    "rates_too_small": "the whole network hardly moves",
    "momentum": "momentum is so close to 1 that steps add up and become too large",
    "decay_too_large": "weight decay shrinks weights faster than gradients build them up",
    "warmup_too_long": "the learning rate is still warming up when training ends",
    "schedule_too_short": "the learning rate is close to 0 for most of training",
    "eval_mode": "dropout or batch-norm modules are in evaluation mode",
    "dropout": "a dropout drops more than three quarters of its inputs",
    "loss_input": "the loss gets an input of the wrong kind or shape, such as probabilities in place of logits",
    "width": "the learning rate is that of a narrower network; it should be divided by the growth in width",
    "sgd_rule_under_adam": "learning rates follow fan_out/fan_in, the rule for SGD, but the optimizer is like Adam",
    "ntk_scaling": (
        "learning rates, or factors in the forward pass, make the updates of hidden layers vanish with width"
    ),
    "eps": "Adam's eps is larger than the gradients",
    "input_scale": "the inputs are far too large, or hardly differ between samples",
    "target_scale": "the loss asks for outputs that are far larger than the network's initial outputs",
    "symmetric": "weights began as constants, so all units of a layer stay identical",
    "readout_init": "the output layer's weights are too large for its width",
    "weights_too_large": "its weights are far larger than those of the other layers",
    "weights_too_small": "its weights are far smaller than those of the other layers",
    "weights_grown": "updates have made its weights far larger than is healthy",
    "embedding_scale": "an embedding's rows are far too large or too small",
    "exploding": "steps are as large as the weights, or weights grow without end",
    "rounding": "updates are too small for the precision of the weights and are lost",
    "dead": "no gradient arrives: it is dead, or cut off from the loss",
    "dead_input": "its inputs are all zero",
    "dead_above": "no gradient arrives because a later layer is dead",
    "left_out": "it is not trained, although most layers like it are",
    "unmoved": "it has a learning rate but does not move",
    "vanishing": "hardly any gradient arrives",
    "readout_width": "the output layer's update grows with its number of inputs",
    "frobenius_rule": "updates are proportional to the Frobenius norm of the weights, as with LARS and LAMB",
    "readout_takes_all": "nearly all of the loss's decrease comes from the output layer, so hidden layers hardly learn",
    "diverged": "weights or outputs are NaN or inf, or soon will be",
    "nothing_trains": "no parameter moves",
    "logits_exploding": "attention logits have grown beyond 50",
    "features_collapsed": "the inputs of layers hardly differ between samples",
    "attention_collapsed": "an attention head has attended to a single key for a long time",
    "unknown": "none of the above",
}
"""Every code that a verdict may carry, with its meaning."""
NO_CAUSE = "unknown"
"""The code of a finding without a known cause; it becomes a verdict only if the user chose the band or reference."""


class Explanation(NamedTuple):
    """The cause of a finding."""

    code: str  # key of :data:`CAUSES`
    sentence: str  # what is wrong and what to do
    remedy: Remedy | None = None  # the advice as data; ``None`` without any


def at_peak(row: Row, value: float) -> float:
    """Return a present learning rate or step of a layer, scaled to the peak of its schedule."""
    scale = row.settings.peak / row.lr if row.lr else math.nan
    return value * scale if 0 < scale < math.inf else value
