"""Learning rates of all layers: beside those of their own optimizer, and of several optimizers beside each other."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from spectral_monitor.condition.optimizers.rates import LEVEL, Rate, rates
from spectral_monitor.functional.medians import geometric_median

if TYPE_CHECKING:
    from spectral_monitor.condition.network import Network
    from spectral_monitor.condition.row import Row

APART = 20.0
"""Rates of two optimizers of one kind that are further apart are not meant so: twice what people publish (10, of the
actor and the critic of DDPG), and less than a hundredth is where the other way round would be right (4, of GANs).
"""


def rates_of(network: Network) -> dict[str, Rate]:
    """Return every matrix's learning rate beside the usual one of its optimizer, or of several that belong together."""
    steps = network.largest_steps
    groups: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in network.rows:
        if row.lr > 0 and not row.settings.frozen and not row.settings.sizes_own_steps:
            groups[row.settings.owner, row.settings.family].append(row)
    found: dict[str, Rate] = {}
    for some in groups.values():
        others = [row.lr for row in network.vectors.values() if row.settings.owner == some[0].settings.owner]
        rated = [(row.info, row.lr) for row in some]
        found |= rates(rated, network.expected, steps, geometric_median(others))
    if not network.fresh:  # then some may be fine-tuned
        return found
    for several in _apart(list(groups.values()), steps):
        names = {row.info.name for row in several}
        rows = [row for row in network.rows if row.info.name in names]  # in the order of the model
        rated = [(row.info, row.lr * row.to_peak) for row in rows]
        # All of a network of its own have a name in common, which makes no purpose.
        peaks = rates(rated, network.expected, steps, one_kind=1.0)
        for row in rows:
            rate = peaks[row.info.name]
            found[row.info.name] = replace(rate, lr=row.lr, usual=rate.usual / row.to_peak)
    return found


def _apart(groups: Sequence[Sequence[Row]], largest: Mapping[str, float]) -> Iterator[list[Row]]:
    """Yield the rows of several optimizers of one kind whose rates, and steps, are too far apart to be meant so.

    Networks that are trained against each other, or side by side, have rates of one order.
    """
    kinds: dict[str, list[Sequence[Row]]] = defaultdict(list)
    for some in groups:
        name = some[0].settings.optimizer
        kinds["Adam" if "adam" in name.lower() else name].append(some)  # AdamW, SparseAdam
    for several in kinds.values():
        peaks = [geometric_median(row.lr * row.to_peak for row in some) for some in several]
        steps = [geometric_median(largest.get(row.info.name, math.nan) for row in some) for some in several]
        slow, fast = (pick(range(len(several)), key=peaks.__getitem__) for pick in (min, max))
        if peaks[fast] > APART * peaks[slow] and steps[fast] > LEVEL * steps[slow]:
            yield [row for some in several for row in some]
