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
_RATES = "{optimizer} rates proportional to "
_KINDS = {
    ("adam", "one rate"): _ONE_RATE + "falls with the width, so a network twice as wide will need about half of it",
    ("adam", "1/fan_in"): _RATES + "1/fan_in (muP): the best rate should hold at other widths",
    ("adam", "fan_out/fan_in"): _RATES + "fan_out/fan_in, which is the rule for SGD",
    ("sgd", "one rate"): _ONE_RATE + "changes with the width",
    ("sgd", "fan_out/fan_in"): _RATES + "fan_out/fan_in (spectral parametrization): the best rate should hold at other "
    "widths",
    ("sgd", "1/fan_in"): _RATES + "1/fan_in (neural tangent parametrization): hidden layers learn less, the wider they "
    "are",
    ("lamb", "one rate"): (
        "{optimizer} updates proportional to the Frobenius norm of the weights: where updates have low rank, layers "
        "with many inputs and outputs take larger steps than others"
    ),
    ("muon", "one rate"): "{optimizer} for hidden matrices: its updates have the same size at any width",
}
"""Family of the optimizer and rule of its rates -> what they mean."""


def describe(layers: Iterable[LayerInfo], settings: Mapping[str, Hyperparameters]) -> str:
    """Return the recipe in a sentence; empty if settings follow no known recipe.

    Example:
        >>> infos = [LayerInfo(name, "operator", 8, 8, (8, 8)) for name in "ab"]
        >>> adam = Hyperparameters("Adam", "adam", 0, 0, 0.001, 0.001)
        >>> print(describe(infos, {"a": adam, "b": adam})[:47])
        one Adam rate for all matrices (standard parame
    """
    groups: dict[tuple[int, str, str], list[Rated]] = defaultdict(list)
    for info in layers:
        setting = settings.get(info.name)
        if setting is not None and setting.peak > 0 and not setting.frozen and info.is_dense:
            groups[setting.owner, setting.family, setting.optimizer].append((info, setting.peak))
    sentences = []
    for (_, family, optimizer), rated in groups.items():
        compared = rates(rated)
        purposes = {rate.purpose: rate for rate in compared.values() if rate.purpose}
        usual_layers = [item for item in rated if not compared[item[0].name].purpose]
        sentence = _KINDS.get((family, rule_of(usual_layers)), "") if len(usual_layers) > 1 else ""
        if sentence:
            sentences.append(sentence.format(optimizer=optimizer))
        for purpose, rate in purposes.items():
            sentences.append(f"{purpose} ({rate.lr / rate.usual_lr:.3g} times the others')")
    return "; ".join(dict.fromkeys(sentences))


def relative_rates(layers: Sequence[Layer], settings: Mapping[str, Hyperparameters]) -> dict[str, float]:
    """Return the peak learning rate of each layer over the largest of its optimizer, if these differ on purpose.

    Layer-wise decay, heads, new layers and adapters with a rate of their own keep it. Rates that follow a rule of width
    (muP), or differ for no known reason, count as 1.

    ``layers``: the measured layers, vectors included.
    """
    matrices: dict[tuple[int, str], list[Rated]] = defaultdict(list)
    vectors: dict[tuple[int, str], list[Rated]] = defaultdict(list)
    for layer in layers:
        setting = settings[layer.info.name]
        if setting.peak > 0 and not setting.frozen:
            groups = vectors if layer.info.role == "vector" else matrices
            groups[setting.owner, setting.family].append((layer.info, setting.peak))
    relative: dict[str, float] = {}
    for key, rated in matrices.items():
        compared = rates(rated)
        usual_lrs = [(info, compared[info.name].usual_lr) for info, _ in rated]
        rule, median = rule_of(usual_lrs), geometric_median(lr for _, lr in usual_lrs)
        factors: dict[str, float] = {}
        for name, rate in compared.items():
            if not rule:  # the usual rates themselves vary over depth
                factors[name] = rate.usual_lr / median
            else:
                factors[name] = rate.lr / rate.usual_lr if rate.purpose and rule == "one rate" else 1.0
        largest = max(factors.values())
        for info, lr in vectors[key]:
            on_purpose = rule in ("", "one rate") and 1 / ON_PURPOSE <= lr / median <= ON_PURPOSE
            factors[info.name] = lr / median if on_purpose else 1.0
        for name, factor in factors.items():
            relative[name] = 1.0 if 1 / SAME <= factor / largest <= SAME else factor / largest
    return relative
