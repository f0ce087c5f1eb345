"""The numbers that loggers get: few enough for a deep network, chosen to answer the questions of the panels.

The file of a run has every number. In a small network a logger gets each essential quantity of every matrix. In a deep
one it gets the lowest, the median and the highest value of all matrices and of each family (the same layer in every
block). Layers without a family, and layers that ever had a verdict, are logged one by one. That is at most 600 numbers
per measured step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

from spectral_monitor.layers.naming import matches
from spectral_monitor.measurement import NODE, LayerInfo, Measurement
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting.content.families import OTHERS, families_of
from spectral_monitor.reporting.content.typical import limits, log2_within, over_reference, vs_typical
from spectral_monitor.suggestions import did_you_mean

Log = Literal["essential", "all"] | Sequence[str]
PREFIX = "spectral"
SUMMARIES = (
    *("violations", "worst_layer_ratio", "loss_change", "loss_change_predicted", "edge"),
    *("final_layer_alignment", "overhead_ms", "equilibrium_steps", "linearity"),
    *("noise_scale", "noise_scale_low", "noise_scale_high"),
)
"""Values of the whole network that are logged."""
LOG2 = "vs_typical_log2"
"""Logarithm to base 2 of a value over a typical one: 0 is typical, 3 is 8 times as large."""
FAR = 24.0
"""The largest distance from typical that is logged, in powers of two; the value 0 is logged as that."""
ALL, LIMITS = "all", "limits"
"""Stand for a layer in keys: all matrices together; the limits that most matrices share."""
SPREAD = ("lowest", "median", "highest")
OVERLAID = (
    *(f"{LOG2}/{ALL}/highest", f"{LOG2}/{ALL}/lowest", f"update_ratio/{ALL}/median"),
    *(f"feature_change/{ALL}/median", f"feature_change/{ALL}/highest", f"weight_natural/{ALL}/highest"),
    *(f"drift_ratio/{ALL}/median", f"bfa_cos/{ALL}/median", f"update_stable_rank/{ALL}/median"),
)
"""Numbers that have the same key in every network, so that charts can compare runs of different networks."""
MAX_LAYERS_ONE_BY_ONE = 16
"""The most matrices of a network in which each matrix is logged."""
MAX_FAMILIES, MAX_SINGLES, MAX_WITH_VERDICT = 12, 20, 8
"""The most families, layers without a family and layers that ever had a verdict that are logged."""


def essential_keys() -> tuple[str, ...]:
    """Return the quantities that are logged by default."""
    return tuple(key for key, quantity in QUANTITIES.items() if quantity.essential)


def group(quantity: str) -> str:
    """Return the part of a key before the layer; loggers make a section for each.

    Example:
        >>> group("feature_change")
        'spectral_feature_change'
    """
    return f"{PREFIX}_{quantity}"


def log2_of(quantity: str) -> str:
    """Return the name of a quantity over its typical value, as log2.

    Example:
        >>> log2_of("update_natural"), log2_of("weight_natural")
        ('vs_typical_log2', 'weight_natural_vs_typical_log2')
    """
    return LOG2 if quantity == "update_natural" else f"{quantity}_{LOG2}"


def family_key(family: str) -> str:
    """Return the name of a family in a key; W&B and MLflow allow no ``*``.

    Example:
        >>> family_key("h.*.mlp.c_fc")
        'h.N.mlp.c_fc'
    """
    return family.replace("*", "N")


@dataclass(frozen=True)
class Groups:
    """The matrices that are logged together or one by one, as indices of layers."""

    matrices: tuple[int, ...]  # all of them
    families: dict[str, tuple[int, ...]]  # name -> members; none in a small network
    singles: tuple[int, ...]  # logged one by one


@lru_cache(maxsize=8)  # the layers are the same at every measurement
def grouped(layers: tuple[LayerInfo, ...]) -> Groups:
    """Return the groups in which the matrices of a network are logged.

    Example:
        >>> layers = tuple(LayerInfo(f"h.{i}.mlp", "operator", 8, 8, (8, 8)) for i in range(20))
        >>> list(grouped(layers).families), grouped(layers[:3]).singles
        (['h.*.mlp'], (0, 1, 2))
    """
    matrices = tuple(i for i, info in enumerate(layers) if info.is_matrix)
    if len(matrices) <= MAX_LAYERS_ONE_BY_ONE:
        return Groups(matrices, {}, matrices)
    families = families_of([layers[i].name for i in matrices])
    singles = families.pop(OTHERS, [])
    # Layers of all but the largest families are logged one by one; if these are many, as a family of their own.
    by_size = sorted(families, key=lambda name: -len(families[name]))
    for name in by_size[MAX_FAMILIES:]:
        singles += families.pop(name)
    singles.sort()
    if len(singles) > MAX_SINGLES:
        families[OTHERS], singles = singles, []
    members = {name: tuple(matrices[k] for k in positions) for name, positions in families.items()}
    return Groups(matrices, members, tuple(matrices[k] for k in singles))


def essentials(measurement: Measurement, log: Log = "essential", requested: Sequence[str] = ()) -> dict[str, float]:
    """Return the numbers of a measurement for a logger, key -> finite number.

    Args:
        log: ``"essential"``; ``"all"`` for every number too, under :meth:`Measurement.scalars`'s keys; or patterns on
            ``<quantity>/<layer>`` that select single numbers to add.
        requested: quantities that a user has named; they count as essential.
    """
    groups, columns = grouped(measurement.layers), _columns(measurement, requested)
    names = [info.name for info in measurement.layers]
    nodes = [i for i, info in enumerate(measurement.layers) if info.role == NODE]
    singles = (*groups.singles, *nodes, *_flagged(measurement, groups))
    numbers: dict[str, float] = {}
    for key, values in columns.items():
        numbers |= {f"{group(key)}/{names[i]}": values[i] for i in singles}
        for family, members in groups.families.items():
            numbers |= _spread(f"{group(key)}/{family_key(family)}", [values[i] for i in members])
        of_all = _spread(f"{group(key)}/{ALL}", [values[i] for i in groups.matrices])
        if not groups.families:
            of_all = {name: value for name, value in of_all.items() if name.removeprefix(f"{PREFIX}_") in OVERLAID}
        numbers |= of_all
    numbers |= _limits(measurement)
    numbers |= {f"{PREFIX}/summary/{key}": measurement.summary.get(key, math.nan) for key in SUMMARIES}
    if log == "all":
        numbers = measurement.scalars(PREFIX) | numbers
    elif log != "essential":
        for key, column in measurement.values.items():
            for name, value in zip(names, column.tolist(), strict=True):
                if matches(log, f"{key}/{name}"):
                    numbers[f"{group(key)}/{name}"] = value
    return {key: value for key, value in numbers.items() if math.isfinite(value)}


def overall(measurement: Measurement) -> dict[str, float]:
    """Return the numbers of the network as a whole: they have the same keys in every network."""
    numbers = essentials(measurement)
    return {key: value for key, value in numbers.items() if key.startswith(f"{PREFIX}/summary/") or f"/{ALL}/" in key}


def _columns(measurement: Measurement, requested: Sequence[str]) -> dict[str, list[float]]:
    """Return the essential quantities that were measured; those with a reference also as log2 of the ratio to it."""
    values, columns = measurement.values, {}
    for quantity in ("update_natural", "weight_natural", *requested):
        is_update = quantity == "update_natural"  # without a reference, updates are compared with their median
        ratios = vs_typical(measurement) if is_update else over_reference(measurement, quantity)
        if any(map(math.isfinite, ratios)):
            columns[log2_of(quantity)] = [log2_within(ratio, FAR) for ratio in ratios]
    columns |= {key: values[key].tolist() for key in dict.fromkeys((*essential_keys(), *requested)) if key in values}
    if measurement.is_corrected:
        columns["lr_multiplier"] = values["lr_multiplier"].tolist()
    return columns


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the lowest, the median (the lower one of two) and the highest finite value."""
    finite = sorted(filter(math.isfinite, values))
    if not finite:
        return {}
    spread = (finite[0], finite[(len(finite) - 1) // 2], finite[-1])
    return {f"{name}/{statistic}": value for statistic, value in zip(SPREAD, spread, strict=True)}


def _limits(measurement: Measurement) -> dict[str, float]:
    """Return the limits that most layers share, as log2, for charts of values over their references."""
    numbers = {}
    for quantity in ("update_natural", "weight_natural"):
        if quantity in measurement.values:
            for end, limit in zip(("low", "high"), limits(measurement, quantity), strict=True):
                if 0 < limit < math.inf:
                    numbers[f"{group(log2_of(quantity))}/{LIMITS}/{end}"] = math.log2(limit)
    return numbers


def _flagged(measurement: Measurement, groups: Groups) -> list[int]:
    """Return indices of layers that ever had a verdict and are not logged anyway, those that are off now first."""
    indices = {info.name: i for i, info in enumerate(measurement.layers)}
    names = sorted(measurement.flags, key=lambda name: -measurement.flags[name])
    flagged = [indices[name] for name in names if name in indices and indices[name] not in groups.singles]
    return flagged[:MAX_WITH_VERDICT]


def checked_log(log: object) -> Log:
    """Return the setting, checked.

    Raises:
        ValueError: it is neither ``"essential"``, ``"all"`` nor a list of patterns, or a pattern matches no quantity.
    """
    if log in ("essential", "all"):
        return log
    if isinstance(log, str) or not isinstance(log, Sequence) or not all(isinstance(item, str) for item in log):
        hint = f" (for one pattern pass a list: [{log!r}])" if isinstance(log, str) else ""
        raise ValueError(f"log must be 'essential', 'all' or a list of patterns, got {log!r}{hint}")
    for pattern in log:
        quantity = pattern.partition("/")[0]
        if not any(fnmatchcase(key, quantity) for key in QUANTITIES):
            hint = did_you_mean(quantity, QUANTITIES) or f"; valid ones: {', '.join(QUANTITIES)}"
            raise ValueError(f"log: {pattern!r} begins with no quantity, as in 'feature_change/*'{hint}")
    return tuple(log)
