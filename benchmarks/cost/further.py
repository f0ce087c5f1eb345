"""What each quantity outside the smaller tiers adds to a measured step, counted."""

from __future__ import annotations

from typing import Any

import torch
from tqdm.auto import tqdm

from benchmarks.cost.models import TOKENS, Size
from benchmarks.cost.rounds import Training
from benchmarks.counting.counts import Counts, count
from spectral_monitor.quantities import QUANTITIES, TIERS

SMALL = Size(128, 2, 4, TOKENS, 64)
"""Of less than a million parameters: dozens of measurements are counted, in which Python sees every operator."""
EXACT = ("operators_fixed", "read_fixed", "crossings", "forwards", "backwards")
ADDED = (*EXACT, "operators", "read")
"""Of the counts; the last two with norms, whose number of steps rounding may change."""


def further_keys() -> tuple[str, ...]:
    """Quantities that no tier below full has."""
    return tuple(key for key in QUANTITIES if key not in TIERS["standard"])


def counted_with(size: Training, keys: tuple[str, ...], text: str | None) -> Counts:
    """Counts of a measured step with these quantities besides tier standard, the first batch looked at again in it."""
    module, data = size.start(text)
    batch = next(iter(data))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    quantities = [*TIERS["standard"], *keys]
    return count(module, optimizer, lambda model: model(*batch), quantities=quantities, drift_every=1)


def further(text: str | None, size: Training = SMALL) -> dict[str, dict[str, Any]]:
    """Quantity -> what it alone adds to tier standard; ``known`` is whether this model has it."""
    standard = counted_with(size, (), text)
    additions = {}
    for key in tqdm(further_keys(), "each further quantity", leave=False, disable=None):
        counts = counted_with(size, (key,), text)
        additions[key] = {name: getattr(counts, name) - getattr(standard, name) for name in ADDED}
        additions[key]["known"] = key in counts.defined
    return additions
