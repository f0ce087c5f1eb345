"""Bands of all layers, for charts that show how far each layer is from its band."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from spectral_monitor.condition.findings import Finding

_SHOWN = ("exploding", "embedding", "weights", "reference")
"""Checks whose limits are shown; if two look at the same value, the later one counts."""


def bands(findings: Iterable[Finding], layers: Sequence[str]) -> dict[str, Tensor]:
    """Return quantity -> (L, 3): lowest value, highest value and reference; NaN for layers without a band.

    Without a limit, the lowest value is 0 or the highest inf. The reference is NaN if only a limit is known.

    Args:
        findings: findings of one measurement.
        layers: names of the L layers.

    Example:
        >>> found = [Finding("reference", "b", "update_natural", 0.3, 0.1, (0.5, 2.0))]
        >>> bands(found, ["a", "b"])["update_natural"]
        tensor([[   nan,    nan,    nan],
                [0.0500, 0.2000, 0.1000]])
    """
    rows: dict[str, dict[str, tuple[float, float, float]]] = {}
    known = (finding for finding in findings if finding.check in _SHOWN)
    for finding in sorted(known, key=lambda finding: _SHOWN.index(finding.check)):
        reference = math.nan if finding.check == "exploding" else finding.reference
        rows.setdefault(finding.quantity, {})[finding.layer] = (*finding.limits, reference)
    nothing = (math.nan,) * 3
    return {
        key: torch.tensor([found.get(layer, nothing) for layer in layers], device="cpu") for key, found in rows.items()
    }
