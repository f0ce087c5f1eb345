"""Causes of layers that receive no gradient, or that no optimizer trains."""

from __future__ import annotations

import math
import statistics
from itertools import takewhile

from spectral_monitor.condition.causes.explanation import Explanation, at_peak, number
from spectral_monitor.condition.findings import Finding
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.optimizers.left_out import OTHERS
from spectral_monitor.condition.row import Row
from spectral_monitor.condition.verdict import Remedy, short
from spectral_monitor.messages import joined

NAMES = 3
"""Parameters that a sentence names."""


def lr_zero(finding: Finding, row: Row, network: Network) -> Explanation | None:
    """Explain by a learning rate of 0 where others learn."""
    if row.lr != 0:
        return None
    others = [at_peak(other, other.lr) for other in network.peers_of(row) or network.peers if other.lr > 0]
    if not others:
        return None
    usual = statistics.median_high(others)
    return Explanation(
        "lr_zero",
        f"its learning rate is 0 while others learn at {number(usual)}: use that, or freeze it with "
        "requires_grad_(False)",
        Remedy("set_lr", (row.name,), usual),
    )


def dead(finding: Finding, row: Row, network: Network) -> Explanation | None:
    """Explain an update of 0; in a chain of dead layers, blame the last one whose bias is dead too."""
    look = Remedy("check", (row.name,))
    if row.get("lost") > 0 and row.settings.resolution < 1e-4:  # in float32
        return Explanation(
            "rounding",
            "gradients arrive, but its updates are lost even in float32: the loss hardly depends on it any more, as "
            "where a softmax behind it is saturated, or its learning rate is next to 0",
            look,
        )
    if row.get("lost") > 0:
        return Explanation(
            "rounding",
            "gradients arrive, but its updates are lost, most likely as too small for the precision of its weights: "
            "keep them in float32",
            look,
        )
    still = [other for other in network.rows if not other.has_gradient and other.lr != 0]
    if row not in still:
        return Explanation("unmoved", "a learning rate but no update: no gradient arrives, or one of exactly nothing")
    zeros = [other.name for other in still if other.get("weight_natural") == 0]
    if row.name in zeros and len(zeros) > 1:
        others = " and ".join(name for name in zeros if name != row.name) if len(zeros) < 4 else "others"
        return Explanation(
            "dead",
            f"its weights are all 0, and so are those of {others}: neither of two factors that are 0 gets a gradient; "
            "draw one of them",
            look,
        )
    if len(still) == len(network.rows):
        return Explanation(
            "dead", "no layer gets a gradient: the loss does not depend on them, is exactly 0, or one is dead"
        )
    if _gives_zeros(row):
        return Explanation("dead_input", "its inputs are all zero: the layer before it is dead, or it is given zeros")
    chain = takewhile(lambda other: other in still, network.rows[network.rows.index(row) :])
    blamed = [other for other in chain if not _bias_has_gradient(other, network) and not _gives_zeros(other)]
    if row not in blamed:
        return Explanation(
            "dead_input", "a gradient reaches its bias but its inputs are all zero: the layer before it is dead"
        )
    if blamed[-1] is not row:
        return Explanation("dead_above", f"a later layer ({blamed[-1].name}) is dead and lets no gradient through")
    size = network.vectors.get(f"{row.name}.bias", row).get("weight_natural")
    never = f" (biases of size {short(size)})" if size > 10 else ""
    return Explanation(
        "dead",
        f"no gradient reaches its weights: its outputs are cut off, as by a ReLU that never opens{never}, or detached; "
        "initialise it again",
        look,
    )


def cut_off(finding: Finding, row: Row, network: Network) -> Explanation | None:
    """Explain by outputs that are computed but detached."""
    return Explanation(
        "dead",
        "its optimizer holds it and its outputs are computed, but no gradient has ever reached it: they are detached, "
        "or computed under no_grad; if that is meant, freeze it with requires_grad_(False)",
        Remedy("check", (row.name,)),
    )


def left_out(finding: Finding, row: Row, network: Network) -> Explanation | None:
    """Explain why a layer is not trained although others in equal places are."""
    seen, how = "no optimizer holds it", "pass it to the optimizer"
    if row.settings.forgotten:
        seen = f"gradients arrive, but {seen}"
    if row.settings.frozen:
        seen, how = "it is frozen", f"set requires_grad_(True), and {how}"
    trained = "others are" if finding.against == OTHERS else f"most of {finding.against} are"
    return Explanation(
        "left_out",
        f"{seen} and it has never moved, though {trained} trained: {how}",
        Remedy("check", (row.name,)),
    )


def forgotten(network: Network) -> Explanation:
    """Explain by parameters other than matrices that no optimizer holds."""
    names = network.forgotten
    they, have = ("it", "it has") if len(names) == 1 else ("them", "they have")
    return Explanation(
        "left_out",
        f"gradients arrive at {joined(names, NAMES)}, but no optimizer holds {they} and {have} never moved, though "
        f"others are trained: pass {they} to the optimizer, or freeze {they} with requires_grad_(False)",
        Remedy("check"),
    )


def _gives_zeros(row: Row) -> bool:
    """Return whether outputs are all zero although weights are not, so that inputs must be zero."""
    return row.get("feature_rms") == 0 and row.get("weight_natural") > 0


def _bias_has_gradient(row: Row, network: Network) -> bool:
    """Return whether a layer's bias is known to receive a gradient."""
    bias = network.vectors.get(f"{row.name}.bias")
    return bias is not None and not math.isnan(bias.get("contribution")) and bias.has_gradient
