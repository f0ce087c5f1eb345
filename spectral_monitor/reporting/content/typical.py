"""The comparison of a layer with a typical one, in tables, pictures and verdicts."""

from __future__ import annotations

import math
from statistics import median_low

from spectral_monitor.condition.verdict import short
from spectral_monitor.fitting.medians import geometric_median
from spectral_monitor.measurement import Measurement

VS_TYPICAL = "vs. typical"
"""The name of this ratio in every display."""


def vs_typical(measurement: Measurement) -> list[float]:
    """Return the size of each layer's update over its typical value, (L,); NaN if that is not known.

    The typical value is the reference of the layer's band; if no layer has one, the geometric median of operators and
    readouts.

    Example:
        >>> import torch
        >>> from spectral_monitor import LayerInfo
        >>> layers = tuple(LayerInfo(name, "operator", 8, 8, (8, 8)) for name in "abc")
        >>> vs_typical(Measurement(5, layers, {"update_natural": torch.tensor([0.5, 1.0, 4.0])}, {}))
        [0.5, 1.0, 4.0]
    """
    ratios = over_reference(measurement)
    if any(map(math.isfinite, ratios)) or "update_natural" not in measurement.values:
        return ratios
    sizes = measurement.values["update_natural"].tolist()
    pairs = list(zip(sizes, measurement.layers, strict=True))
    median = geometric_median(size for size, info in pairs if info.is_dense)
    return [size / median if info.is_dense and size > 0 else math.nan for size, info in pairs]


def legend(measurement: Measurement) -> str:
    """Return a line that explains ``vs. typical`` and gives its healthy range; empty without values."""
    if not any(map(math.isfinite, vs_typical(measurement))):
        return ""
    if not any(map(math.isfinite, over_reference(measurement))):
        return f"{VS_TYPICAL}: update size / median of the layers"
    low, high = limits(measurement)
    healthy = f"; OK below {as_fraction(high)}" if low == 0 else f"; OK {as_fraction(low)} to {as_fraction(high)}"
    return f"{VS_TYPICAL}: update size / that of a typical layer at its lr{'' if math.isnan(high) else healthy}"


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
    rows = [] if bands is None else bands.tolist()
    ratios = [(low / reference, high / reference) for low, high, reference in rows if 0 < abs(reference) < math.inf]
    if not ratios:
        return math.nan, math.nan
    low, high = (median_low(ends) for ends in zip(*ratios, strict=True))  # an infinite limit stays infinite
    shared = sum(_is_close(own_low, low) and _is_close(own_high, high) for own_low, own_high in ratios)
    return (low, high) if 2 * shared > len(ratios) else (math.nan, math.nan)


def as_fraction(limit: float) -> str:
    """Return a limit as a whole number or as a fraction: ``8``, ``1/8``.

    Example:
        >>> as_fraction(0.125), as_fraction(8.0), as_fraction(1.0)
        ('1/8', '8', '1')
    """
    return f"1/{short(1 / limit)}" if 0 < limit < 1 else short(limit)


def powers_of_two(reach: float) -> tuple[list[int], list[str]]:
    """Return about seven exponents from -reach to reach, for an axis, and their powers as texts.

    Example:
        >>> powers_of_two(4.0)
        ([-4, -3, -2, -1, 0, 1, 2, 3, 4], ['1/16', '1/8', '1/4', '1/2', '1', '2', '4', '8', '16'])
    """
    spacing = max(1, round(reach / 3))
    count = math.floor(reach / spacing)
    exponents = [k * spacing for k in range(-count, count + 1)]
    return exponents, [f"{2**k:g}" if k >= 0 else f"1/{2**-k:g}" for k in exponents]


def log2_within(ratio: float, reach: float) -> float:
    """Return the logarithm to base 2, clamped to -reach and reach, so that 0 and infinity have one; NaN for NaN.

    Example:
        >>> log2_within(8.0, 7.0), log2_within(0.0, 7.0), log2_within(math.inf, 7.0)
        (3.0, -7.0, 7.0)
    """
    if math.isnan(ratio):
        return ratio
    power = math.log2(ratio) if 0 < ratio < math.inf else math.copysign(math.inf, ratio - 1)
    return min(max(power, -reach), reach)


def _is_close(limit: float, median: float) -> bool:
    return 0.99 * median <= limit <= 1.01 * median


def over_reference(measurement: Measurement, quantity: str = "update_natural") -> list[float]:
    """Return each layer's value over the reference of its band, (L,); NaN if it has none."""
    values, bands = measurement.values.get(quantity), measurement.bands.get(quantity)
    if values is None or bands is None:
        return [math.nan] * len(measurement.layers)
    pairs = zip(values.tolist(), bands.tolist(), strict=True)
    return [value / reference if reference else math.nan for value, (_, _, reference) in pairs]
