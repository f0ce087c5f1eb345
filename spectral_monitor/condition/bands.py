"""The bands of all layers, for charts that show how far each layer is from its band."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from spectral_monitor.condition.findings import Finding

_SHOWN = ("exploding", "embedding", "weights", "reference")
"""Checks whose limits are shown; if two check the same value, the later one counts."""


def bands(findings: Iterable[Finding], layers: Sequence[str]) -> dict[str, Tensor]:
    """Return quantity -> (L, 3): lowest value, highest value and reference; NaN for layers without a band.

    Where a limit is missing, the lowest value is 0 or the highest inf. The reference is NaN if only a limit is known.

    Args:
        findings: those of one measurement.
        layers: names of the L layers.

    Example:
        >>> finding = Finding("reference", "b", "update_natural", 0.3, 0.1, (0.5, 2.0))
        >>> bands([finding], ["a", "b"])["update_natural"]
        tensor([[   nan,    nan,    nan],
                [0.0500, 0.2000, 0.1000]])
    """
    by_quantity: dict[str, dict[str, tuple[float, float, float]]] = {}
    shown = (finding for finding in findings if finding.check in _SHOWN)
    for finding in sorted(shown, key=lambda finding: _SHOWN.index(finding.check)):
        reference = math.nan if finding.check == "exploding" else finding.reference
        by_quantity.setdefault(finding.quantity, {})[finding.layer] = (*finding.limits, reference)
    no_band = (math.nan,) * 3
    return {
        quantity: torch.tensor([of_layers.get(layer, no_band) for layer in layers], device="cpu")
        for quantity, of_layers in by_quantity.items()
    }
