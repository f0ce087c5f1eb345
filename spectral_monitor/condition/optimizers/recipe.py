"""The recipe that the settings of optimizers follow: in a sentence, and as factors on learning rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from spectral_monitor.condition.optimizers.hyperparameters import Hyperparameters
from spectral_monitor.condition.optimizers.rates import ON_PURPOSE, SAME, Rated, rates, rule_of
from spectral_monitor.fitting.medians import geometric_median
from spectral_monitor.layers import Layer
from spectral_monitor.measurement import LayerInfo

_ONE_RATE = "one {optimizer} rate for all matrices (standard parametrization): the best rate "
_RATES = "{optimizer} rates that go with "
_KINDS = {
    ("adam", "one rate"): _ONE_RATE + "falls with the width, so a network twice as wide will need about half of it",
    ("adam", "1/fan_in"): _RATES + "1/fan_in (muP): the best rate should hold at other widths",
    ("adam", "fan_out/fan_in"): _RATES + "fan_out/fan_in, which is the rule for SGD",
    ("sgd", "one rate"): _ONE_RATE + "changes with the width",
    ("sgd", "fan_out/fan_in"): _RATES + "fan_out/fan_in (spectral parametrization): the best rate should hold at other "
    "widths",
    ("sgd", "1/fan_in"): _RATES + "1/fan_in (neural tangent parametrization): hidden layers learn less, the wider they "
    "are",
    ("lamb", "one rate"): "{optimizer} updates in proportion to the Frobenius norm of weights: where updates are of "
    "low rank, layers with many inputs and outputs take larger steps than others",
    ("muon", "one rate"): "{optimizer} for hidden matrices: its updates have the same size at any width",
}
"""Family of the optimizer and rule of its rates -> what they mean."""


def describe(layers: Iterable[LayerInfo], settings: Mapping[str, Hyperparameters]) -> str:
    """Return the recipe in a sentence; empty if settings follow no known recipe.

    Args:
        layers: the measured layers.
        settings: layer -> its optimizer's settings.

    Example:
        >>> infos = [LayerInfo(name, "operator", 8, 8, (8, 8)) for name in "ab"]
        >>> adam = Hyperparameters("Adam", "adam", 0, 0, 0.001, 0.001)
        >>> print(describe(infos, {"a": adam, "b": adam})[:47])
        one Adam rate for all matrices (standard parame
    """
    held: dict[tuple[int, str, str], list[Rated]] = defaultdict(list)
    for info in layers:
        of = settings.get(info.name)
        if of is not None and of.peak > 0 and not of.frozen and info.is_dense:
            held[of.owner, of.family, of.optimizer].append((info, of.peak))
    told = []
    for (_, kind, optimizer), rated in held.items():
        beside = rates(rated)
        purposes = {rate.purpose: rate for rate in beside.values() if rate.purpose}
        common = [item for item in rated if not beside[item[0].name].purpose]
        sentence = _KINDS.get((kind, rule_of(common)), "") if len(common) > 1 else ""
        if sentence:
            told.append(sentence.format(optimizer=optimizer))
        told += [f"{purpose} ({rate.lr / rate.usual:.3g} times the others')" for purpose, rate in purposes.items()]
    return "; ".join(dict.fromkeys(told))


def relative_rates(layers: Sequence[Layer], settings: Mapping[str, Hyperparameters]) -> dict[str, float]:
    """Return the peak learning rate of each layer over the largest of its optimizer, if these differ on purpose.

    Layer-wise decay, heads, new layers and adapters with a rate of their own are kept. Rates that follow a rule of
    width (muP), or differ for no known reason, count as 1.

    Args:
        layers: the measured layers, vectors included.
        settings: layer -> its optimizer's settings.
    """
    matrices: dict[tuple[int, str], list[Rated]] = defaultdict(list)
    vectors: dict[tuple[int, str], list[Rated]] = defaultdict(list)
    for layer in layers:
        of = settings[layer.info.name]
        if of.peak > 0 and not of.frozen:
            held = vectors if layer.info.role == "vector" else matrices
            held[of.owner, of.family].append((layer.info, of.peak))
    found: dict[str, float] = {}
    for key, rated in matrices.items():
        judged = rates(rated)
        usual = [(info, judged[info.name].usual) for info, _ in rated]
        rule, middle = rule_of(usual), geometric_median(lr for _, lr in usual)
        own: dict[str, float] = {}
        for info, lr in rated:
            rate = judged[info.name]
            if not rule:  # the usual rates themselves are spread over depth
                own[info.name] = rate.usual / middle
            else:
                own[info.name] = lr / rate.usual if rate.purpose and rule == "one rate" else 1.0
        for info, lr in vectors[key]:
            meant = rule in ("", "one rate") and 1 / ON_PURPOSE <= lr / middle <= ON_PURPOSE
            own[info.name] = lr / middle if meant else 1.0
        most = max(own[info.name] for info, _ in rated)
        found |= {name: 1.0 if 1 / SAME <= factor / most <= SAME else factor / most for name, factor in own.items()}
    return found
