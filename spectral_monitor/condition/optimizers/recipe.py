"""The kind of recipe that a run follows, as far as its optimizers' settings tell; printed once, as information."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from spectral_monitor.condition.optimizers.hyperparameters import Hyperparameters
from spectral_monitor.condition.optimizers.rates import Rated, rates, rule_of
from spectral_monitor.measurement import LayerInfo

_KINDS = {
    ("adam", "one rate"): "one {optimizer} rate for all matrices (standard parametrization): the best rate falls with "
    "the width, so a network twice as wide will need about half of it",
    ("adam", "1/fan_in"): "{optimizer} rates that go with 1/fan_in (muP): the best rate should hold at other widths",
    ("adam", "fan_out/fan_in"): "{optimizer} rates that go with fan_out/fan_in, which is the rule for SGD",
    ("sgd", "one rate"): "one {optimizer} rate for all matrices (standard parametrization): the best rate changes with "
    "the width",
    ("sgd", "fan_out/fan_in"): "{optimizer} rates that go with fan_out/fan_in (spectral parametrization): the best "
    "rate should hold at other widths",
    (
        "sgd",
        "1/fan_in",
    ): "{optimizer} rates that go with 1/fan_in (neural tangent parametrization): hidden layers learn "
    "less, the wider they are",
    (
        "lamb",
        "one rate",
    ): "{optimizer} updates in proportion to the Frobenius norm of weights: where updates are of low "
    "rank, layers with many inputs and outputs take larger steps than others",
    ("muon", "one rate"): "{optimizer} for hidden matrices: its updates have the same size at any width",
}


def describe(layers: Iterable[LayerInfo], settings: Mapping[str, Hyperparameters]) -> str:
    """Return the recipe in a sentence; empty where settings do not tell.

    Args:
        layers: measured ones.
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
        if of is not None and of.peak > 0 and not of.frozen and info.role in ("operator", "readout"):
            held[of.owner, of.family, of.optimizer].append((info, of.peak))
    told = []
    for (_, kind, optimizer), rated in held.items():
        purposes = {rate.purpose: rate for rate in rates(rated).values() if rate.purpose}
        common = [item for item in rated if not rates(rated)[item[0].name].purpose]
        sentence = _KINDS.get((kind, rule_of(common)), "") if len(common) > 1 else ""
        if sentence:
            told.append(sentence.format(optimizer=optimizer))
        told += [f"{purpose} ({rate.lr / rate.usual:.3g} times the others')" for purpose, rate in purposes.items()]
    return "; ".join(dict.fromkeys(told))
