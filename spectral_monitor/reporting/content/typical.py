"""The comparison of a layer with a typical one, as tables, pictures and verdicts use it."""

from __future__ import annotations

import math
from statistics import median_low

from spectral_monitor.condition.verdict import short
from spectral_monitor.fitting.medians import geometric_median
from spectral_monitor.measurement import Measurement

VS_TYPICAL = "vs. typical"
"""What the number is called, everywhere."""


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
    ratios = over_reference(measurement)
    if any(map(math.isfinite, ratios)) or "update_natural" not in measurement.values:
        return ratios
    sizes = measurement.values["update_natural"].tolist()
    compared = [info.is_dense for info in measurement.layers]
    median = geometric_median(size for size, one in zip(sizes, compared, strict=True) if one)
    return [size / median if one and size > 0 else math.nan for size, one in zip(sizes, compared, strict=True)]


def legend(measurement: Measurement) -> str:
    """Return one line on what ``vs. typical`` is and between which values a layer is OK; empty without values."""
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
    known = [(low / middle, high / middle) for low, high, middle in rows if math.isfinite(middle) and middle]
    if not known:
        return math.nan, math.nan
    low, high = (median_low(ends) for ends in zip(*known, strict=True))  # an infinite limit stays infinite
    shared = sum(_close(one[0], low) and _close(one[1], high) for one in known)
    return (low, high) if 2 * shared > len(known) else (math.nan, math.nan)


def as_fraction(limit: float) -> str:
    """Return a limit as people say it: ``1/8``, ``8``.

    Example:
        >>> as_fraction(0.125), as_fraction(8.0), as_fraction(1.0)
        ('1/8', '8', '1')
    """
    return f"1/{short(1 / limit)}" if 0 < limit < 1 else short(limit)


def powers_of_two(reach: float) -> tuple[list[int], list[str]]:
    """Return the exponents on an axis from minus to plus this, about seven of them, and their powers in words.

    Example:
        >>> powers_of_two(4.0)
        ([-4, -3, -2, -1, 0, 1, 2, 3, 4], ['1/16', '1/8', '1/4', '1/2', '1', '2', '4', '8', '16'])
    """
    apart = max(1, round(reach / 3))
    powers = [k * apart for k in range(-math.floor(reach / apart), math.floor(reach / apart) + 1)]
    return powers, [f"{2**k:g}" if k >= 0 else f"1/{2**-k:g}" for k in powers]


def log2_within(ratio: float, far: float) -> float:
    """Return the logarithm to base 2, no further than this from 0: 0 and infinity have one too; NaN for NaN.

    Example:
        >>> log2_within(8.0, 7.0), log2_within(0.0, 7.0), log2_within(math.inf, 7.0)
        (3.0, -7.0, 7.0)
    """
    if math.isnan(ratio):
        return ratio
    power = math.log2(ratio) if 0 < ratio < math.inf else math.copysign(math.inf, ratio - 1)
    return min(max(power, -far), far)


def _close(limit: float, median: float) -> bool:
    return 0.99 * median <= limit <= 1.01 * median


def over_reference(measurement: Measurement, quantity: str = "update_natural") -> list[float]:
    """Return each layer's value over the reference of its band, NaN where it has none."""
    values, bands = (where.get(quantity) for where in (measurement.values, measurement.bands))
    if values is None or bands is None:
        return [math.nan] * len(measurement.layers)
    pairs = zip(values.tolist(), bands.tolist(), strict=True)
    return [value / middle if middle else math.nan for value, (_, _, middle) in pairs]
