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
    "lr_too_large": "its learning rate is larger than that of the others",
    "lr_too_small": "its learning rate is smaller than that of the others",
    "rates_too_large": "the steps of the whole network are too large",
    "global_lr_too_large": "steps are so long that the loss rises along them",
    "stale_gradients": "gradients are used in a second step",
    "one_direction": "steps of ordinary size that all point one way",
    "rates_too_small": "the whole network hardly moves",
    "momentum": "momentum so close to 1 that steps add up to too large ones",
    "decay_too_large": "weight decay takes weights away faster than gradients build them up",
    "warmup_too_long": "the learning rate still warms up when training ends",
    "schedule_too_short": "the learning rate is next to 0 for most of training",
    "eval_mode": "dropouts or batch norms are in evaluation mode",
    "dropout": "a dropout drops more than three quarters",
    "loss_input": "the loss takes probabilities for logits, or raw outputs for log-probabilities",
    "width": "the learning rate of a narrower network, where it should be divided by the width",
    "sgd_rule_under_adam": "learning rates follow fan_out/fan_in, which is for SGD, under an optimizer like Adam",
    "ntk_scaling": "learning rates, or factors in the forward pass, let hidden updates vanish with width",
    "eps": "Adam's eps is larger than the gradients",
    "input_scale": "the inputs are far too large",
    "target_scale": "the loss asks for outputs that are far larger than those a network begins with",
    "symmetric": "weights are constants, so that all units of a layer stay alike",
    "readout_init": "the readout's weights are too large for its width",
    "weights_too_large": "its weights are far larger than those of the others",
    "weights_too_small": "its weights are far smaller than those of the others",
    "weights_grown": "updates have made its weights far larger than healthy ones",
    "embedding_scale": "an embedding's rows are far too large or too small",
    "exploding": "steps as large as the weights, or weights that grow without end",
    "rounding": "updates are lost to the precision of the weights",
    "dead": "no gradient arrives: it is dead, or cut off from the loss",
    "dead_input": "its inputs are all zero",
    "dead_above": "no gradient arrives, for a later layer is dead",
    "left_out": "it is not trained, though most layers in equal places are",
    "unmoved": "it has a learning rate but does not move",
    "vanishing": "hardly any gradient arrives",
    "readout_width": "the readout's update grows with its number of inputs",
    "frobenius_rule": "updates in proportion to the Frobenius norm of weights, as LARS and LAMB make them",
    "readout_takes_all": "the readout takes nearly all of the loss's decrease, so hidden layers hardly learn",
    "diverged": "weights or outputs are not finite, or on their way there",
    "nothing_trains": "no parameter moves",
    "logits_exploding": "attention logits have grown beyond 50",
    "features_collapsed": "inputs of layers hardly differ between samples",
    "attention_collapsed": "a head of attention has looked at a single key for long",
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
