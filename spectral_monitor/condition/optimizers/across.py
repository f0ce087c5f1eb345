"""Learning rates of all layers, compared within their own optimizer and between optimizers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from spectral_monitor.condition.optimizers.rates import LEVEL, RULES, Rate, distance, rates
from spectral_monitor.fitting.medians import geometric_median

if TYPE_CHECKING:
    from spectral_monitor.condition.network import Network
    from spectral_monitor.condition.row import Row

APART = 20.0
"""Learning rates of two optimizers of one kind that differ by more than this are a mistake. Published recipes differ by
up to 10 (actor and critic of DDPG).
"""


def rates_of(network: Network) -> dict[str, Rate]:
    """Return the learning rate of each matrix with the usual one of its optimizer, or of a similar optimizer."""
    # Any step is large relative to weights next to zero.
    small = {row.name for row in network.rows if network.began_small(row)}
    steps = {name: step for name, step in network.largest_steps.items() if name not in small}
    groups: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in network.rows:
        if row.is_trained and not row.settings.sizes_own_steps:
            groups[row.settings.owner, row.settings.family].append(row)
    found: dict[str, Rate] = {}
    for some in groups.values():
        others = [row.lr for row in network.vectors.values() if row.settings.owner == some[0].settings.owner]
        rated = [(row.info, row.lr) for row in some]
        found |= rates(rated, network.expected, steps, geometric_median(others), network.new, network.thawed)
    if not network.fresh:  # then some may be fine-tuned
        return found
    for odd, reference in _apart(list(groups.values()), steps):
        found |= _beside(odd, reference, network)
    return found


def _beside(odd: Sequence[Row], reference: Sequence[Row], network: Network) -> Iterator[tuple[str, Rate]]:
    """Yield the rates of one optimizer's layers, with those that the rule of another optimizer gives them."""
    peaks = rates([(row.info, row.lr * row.to_peak) for row in reference], network.expected, network.largest_steps)
    rule = next(iter(peaks.values())).rule
    unit = geometric_median(
        rate.usual / RULES[rule](row.info) for row, rate in zip(reference, peaks.values(), strict=True)
    )
    for row in odd:
        usual = unit * RULES[rule](row.info) * network.expected.get(row.name, 1.0) / row.to_peak
        yield row.name, Rate(row.lr, usual, rule=rule)


def _apart(
    groups: Sequence[Sequence[Row]], largest: Mapping[str, float]
) -> Iterator[tuple[Sequence[Row], Sequence[Row]]]:
    """Yield the rows of an optimizer whose rates and steps are far from another one's of its kind, and those rows.

    Networks that are trained against each other, or side by side, have rates of one order. If two differ by more, the
    one whose steps are further from a healthy size is off.
    """
    kinds: dict[str, list[Sequence[Row]]] = defaultdict(list)
    for some in groups:
        name = some[0].settings.optimizer
        kinds["Adam" if "adam" in name.lower() else name].append(some)  # AdamW, SparseAdam
    for several in kinds.values():
        peaks = [geometric_median(row.lr * row.to_peak for row in some) for some in several]
        steps = [geometric_median(largest.get(row.name, math.nan) for row in some) for some in several]
        slow, fast = (pick(range(len(several)), key=peaks.__getitem__) for pick in (min, max))
        if peaks[fast] > APART * peaks[slow] and steps[fast] > LEVEL * steps[slow]:
            far = [distance([row.name for row in several[place]], largest) for place in (slow, fast)]
            odd, reference = (slow, fast) if far[0] > far[1] else (fast, slow)
            yield several[odd], several[reference]
