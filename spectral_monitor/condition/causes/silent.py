"""Causes of layers that receive no gradient, or that no optimizer trains."""

from __future__ import annotations

import math
import statistics
from itertools import takewhile

from spectral_monitor.condition.causes.explanation import Explanation, at_peak
from spectral_monitor.condition.findings import Finding
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.optimizers.forgotten import UNREGISTERED
from spectral_monitor.condition.optimizers.left_out import OTHERS
from spectral_monitor.condition.row import Row
from spectral_monitor.condition.verdict import Remedy, short
from spectral_monitor.messages import joined

MAX_NAMES = 3
"""Largest number of parameters that a sentence names."""
LARGE_BIAS = 5.0
"""From this size on, the biases of a dead layer are named: they may keep a ReLU shut."""
GAINS = ("weight", "gamma", "gain", "scale")
"""Last parts of the names of factors; shifts begin at 0 in healthy norms."""
CLOSED = (
    "a ReLU no longer opens, probably because steps were too large for its inputs: divide learning rates by 3 or more, "
    "normalize inputs, and begin again"
)
"""Why layers that had gradients before get none, and what to do."""
DRAW = "begin with random weights, and with gains of 1"


def lr_zero(finding: Finding, row: Row, network: Network) -> Explanation | None:
    """Explain by a learning rate of 0 while others learn."""
    if row.lr != 0:
        return None
    others = [at_peak(other, other.lr) for other in network.peers_of(row) or network.peers if other.lr > 0]
    if not others:
        return None
    median = statistics.median_high(others)
    return Explanation(
        "lr_zero",
        f"its learning rate is 0 while others learn at {median:.3g}: use that, or freeze it with requires_grad_(False)",
        Remedy("set_lr", (row.name,), median),
    )


def dead(finding: Finding, row: Row, network: Network) -> Explanation | None:
    """Explain an update of 0; in a chain of dead layers, blame the last one whose bias is dead too."""
    check = Remedy("check", (row.name,))
    if row.get("lost") > 0 == row.get("weight_natural"):
        return Explanation("dead", f"its weights are all 0 and hardly any gradient reaches them: {DRAW}", check)
    if row.get("lost") > 0:
        sentence = (
            "gradients arrive, but its updates are lost, most likely because they are too small for the precision of "
            "its weights: keep weights in float32"
        )
        if row.settings.resolution < 1e-4:  # in float32
            sentence = (
                "gradients arrive, but its updates are lost even in float32: its learning rate is close to 0, or the "
                "loss hardly depends on it any more, as when a softmax after it is saturated"
            )
        return Explanation("rounding", sentence, check)
    without_gradient = [other for other in network.rows if not other.has_gradient and other.lr != 0]
    if row not in without_gradient:
        sentence = "it has a learning rate but no update: no gradient arrives, or the gradient is exactly 0"
        return Explanation("unmoved", sentence)
    still = [other for other in network.rows if other.get("contribution") == 0 and other.lr != 0]
    zeros = [other.name for other in still if other.get("weight_natural") == 0]
    if row.name in zeros and len(zeros) > 1:
        others = " and ".join(name for name in zeros if name != row.name) if len(zeros) < 4 else "others"
        return Explanation(
            "dead",
            f"its weights are all 0, and so are those of {others}: if both factors of a product are 0, neither gets a "
            "gradient; initialize one of them at random",
            check,
        )
    zeros += _zero_gains(network)
    all_zeros = f"{joined(zeros, MAX_NAMES)} {'is' if len(zeros) == 1 else 'are'} all 0"
    lived = any(network.largest_steps.get(other.name, 0.0) > 0 for other in without_gradient)
    if len(without_gradient) == len(network.rows):
        cause = "the loss does not depend on them or is exactly 0, or a dead layer blocks all gradients"
        if lived:
            cause = f"unless the loss is exactly 0, {CLOSED}"
        elif zeros:
            cause = f"{all_zeros}, so nothing gets through: {DRAW}"
        elif biases := [text for other in network.rows if (text := _large_bias(other, network))]:
            cause += f", as by a ReLU that never opens behind {joined(biases, MAX_NAMES)}"
        return Explanation("dead", f"no layer gets a gradient{' any more' * lived}: {cause}")
    if _gives_zeros(row):
        return Explanation(
            "dead_input", ("its inputs are all zero: the layer before it is dead, or the data is all zero")
        )
    chain = takewhile(lambda other: other in without_gradient, network.rows[network.rows.index(row) :])
    blamed = [other for other in chain if not _bias_has_gradient(other, network) and not _gives_zeros(other)]
    if row not in blamed:
        return Explanation(
            "dead_input", "a gradient reaches its bias, but its inputs are all zero: the layer before it is dead"
        )
    if blamed[-1] is not row:
        return Explanation("dead_above", f"a later layer ({blamed[-1].name}) is dead and lets no gradient through")
    bias = _large_bias(row, network)
    bias_size = bias.removeprefix(row.name)
    if network.largest_steps.get(row.name, 0.0) > 0:
        hint = "; an output layer needs no ReLU after it" * (row.info.role == "readout")
        sentence = f"no gradient reaches its weights any more: {CLOSED}{bias_size}{hint}"
        return Explanation("dead", sentence, check)
    if zeros:
        return Explanation("dead", f"no gradient reaches its weights, because {all_zeros}: {DRAW}", check)
    return Explanation(
        "dead",
        "no gradient reaches its weights: its outputs are detached, or cut off, as by a ReLU that never "
        f"opens{bias_size}; initialize it again",
        check,
    )


