"""From causes to verdicts: roots, what follows from them, and several layers that share one cause."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spectral_monitor.condition.causes import Explanation
from spectral_monitor.condition.findings import Finding
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.verdict import NETWORK, Remedy, Verdict

SETTINGS = frozenset(
    {
        *("lr_zero", "lr_too_large", "lr_too_small", "momentum", "width", "sgd_rule_under_adam", "ntk_scaling", "eps"),
        *("stale_gradients", "decay_too_large", "warmup_too_long", "schedule_too_short"),
        *("eval_mode", "dropout", "loss_input"),
    }
)
"""Causes in the optimizer's settings, in the training loop, or in the code of the model."""
OF_A_GROUP = frozenset({"lr_too_large", "lr_too_small", "lr_zero", "decay_too_large"})
"""Causes that the layers of a parameter group share."""
BEGINNING = frozenset(
    {
        *("readout_init", "weights_too_large", "weights_too_small", "embedding_scale"),
        *("input_scale", "target_scale", "rounding", "left_out", "symmetric"),
    }
)
"""Causes that are present before the first step."""
DYNAMIC = frozenset({"rates_too_large", "one_direction", "global_lr_too_large", "nothing_trains", "logits_exploding"})
"""Causes that the whole network, or its attention, develops while it trains."""
DEAD = frozenset({"dead", "unmoved"})
"""Causes of layers without a gradient."""
CUT_OFF = frozenset({"dead_input", "dead_above"})
"""Causes of layers that get no gradient because another layer blocks it."""
AS_ONE = BEGINNING | {"vanishing", "exploding"}
"""Causes that many layers share if one thing is wrong with the network."""
MAX_DEAD_SHARE = 0.25
"""If at most this part of the layers gets no gradient, that does not explain why steps of the others are small."""
MIN_LAYERS_AS_ONE = 3
"""From this number of layers on, one cause of :data:`AS_ONE` makes a single root."""


@dataclass(frozen=True)
class Case:
    """The facts about one flagged check."""

    finding: Finding  # the latest finding
    explanation: Explanation
    since: int  # step at which it was first outside its band
    outside: int  # number of measurements outside the band since then


def rank(code: str) -> int:
    """Return the position of a code in the chain of causes, 0 for the first.

    Example:
        >>> rank("lr_too_large") < rank("weights_too_large") < rank("rates_too_large") < rank("unknown")
        True
    """
    order = (SETTINGS, BEGINNING, DYNAMIC, frozenset({"diverged"}), DEAD, CUT_OFF, frozenset({"rates_too_small"}))
    return next((k for k, codes in enumerate(order) if code in codes), len(order))


def verdicts(cases: Sequence[Case], network: Network) -> tuple[Verdict, ...]:
    """Return roots first, the worst first, then verdicts that follow from them.

    A layer has one verdict. Cases of the lowest :func:`rank` are roots; others follow from the worst root. Divergence
    stays a root beside causes of the beginning, so that alerts and ``stop_on`` see it.
    """
    best: dict[str, Case] = {}
    for case in sorted(cases, key=_order):
        key = case.explanation.code if case.finding.layer == NETWORK else case.finding.layer
        best.setdefault(key, case)
    if not best:
        return ()
    counts = Counter(case.explanation.code for case in best.values())
    # Cases of the network have their cause as key; parameters may be left out for several reasons.
    of_network = best.keys() - {"left_out"}
    shared = {code for code in AS_ONE if counts[code] >= MIN_LAYERS_AS_ONE or code in of_network}
    # Updates too small for the precision of weights make nothing diverge.
    first = min(rank(code) for code in counts if not (code == "rounding" and "diverged" in counts))
    groups: dict[object, list[Case]] = defaultdict(list)
    followers: list[Case] = []
    few_dead = sum(counts[code] for code in DEAD | CUT_OFF) <= MAX_DEAD_SHARE * len(network.rows)
    is_of_dead = first in (rank("dead"), rank("dead_input"))
    for case in best.values():
        code = case.explanation.code
        is_beside_dead = code == "rates_too_small" and is_of_dead and few_dead
        after_cause = first == 1 and code == "diverged"  # the cause must be corrected first
        if after_cause:
            case = replace(case, explanation=_after_the_cause(case.explanation))
        is_beside_setting = first == 0 and code in BEGINNING - {"rounding"}
        if after_cause or rank(code) == first or is_beside_setting or is_beside_dead:
            groups[_group(case, network, shared)].append(case)
        else:
            followers.append(case)
    roots = [_root(group, network) for group in groups.values()]
    of_roots = {NETWORK, *(name for root in roots for name in root.layers)}
    disturbed = tuple(case.finding.layer for case in followers if case.finding.layer not in of_roots)
    roots[0] = replace(roots[0], consequences=disturbed)
    return (*roots, *(replace(_verdict(case, network), root=roots[0].layer) for case in followers))


def _after_the_cause(diverged: Explanation) -> Explanation:
    """Return the explanation of a divergence whose cause is known."""
    symptom = diverged.sentence.partition(":")[0]
    return Explanation("diverged", f"{symptom}: fix its cause, then go back to a checkpoint", Remedy("check"))


def _order(case: Case) -> tuple[int, float, str]:
    """Return the sort key of a case: its rank, its excess in three digits and its name.

    With an even number of layers the two in the middle are equally far from the median up to rounding, which differs
    between one process and several.
    """
    return rank(case.explanation.code), -float(f"{case.finding.excess:.3g}"), case.finding.layer


def _group(case: Case, network: Network, shared: set[str]) -> object:
    """Return the key of the root that a case belongs to: its cause, and the parameter group or layer.

    Causes in ``shared`` make a single root, and so do layers that are left out for the same reason.
    """
    code, name = case.explanation.code, case.finding.layer
    row = network.parameter(name)
    if code in OF_A_GROUP and row is not None and row.settings.group >= 0:
        return code, row.settings.group
    if code in shared or code in DEAD | CUT_OFF:
        return code
    return code, case.explanation.sentence if code == "left_out" else name


def _root(cases: Sequence[Case], network: Network) -> Verdict:
    """Return the verdict of cases that share one cause, the worst case first; one on the network stands for all."""
    cases = [case for case in cases if case.finding.layer == NETWORK] or cases
    names = tuple(case.finding.layer for case in cases if case.finding.layer != NETWORK)
    verdict = _verdict(cases[0], network)
    if not names:
        return verdict
    remedy = None if verdict.remedy is None else replace(verdict.remedy, layers=names)
    return replace(verdict, layers=names, remedy=remedy)


def _verdict(case: Case, network: Network) -> Verdict:
    finding = case.finding
    return Verdict(
        layer=finding.layer,
        quantity=finding.quantity if finding.measured else "",
        value=finding.value if finding.measured else math.nan,
        band=finding.limits if finding.measured else (0.0, math.inf),
        ratio=finding.ratio if finding.measured else math.nan,
        steps=network.step - case.since,
        measurements=case.outside,
        cause=case.explanation.code,
        sentence=case.explanation.sentence,
        layers=(finding.layer,) if finding.layer != NETWORK else (),
        remedy=case.explanation.remedy,
    )
