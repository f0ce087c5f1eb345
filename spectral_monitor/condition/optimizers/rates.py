"""Learning rates that differ from the others of their optimizer, on purpose or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from spectral_monitor.fitting.medians import geometric_median
from spectral_monitor.measurement import LayerInfo

SAME = 1.05
"""Learning rates that differ by less follow one rule."""
LEVEL = 2.0
"""A rule can only be recognized if its rates differ by more than this."""
ON_PURPOSE = 10.5
"""The largest factor that published recipes give a head, new layers or embeddings."""
NEW = 1000.0
"""The largest factor for layers that were just drawn if others were trained before."""
ONE_KIND = 32.0
"""The largest factor for all matrices of one kind in several modules: LoRA+ gives its B matrices 16 times the rate of
the A matrices.
"""
THAWED = 100.0
"""The largest factor by which rates of thawed layers may be below the others': 10 is usual, more for the deepest."""
HEALTHY_STEP = 0.06
"""Relative update of the median layer of a healthy network at the peak of its learning rate: 0.02 to 0.25."""
RIVAL = 1 / 4
"""A rate may be the usual one instead of the most frequent rate if it has at least this part of the layers, and the
most frequent one fewer than all others.
"""
FEW = 3
"""With fewer operators and readouts than this, embeddings are judged with them."""

RULES: dict[str, Callable[[LayerInfo], float]] = {
    "one rate": lambda info: 1.0,
    "1/fan_in": lambda info: 1.0 / info.fan_in,
    "fan_out/fan_in": lambda info: info.fan_out / info.fan_in,
}
"""Common rules for the learning rates of matrices, the plainest first."""


@dataclass(frozen=True)
class Rate:
    """The learning rate of a layer, compared with those of the others."""

    lr: float  # learning rate of the layer
    usual_lr: float  # learning rate by the rule that the others follow
    purpose: str = ""  # why it differs on purpose; empty if it does not differ, or for no known purpose
    rule: str = "one rate"  # which of :data:`RULES` most layers follow

    @property
    def factor(self) -> float:
        """Learning rate over the usual one; 1 if the difference is on purpose."""
        return 1.0 if self.purpose else self.lr / self.usual_lr


Rated = tuple[LayerInfo, float]
"""A matrix and its learning rate."""


def rule_of(rated: Sequence[Rated]) -> str:
    """Return which of :data:`RULES` all learning rates follow, the plainest that fits; empty if none.

    Example:
        >>> wide, narrow = LayerInfo("a", "operator", 8, 512, (8, 512)), LayerInfo("b", "operator", 8, 64, (8, 64))
        >>> rule_of([(wide, 0.001), (narrow, 0.008)])
        '1/fan_in'
    """
    return next((name for name in RULES if follows(name, rated)), "")


def follows(name: str, rated: Sequence[Rated]) -> bool:
    """Return whether all learning rates follow a rule that tells the layers apart."""
    sizes = [RULES[name](info) for info, lr in rated if lr > 0]
    units = [lr / RULES[name](info) for info, lr in rated if lr > 0]
    if not units or max(units) > SAME * min(units):
        return False
    return name == "one rate" or max(sizes) > LEVEL * min(sizes)


def rates(
    rated: Sequence[Rated],
    expected: Mapping[str, float] | None = None,
    steps: Mapping[str, float] | None = None,
    vectors: float = math.nan,
    new: Collection[str] = (),
    thawed: Collection[str] = (),
) -> dict[str, Rate]:
    """Return the learning rate of each layer with the usual one.

    The usual rate is that of most layers. If two rates have about as many layers each, it is the one whose updates are
    nearer to a healthy size.

    Args:
        rated: matrices of one optimizer, in the order of the model.
        expected: layer -> factor on its learning rate that the user has declared.
        steps: layer -> largest relative update so far, at the peak of its learning rate.
        vectors: median learning rate of biases and gains; NaN if there are none.
        new: layers that were just drawn, if others were trained before.
        thawed: layers that were frozen before.

    Example:
        >>> infos = [LayerInfo(name, "operator", 8, 8, (8, 8)) for name in "abcd"]
        >>> compared = rates([(info, 0.1 if info.name == "b" else 0.001) for info in infos])
        >>> round(compared["b"].factor), compared["a"].factor
        (100, 1.0)
    """
    declared = expected or {}
    undeclared = [(info, lr / declared.get(info.name, 1.0)) for info, lr in rated if lr > 0]
    dense = [item for item in undeclared if item[0].role != "embedding"]
    embeddings = [item for item in undeclared if item[0].role == "embedding"]
    if len(dense) < FEW:  # as under Muon, which leaves embeddings and the readout to another optimizer
        dense, embeddings = undeclared, []
    ends = _ends(dense, vectors)
    rule, usual_lrs, purposes = _of_matrices(dense, steps or {}, ends, new, thawed)
    for info, lr in dense:
        if info.name in ends and not _same(lr, usual_lrs[info.name]):
            purposes.setdefault(info.name, "an input or output layer with the rate of biases, as in muP")
    embedding_lrs, embedding_purposes = _of_embeddings(embeddings, dense)
    usual_lrs, purposes = usual_lrs | embedding_lrs, purposes | embedding_purposes
    return {
        info.name: Rate(lr, usual_lrs[info.name] * declared.get(info.name, 1.0), purposes.get(info.name, ""), rule)
        for info, lr in rated
        if lr > 0
    }