def cut_off(finding: Finding, row: Row, network: Network) -> Explanation | None:
    """Explain by outputs that are computed but detached."""
    return Explanation(
        "dead",
        "an optimizer holds it and it computes outputs, but no gradient has ever reached it: its outputs are detached, "
        "or computed under no_grad; if that is intended, freeze it with requires_grad_(False)",
        Remedy("check", (row.name,)),
    )


def left_out(finding: Finding, row: Row, network: Network) -> Explanation | None:
    """Explain why a layer is not trained although others in equal places are."""
    reason, advice = "no optimizer holds it", "pass it to the optimizer"
    if row.settings.forgotten:
        reason = f"gradients arrive, but {reason}"
    if row.settings.frozen:
        reason, advice = "it is frozen", f"set requires_grad_(True), and {advice}"
    trained = "others are" if finding.against == OTHERS else f"most of {finding.against} are"
    return Explanation(
        "left_out",
        f"{reason} and it has never moved, although {trained} trained: {advice}",
        Remedy("check", (row.name,)),
    )


def frozen(finding: Finding, network: Network) -> Explanation:
    """Explain by most of the network being frozen at random values; the finding has these layers."""
    settings = [row.settings for row in network.rows if row.name in finding.layers]
    is_frozen, is_held = any(one.frozen for one in settings), any(one.owner >= 0 for one in settings)
    state = "are frozen at random values" if is_frozen else "are in no optimizer and keep random values"
    steps = ["set requires_grad_(True)"] * is_frozen + ["pass them to the optimizer"] * (not is_held)
    return Explanation(
        "left_out",
        f"{len(settings)} of {sum(row.dense for row in network.rows)} matrices {state}: load trained weights, or "
        f"{' and '.join(steps)}; if this is meant, as where they are trained later, ignore the check left_out",
        Remedy("check"),
    )


def forgotten(network: Network) -> Explanation:
    """Explain by parameters other than matrices that no optimizer holds."""
    names = network.forgotten
    them, they_have = ("it", "it has") if len(names) == 1 else ("them", "they have")
    hint = "; PyTorch does not find modules in a Python list: use torch.nn.ModuleList"
    return Explanation(
        "left_out",
        f"gradients arrive at {joined(names, MAX_NAMES)}, but no optimizer holds {them} and {they_have} never moved, "
        f"although others are trained: pass {them} to the optimizer, or freeze {them} with requires_grad_(False)"
        + (hint if any(name.startswith(UNREGISTERED) for name in names) else ""),
        Remedy("check"),
    )


def _zero_gains(network: Network) -> list[str]:
    """Return the gains that are 0 and stay so, because no gradient reaches them."""
    return [
        name
        for name, row in network.vectors.items()
        if name.endswith(GAINS) and row.get("weight_natural") == 0 == row.get("contribution") and row.lr != 0
    ]


def _large_bias(row: Row, network: Network) -> str:
    """Return a layer's name with the size of its biases if these are large; else an empty string."""
    modules = (row.name, row.name.rpartition(".")[0])  # the bias of a graph convolution is in the module around it
    bias = next((bias for module in modules if (bias := network.vectors.get(f"{module}.bias"))), None)
    size = math.nan if bias is None else bias.get("weight_natural")
    return f"{row.name} (biases of size {short(size)})" if row.dense and size >= LARGE_BIAS else ""


def _gives_zeros(row: Row) -> bool:
    """Return whether outputs are all zero although weights are not, because inputs are zero."""
    return row.get("feature_rms") == 0 and row.get("weight_natural") > 0


def _bias_has_gradient(row: Row, network: Network) -> bool:
    """Return whether a layer's bias is known to receive a gradient."""
    bias = network.vectors.get(f"{row.name}.bias")
    return bias is not None and not math.isnan(bias.get("contribution")) and bias.has_gradient
