"""Learning rates that differ on purpose, as factors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from spectral_monitor.condition.optimizers.hyperparameters import Hyperparameters
from spectral_monitor.condition.optimizers.rates import ON_PURPOSE, SAME, Rated, rates, rule_of
from spectral_monitor.functional.medians import geometric_median
from spectral_monitor.layers import Layer


def relative_rates(layers: Sequence[Layer], settings: Mapping[str, Hyperparameters]) -> dict[str, float]:
    """Return layer -> its peak learning rate over the largest of its optimizer, as far as they differ on purpose.

    Layer-wise decay, heads, new layers and adapters with a rate of their own are kept. What follows a rule of width
    (muP) or stands out for no reason counts as 1.

    Args:
        layers: measured ones, vectors included.
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
