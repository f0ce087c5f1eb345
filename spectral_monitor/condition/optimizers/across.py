"""The learning rates of all layers, compared within their own optimizer and between optimizers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from spectral_monitor.condition.optimizers.rates import LEVEL, RULES, Rate, distance, rates
from spectral_monitor.fitting.medians import geometric_median

if TYPE_CHECKING:
    from spectral_monitor.condition.network import Network
    from spectral_monitor.condition.row import Row

MAX_RATE_RATIO = 20.0
"""Learning rates of two optimizers of one kind that differ by more than this are a mistake. Published recipes differ by
up to 10 (actor and critic of DDPG).
"""
USUAL_ENTRY = 0.02
"""Embeddings with smaller entries are overwritten by the first steps, whatever the learning rate."""


def rates_of(network: Network) -> dict[str, Rate]:
    """Return the learning rate of each matrix with the usual one of its optimizer, or of a similar optimizer."""
    # Any step is large relative to weights next to zero; steps of embeddings count relative to usual entries.
    small = {row.name for row in network.rows if row.info.role != "embedding" and network.began_small(row)}
    shares = {
        row.name: min(1.0, network.initial_rows(row) / USUAL_ENTRY)
        for row in network.rows
        if row.info.role == "embedding"
    }
    steps = {name: step * shares.get(name, 1.0) for name, step in network.largest_steps.items() if name not in small}
    groups: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in network.rows:
        if row.is_trained and not row.settings.sizes_own_steps:
            groups[row.settings.owner, row.settings.family].append(row)
    layer_rates: dict[str, Rate] = {}
    for (owner, _), rows in groups.items():
        vectors = geometric_median(row.lr for row in network.vectors.values() if row.settings.owner == owner)
        rated = [(row.info, row.lr) for row in rows]
        layer_rates |= rates(rated, network.expected, steps, vectors, network.new, network.thawed)
    if network.fresh:  # in other networks an optimizer may fine-tune
        for outlier, reference in _outliers(groups.values(), steps):
            layer_rates |= _rates_by_rule_of(reference, outlier, network)
    return layer_rates


def _rates_by_rule_of(reference: Sequence[Row], outlier: Sequence[Row], network: Network) -> Iterator[tuple[str, Rate]]:
    """Yield the rates of one optimizer's layers, compared with those that another optimizer's rule gives them."""
    peaks = rates([(row.info, row.lr * row.to_peak) for row in reference], network.expected, network.largest_steps)
    rule = next(iter(peaks.values())).rule
    unit = geometric_median(
        rate.usual_lr / RULES[rule](row.info) for row, rate in zip(reference, peaks.values(), strict=True)
    )
    for row in outlier:
        usual_lr = unit * RULES[rule](row.info) * network.expected.get(row.name, 1.0) / row.to_peak
        yield row.name, Rate(row.lr, usual_lr, rule=rule)


def _outliers(
    groups: Iterable[Sequence[Row]], largest_steps: Mapping[str, float]
) -> Iterator[tuple[Sequence[Row], Sequence[Row]]]:
    """Yield the rows of an outlying optimizer with those of the one of its kind from which it differs most.

    Networks that are trained against each other, or side by side, have rates of one order. If two differ by more, the
    one whose steps are further from a healthy size is the outlier.
    """
    kinds: dict[str, list[Sequence[Row]]] = defaultdict(list)
    for rows in groups:
        name = rows[0].settings.optimizer
        kinds["Adam" if "adam" in name.lower() else name].append(rows)  # AdamW, SparseAdam
    for same_kind in kinds.values():
        peaks = [geometric_median(row.lr * row.to_peak for row in rows) for rows in same_kind]
        steps = [geometric_median(largest_steps.get(row.name, math.nan) for row in rows) for rows in same_kind]
        slow, fast = (pick(range(len(same_kind)), key=peaks.__getitem__) for pick in (min, max))
        if peaks[fast] > MAX_RATE_RATIO * peaks[slow] and steps[fast] > LEVEL * steps[slow]:
            slow_off, fast_off = (distance([row.name for row in same_kind[i]], largest_steps) for i in (slow, fast))
            outlier, reference = (slow, fast) if slow_off > fast_off else (fast, slow)
            yield same_kind[outlier], same_kind[reference]
