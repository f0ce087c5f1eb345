"""The comparison of a layer with a typical one, as tables, pictures and verdicts use it."""

from __future__ import annotations

import math

from spectral_monitor.condition.verdict import short
from spectral_monitor.functional.norms import balance_ratios
from spectral_monitor.measurement import Measurement

VS_TYPICAL = "vs. typical"
"""What the number is called, everywhere."""
_COMPARED = ("operator", "readout")
"""Roles of the layers that the median is taken of where nothing else is known."""


def vs_typical(measurement: Measurement) -> list[float]:
    """Return the size of each layer's update over its typical value, (L,); NaN where that is not known.

    The typical value is the reference of the layer's band; where no layer has one, the geometric median of operators
    and readouts.

    Example:
        >>> import torch
        >>> from spectral_monitor import LayerInfo
        >>> layers = tuple(LayerInfo(name, "operator", 8, 8, (8, 8)) for name in "abc")
        >>> vs_typical(Measurement(5, layers, {"update_natural": torch.tensor([0.5, 1.0, 4.0])}, {}))
        [0.5, 1.0, 4.0]
    """
    values = measurement.values.get("update_natural")
    if values is None:
        return [math.nan] * len(measurement.layers)
    if _has_reference(measurement):
        ratios: list[float] = (values / measurement.bands["update_natural"][:, 2]).tolist()
        return ratios
    compared = [i for i, info in enumerate(measurement.layers) if info.role in _COMPARED]
    known = dict(zip(compared, balance_ratios(values[compared]).tolist(), strict=True))
    return [known.get(i, math.nan) for i in range(len(measurement.layers))]


def legend(measurement: Measurement) -> str:
    """Return one line on what ``vs. typical`` is and between which values a layer is OK; empty without values."""
    if not any(map(math.isfinite, vs_typical(measurement))):
        return ""
    if not _has_reference(measurement):
        return f"{VS_TYPICAL}: size of the update / median of the layers"
    low, high = limits(measurement)
    words = (
        "" if math.isnan(high) else f"; OK below {power(high)}" if low == 0 else f"; OK {power(low)} to {power(high)}"
    )
    return f"{VS_TYPICAL}: size of the update / that of a typical layer{words}"


def limits(measurement: Measurement, quantity: str = "update_natural") -> tuple[float, float]:
    """Return the limits of a quantity over its reference that most layers share; NaN where each has its own.

    Example:
        >>> import torch
        >>> from spectral_monitor import LayerInfo
        >>> layers = tuple(LayerInfo(name, "operator", 8, 8, (8, 8)) for name in "ab")
        >>> bands = {"update_natural": torch.tensor([[0.5, 4.0, 1.0], [1.0, 8.0, 2.0]])}
        >>> limits(Measurement(5, layers, {}, {}, bands=bands))
        (0.5, 4.0)
    """
    bands = measurement.bands.get(quantity)
    known = None if bands is None else (bands[:, :2] / bands[:, 2:])[bands[:, 2].isfinite()]
    if known is None or not len(known):
        return math.nan, math.nan
    middle = known.median(0).values  # an infinite limit stays infinite
    share = ((known >= 0.99 * middle) & (known <= 1.01 * middle)).all(1).float().mean()
    low, high = middle.tolist() if share > 0.5 else (math.nan, math.nan)
    return low, high


def power(limit: float) -> str:
    """Return a limit as people say it: ``1/8``, ``8``.

    Example:
        >>> power(0.125), power(8.0), power(1.0)
        ('1/8', '8', '1')
    """
    return f"1/{short(1 / limit)}" if 0 < limit < 1 else short(limit)


def _has_reference(measurement: Measurement) -> bool:
    bands = measurement.bands.get("update_natural")
    return bands is not None and bool((measurement.values["update_natural"] / bands[:, 2]).isfinite().any())
