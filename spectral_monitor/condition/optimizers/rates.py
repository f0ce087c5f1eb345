"""Learning rates that stand out from the others of their optimizer, on purpose or not."""

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
"""The same for layers that were just drawn, beside others that were trained before."""
ONE_KIND = 32.0
"""The same for all matrices of one kind in several modules: LoRA+ gives its B matrices 16 times the rate of the A
matrices.
"""
THAWED = 100.0
"""The largest factor by which rates of thawed layers may be below the others': 10 is usual, more for the deepest."""
HEALTHY_STEP = 0.06
"""Relative update of the median layer of a healthy network at the peak of its learning rate: 0.02 to 0.25."""
RIVAL = 1 / 4
"""Of two rates, each may be the usual one if the rarer has at least this part of the layers, and the other fewer than
the rest.
"""
FEW = 3
"""With fewer operators and readouts than this, embeddings are judged together with them."""

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
    usual: float  # learning rate by the rule that the others follow
    purpose: str = ""  # why it differs on purpose; empty if it does not differ, or for no known purpose
    rule: str = "one rate"  # which of :data:`RULES` most layers follow

    @property
    def factor(self) -> float:
        """Learning rate over the usual one; 1 if the difference is on purpose."""
        return 1.0 if self.purpose else self.lr / self.usual


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
        new: layers that were just drawn, where others were trained before.
        thawed: layers that were frozen before.

    Example:
        >>> infos = [LayerInfo(name, "operator", 8, 8, (8, 8)) for name in "abcd"]
        >>> found = rates([(info, 0.1 if info.name == "b" else 0.001) for info in infos])
        >>> round(found["b"].factor), found["a"].factor
        (100, 1.0)
    """
    declared = expected or {}
    given = [(info, lr / declared.get(info.name, 1.0)) for info, lr in rated if lr > 0]
    dense = [item for item in given if item[0].role != "embedding"]
    tables = [item for item in given if item[0].role == "embedding"]
    if len(dense) < FEW:  # as under Muon, which leaves embeddings and the readout to another optimizer
        dense, tables = given, []
    ends = _ends(dense, vectors)
    rule, usual, purposes = _of_matrices(dense, steps or {}, ends, new, thawed)
    for info, lr in dense:
        if info.name in ends and not _same(lr, usual[info.name]):
            purposes.setdefault(info.name, "an input or output layer with the rate of biases, as in muP")
    found_usual, found_purposes = _of_embeddings(tables, dense)
    usual, purposes = usual | found_usual, purposes | found_purposes
    return {
        info.name: Rate(lr, usual[info.name] * declared.get(info.name, 1.0), purposes.get(info.name, ""), rule)
        for info, lr in rated
        if lr > 0
    }


def _ends(given: Sequence[Rated], vectors: float) -> frozenset[str]:
    """Return the input layer and the readout if only they have the rate of biases, and a larger one than the others.

    That is muP with one width for all layers: the rates of hidden matrices shrink with it, or the others grow. Without
    biases both must share that rate.
    """
    outer = {info.name: lr for place, (info, lr) in enumerate(given) if place == 0 or info.role == "readout"}
    alone = math.isnan(vectors)
    large = max(outer.values(), default=math.nan) if alone else vectors
    ends = {info.name for info, lr in given if _same(lr, large)}
    hidden = [lr for info, lr in given if info.name not in ends]
    if alone:
        told = len(outer) > 1 and ends == outer.keys() and len(hidden) > 0
    else:
        told = ends <= outer.keys() and len(hidden) > 1
    return frozenset(ends) if told and geometric_median(hidden) < large else frozenset()


def _of_matrices(
    given: Sequence[Rated],
    steps: Mapping[str, float],
    ends: frozenset[str],
    new: Collection[str],
    thawed: Collection[str],
) -> tuple[str, dict[str, float], dict[str, str]]:
    """Return the rule of operators and readouts, their usual learning rates, and the purposes of others."""
    if not given:
        return "one rate", {}, {}
    rule, base = _majority([item for item in given if item[0].name not in ends], steps)
    usual = {info.name: base * RULES[rule](info) for info, _ in given}
    odd = any(not _same(lr, usual[info.name]) for info, lr in given if info.name not in ends)
    if odd and (ladder := _layerwise(given)):
        rule, usual = "one rate", ladder
    factors = {info.name: lr / usual[info.name] for info, lr in given if not _same(lr, usual[info.name])}
    purposes: dict[str, str] = {}
    for purpose, names in _purposes(given, factors, new, thawed):
        purposes |= {name: purpose for name in names if name not in purposes}
    return rule, usual, purposes


def _of_embeddings(given: Sequence[Rated], dense: Sequence[Rated]) -> tuple[dict[str, float], dict[str, str]]:
    """Return usual learning rates and purposes of embeddings, whose rates often differ from those of matrices."""
    if not given:
        return {}, {}
    middle = geometric_median(lr for _, lr in dense or given)
    rule = rule_of(dense)
    purpose = "embeddings with a rate of their own"
    usual = {info.name: middle for info, _ in given}
    meant = [
        info.name
        for info, lr in given
        if not _same(lr, middle) and (rule not in ("", "one rate") or 1 / ONE_KIND <= lr / middle <= ONE_KIND)
    ]
    return usual, dict.fromkeys(meant, purpose)


def _same(lr: float, usual: float) -> bool:
    return 1 / SAME <= lr / usual <= SAME


def _majority(given: Sequence[Rated], steps: Mapping[str, float]) -> tuple[str, float]:
    """Return the rule that most layers follow, and its unit: the learning rate of a layer of size 1."""
    found: list[tuple[str, float, list[str]]] = []
    for name, rule in RULES.items():
        units = {info.name: lr / rule(info) for info, lr in given}
        sizes = [rule(info) for info, _ in given]
        if name == "one rate" or max(sizes) > LEVEL * min(sizes):
            found += [(name, unit, names) for unit, names in _alike(units)]
    rule_name, unit, names = max(found, key=lambda some: len(some[2]))
    if 2 * len(names) < len(given):
        return "one rate", geometric_median(lr for _, lr in given)
    least = max(min(2, len(names)), RIVAL * len(given))  # one layer is no rule where others share one
    rivals = [some for some in found if some[0] == rule_name and least <= len(some[2])]
    if len(rivals) > 1 and len(names) < (1 - RIVAL) * len(given):
        rule_name, unit, _ = min(rivals, key=lambda some: (distance(some[2], steps), -len(some[2])))
    return rule_name, unit


def distance(names: Sequence[str], steps: Mapping[str, float]) -> float:
    """Return how far the typical relative update of some layers is from a healthy one, on a log scale."""
    middle = geometric_median(steps.get(name, math.nan) for name in names)
    return abs(math.log(middle / HEALTHY_STEP)) if middle > 0 else math.inf


def _layerwise(given: Sequence[Rated]) -> dict[str, float]:
    """Return the learning rates of a geometric decay over depth, smallest at the input; empty if rates have none.

    The layers of one level follow each other. A single layer that does not fit may stand in between.
    """
    levels = [(lr, [info.name for info, _ in some]) for lr, some in groupby(given, key=lambda item: item[1])]
    single = [k for k in range(1, len(levels) - 1) if len(levels[k][1]) == 1]
    for odd in [None, *single]:
        ladder = list(levels)
        if odd is not None:  # put it where its neighbours say it should be
            ladder[odd] = (math.sqrt(levels[odd - 1][0] * levels[odd + 1][0]), levels[odd][1])
        steps = [after[0] / before[0] for before, after in pairwise(ladder)]
        own = [step for k, step in enumerate(steps[:-1]) if odd is None or k not in (odd - 1, odd)]
        if not own or not min(steps) > SAME:  # two steps are alike where one was corrected
            continue
        if max(steps[:-1]) <= SAME * min(steps[:-1]):  # the last one, to the head, may be larger
            return {name: lr for lr, names in ladder for name in names}
    return {}


def _purposes(
    given: Sequence[Rated], factors: Mapping[str, float], new: Collection[str], thawed: Collection[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield purposes for which layers may differ from the usual rate by one factor, with these layers."""
    order = [info.name for info, _ in given]
    readouts = {info.name for info, _ in given if info.role == "readout"}
    for factor, names in _alike(factors):
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


def _alike(factors: Mapping[str, float]) -> Iterator[tuple[float, list[str]]]:
    """Yield each distinct factor with the layers that have it."""
    names = sorted(factors, key=lambda name: factors[name])
    while names:
        factor = factors[names[0]]
        some = [name for name in names if factors[name] <= SAME * factor]
        yield factor, some
        names = names[len(some) :]


def _one_kind(chosen: set[str], order: Sequence[str]) -> tuple[str, bool]:
    """Return the part of their names that these layers share and no other layer has, and whether it is one module's.

    The part is empty if there is none. One module's is that of a decoder, which holds all of them; layers of a kind
    are in several modules, or take turns with others.
    """
    paths = [name.split(".") for name in chosen]
    others = {part for name in order if name not in chosen for part in name.split(".")}
    shared = sorted(part for part in set.intersection(*map(set, paths)) - others if not part.isdigit())
    if len(chosen) < 2 or not shared:
        return "", False
    kinds = [part for part in shared if len({tuple(path[: path.index(part)]) for path in paths}) > 1]
    places = [place for place, name in enumerate(order) if name in chosen]
    together = places[-1] - places[0] == len(places) - 1  # as a module's are, but not of kinds that take turns
    return (kinds or shared)[0], not kinds and together