def _ends(rated: Sequence[Rated], vectors: float) -> frozenset[str]:
    """Return the input layer and the readout if only they have the rate of biases, and a larger one than the others.

    That is muP with one width for all layers: the rates of hidden matrices shrink with the width, or the others grow.
    Without biases both ends must share that rate.
    """
    outer = {info.name: lr for k, (info, lr) in enumerate(rated) if k == 0 or info.role == "readout"}
    no_vectors = math.isnan(vectors)
    large = max(outer.values(), default=math.nan) if no_vectors else vectors
    ends = {info.name for info, lr in rated if _same(lr, large)}
    hidden = [lr for info, lr in rated if info.name not in ends]
    if no_vectors:
        is_mup = len(outer) > 1 and ends == outer.keys() and len(hidden) > 0
    else:
        is_mup = ends <= outer.keys() and len(hidden) > 1
    return frozenset(ends) if is_mup and geometric_median(hidden) < large else frozenset()


def _of_matrices(
    rated: Sequence[Rated],
    steps: Mapping[str, float],
    ends: frozenset[str],
    new: Collection[str],
    thawed: Collection[str],
) -> tuple[str, dict[str, float], dict[str, str]]:
    """Return the rule of operators and readouts, their usual learning rates, and the purposes of others."""
    if not rated:
        return "one rate", {}, {}
    rule, unit = _majority([item for item in rated if item[0].name not in ends], steps)
    usual_lrs = {info.name: unit * RULES[rule](info) for info, _ in rated}
    odd = any(not _same(lr, usual_lrs[info.name]) for info, lr in rated if info.name not in ends)
    if odd and (ladder := _layerwise(rated)):
        rule, usual_lrs = "one rate", ladder
    factors = {info.name: lr / usual_lrs[info.name] for info, lr in rated if not _same(lr, usual_lrs[info.name])}
    purposes: dict[str, str] = {}
    for purpose, names in _purposes(rated, factors, new, thawed):
        purposes |= {name: purpose for name in names if name not in purposes}
    return rule, usual_lrs, purposes


def _of_embeddings(embeddings: Sequence[Rated], dense: Sequence[Rated]) -> tuple[dict[str, float], dict[str, str]]:
    """Return usual learning rates and purposes of embeddings, whose rates often differ from those of matrices."""
    if not embeddings:
        return {}, {}
    median = geometric_median(lr for _, lr in dense or embeddings)
    by_width = rule_of(dense) not in ("", "one rate")
    on_purpose = [
        info.name
        for info, lr in embeddings
        if not _same(lr, median) and (by_width or 1 / ONE_KIND <= lr / median <= ONE_KIND)
    ]
    usual_lrs = {info.name: median for info, _ in embeddings}
    return usual_lrs, dict.fromkeys(on_purpose, "embeddings with a rate of their own")


def _same(lr: float, other: float) -> bool:
    return 1 / SAME <= lr / other <= SAME


def _majority(rated: Sequence[Rated], steps: Mapping[str, float]) -> tuple[str, float]:
    """Return the rule that most layers follow, and its unit: the learning rate of a layer of size 1."""
    candidates: list[tuple[str, float, list[str]]] = []
    for rule, size in RULES.items():
        sizes = [size(info) for info, _ in rated]
        if rule == "one rate" or max(sizes) > LEVEL * min(sizes):
            units = {info.name: lr / size(info) for info, lr in rated}
            candidates += [(rule, unit, names) for unit, names in _equal_factors(units)]
    rule, unit, names = max(candidates, key=lambda candidate: len(candidate[2]))
    if 2 * len(names) < len(rated):
        return "one rate", geometric_median(lr for _, lr in rated)
    least = max(min(2, len(names)), RIVAL * len(rated))  # a single layer is no rule if others share one
    rivals = [candidate for candidate in candidates if candidate[0] == rule and least <= len(candidate[2])]
    if len(rivals) > 1 and len(names) < (1 - RIVAL) * len(rated):
        _, unit, _ = min(rivals, key=lambda rival: (distance(rival[2], steps), -len(rival[2])))
    return rule, unit


