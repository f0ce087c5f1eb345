"""Causes in what a loss gets, or in the loss itself."""

from __future__ import annotations

from spectral_monitor.condition.causes.explanation import Explanation
from spectral_monitor.condition.findings import Finding
from spectral_monitor.condition.verdict import Remedy
from spectral_monitor.measurement import LossFault

_LOSS_FAULTS = {
    LossFault.KIND: "the loss gets an input of the wrong kind, such as the output of a softmax or a ReLU: pass logits "
    "to cross_entropy and binary_cross_entropy_with_logits, the output of log_softmax to nll_loss and ctc_loss, and "
    "use no sigmoid or softmax behind another",
    LossFault.ALL_PAIRS: "the loss compares each output with the targets of all samples, because their shapes differ, "
    "such as (N, 1) and (N,), and broadcasting makes N x N differences: give both the same shape",
    LossFault.OVER_SAMPLES: "log_softmax runs over the samples of the batch, not over the classes: pass dim=1 or, if "
    "classes come last, dim=-1",
    LossFault.SEQUENCE: "recurrent or attention modules take the samples of the batch for the steps of a sequence: set "
    "batch_first=True where the samples come first, or swap the first two dimensions",
    LossFault.TARGETS: "a binary cross entropy gets targets far from 0 to 1, such as classes 1 and 2, labels -1 and 1 "
    "or masks up to 255, so its loss falls without end: give it targets between 0 and 1",
    LossFault.REACH: "outputs of a ReLU, sigmoid, softmax or tanh are compared with targets far outside its range, "
    "such as negative ones behind a ReLU: leave out the activation, or scale the targets to its range",
    LossFault.PAIRS: "batch norms see only two values of each channel, so they give 1 and -1 whatever these are: use "
    "larger batches, or a GroupNorm or LayerNorm",
}
"""Fault of a loss's input -> a sentence on it."""


def unfit_input(finding: Finding) -> Explanation:
    """Explain by an input or targets that do not suit the loss."""
    return Explanation("loss_input", _LOSS_FAULTS[LossFault(int(finding.value))], Remedy("check"))


def without_bound(finding: Finding) -> Explanation:
    """Explain by a loss that training can lower without end."""
    return Explanation(
        "loss_input",
        f"the loss has fallen to {finding.against}, and nothing seems to bound it: check its sign, because likelihoods "
        "and rewards need a minus, and terms without a lower bound, such as a log-variance or a distance that is to be "
        "large",
        Remedy("check"),
    )