def distance(names: Sequence[str], steps: Mapping[str, float]) -> float:
    """Return how far the typical relative update of some layers is from a healthy one, on a log scale."""
    median = geometric_median(steps.get(name, math.nan) for name in names)
    return abs(math.log(median / HEALTHY_STEP)) if median > 0 else math.inf


def _layerwise(rated: Sequence[Rated]) -> dict[str, float]:
    """Return the learning rates of a geometric decay over depth, smallest at the input; empty if rates have none.

    The layers of one level follow each other. A single layer that does not fit may stand in between.
    """
    levels = [(lr, [info.name for info, _ in layers]) for lr, layers in groupby(rated, key=lambda item: item[1])]
    single = [k for k in range(1, len(levels) - 1) if len(levels[k][1]) == 1]
    for odd in [None, *single]:
        ladder = list(levels)
        if odd is not None:  # give it the rate that lies between its neighbours
            ladder[odd] = (math.sqrt(levels[odd - 1][0] * levels[odd + 1][0]), levels[odd][1])
        ratios = [after[0] / before[0] for before, after in pairwise(ladder)]
        # The two ratios beside a corrected level are equal by construction, so they are no evidence.
        has_evidence = any(odd is None or k not in (odd - 1, odd) for k in range(len(ratios) - 1))
        # The last ratio, to the head, may be larger.
        if has_evidence and min(ratios) > SAME and max(ratios[:-1]) <= SAME * min(ratios[:-1]):
            return {name: lr for lr, names in ladder for name in names}
    return {}


def _purposes(
    rated: Sequence[Rated], factors: Mapping[str, float], new: Collection[str], thawed: Collection[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield purposes for which layers may differ from the usual rate by one factor, with these layers."""
    order = [info.name for info, _ in rated]
    readouts = {info.name for info, _ in rated if info.role == "readout"}
    for factor, names in _equal_factors(factors):
        chosen = set(names)
        if chosen <= set(new) and 1 < factor <= NEW:
            yield "new layers with a rate of their own", names
        elif chosen <= set(thawed) and 1 / (SAME * THAWED) <= factor < 1:
            yield "thawed layers with a rate of their own", names
        elif readouts and chosen == readouts and 1 < factor <= ON_PURPOSE:
            yield "a head with a rate of its own", names
        elif len(chosen) > 1 and chosen == set(order[-len(chosen) :]) and 1 < factor <= ON_PURPOSE:
            yield "new layers with a rate of their own", names
        elif len(chosen) > 1 and chosen == set(order[: len(chosen)]) and 1 / ON_PURPOSE <= factor < 1:
            yield "a backbone with a rate of its own", names
        else:
            kind, one_module = _one_kind(chosen, order)
            limit = min(ONE_KIND, ON_PURPOSE) if one_module else ONE_KIND
            if kind and 1 / limit <= factor <= limit:
                yield f"all of {kind!r} have a rate of their own", names


def _equal_factors(factors: Mapping[str, float]) -> Iterator[tuple[float, list[str]]]:
    """Yield each distinct factor with the layers that have it."""
    names = sorted(factors, key=lambda name: factors[name])
    while names:
        factor = factors[names[0]]
        equal_layers = [name for name in names if factors[name] <= SAME * factor]
        yield factor, equal_layers
        names = names[len(equal_layers) :]


def _one_kind(chosen: set[str], order: Sequence[str]) -> tuple[str, bool]:
    """Return the part of their names that only these layers share, and whether it names a single module.

    The part is empty if there is none. A single module holds all of the layers, as a decoder does; layers of a kind are
    in several modules, or alternate with others.
    """
    paths = [name.split(".") for name in chosen]
    others = {part for name in order if name not in chosen for part in name.split(".")}
    shared = sorted(part for part in set.intersection(*map(set, paths)) - others if not part.isdigit())
    if len(chosen) < 2 or not shared:
        return "", False
    kinds = [part for part in shared if len({tuple(path[: path.index(part)]) for path in paths}) > 1]
    indices = [k for k, name in enumerate(order) if name in chosen]
    contiguous = indices[-1] - indices[0] == len(indices) - 1
    return (kinds or shared)[0], not kinds and contiguous
