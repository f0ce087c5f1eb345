"""The numbers that loggers are given: few enough for a deep network, chosen to answer the questions of the panels.

Every number is in the file of a run. Of each essential quantity a logger gets every matrix of a small network. Of a
deep one it gets the lowest, the median and the highest of all matrices, and of each family (the same place in each
block). Layers without a family, and layers that have had a verdict, come one by one. That is at most 600 numbers a
measured step.
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
"""Numbers of the whole network that are logged."""
LOG2 = "vs_typical_log2"
"""Logarithm to base 2 of a value over a typical one: 0 is typical, 3 is 8 times as large."""
FAR = 24.0
"""Powers of two: a value that is further from typical, such as 0, is logged as that."""
ALL, LIMITS = "all", "limits"
"""In the place of a layer: all matrices together; the limits that most of them share."""
SPREAD = ("lowest", "median", "highest")
OVERLAID = (
    *(f"{LOG2}/{ALL}/highest", f"{LOG2}/{ALL}/lowest", f"update_ratio/{ALL}/median"),
    *(f"feature_change/{ALL}/median", f"feature_change/{ALL}/highest", f"weight_natural/{ALL}/highest"),
    *(f"drift_ratio/{ALL}/median", f"bfa_cos/{ALL}/median", f"update_stable_rank/{ALL}/median"),
)
"""Numbers that have the same key in every network, so that runs of different networks can be laid over each other."""
MAX_LAYERS_ONE_BY_ONE = 16
"""Matrices of a network in which each is logged."""
MAX_FAMILIES, MAX_SINGLES, MAX_WITH_VERDICT = 12, 20, 8
"""Families, layers without one, and layers that have had a verdict, that are logged at most."""


def essential_keys() -> tuple[str, ...]:
    """Return the quantities that are logged by default; the update's size is logged against its typical value."""
    return tuple(key for key, quantity in QUANTITIES.items() if quantity.essential)


def group(quantity: str) -> str:
    """Return the part of a key before the layer, which loggers make a section of.

    Example:
        >>> group("feature_change")
        'spectral_feature_change'
    """
    return f"{PREFIX}_{quantity}"


def log2_of(quantity: str) -> str:
    """Return what a quantity against its typical value is called.

    Example:
        >>> log2_of("update_natural"), log2_of("weight_natural")
        ('vs_typical_log2', 'weight_natural_vs_typical_log2')
    """
    return LOG2 if quantity == "update_natural" else f"{quantity}_{LOG2}"


def family_key(family: str) -> str:
    """Return what a family is called in a key, in which W&B and MLflow take no ``*``.

    Example:
        >>> family_key("h.*.mlp.c_fc")
        'h.N.mlp.c_fc'
    """
    return family.replace("*", "N")


@dataclass(frozen=True)
class Groups:
    """Groups of matrices as they are logged."""

    matrices: tuple[int, ...]  # places of all
    families: dict[str, tuple[int, ...]]  # name -> places; none in a small network
    singles: tuple[int, ...]  # places of those that are logged one by one


@lru_cache(maxsize=8)  # the layers are the same at every measurement
def grouped(layers: tuple[LayerInfo, ...]) -> Groups:
    """Return how the matrices of a network are logged.

    Example:
        >>> layers = tuple(LayerInfo(f"h.{i}.mlp", "operator", 8, 8, (8, 8)) for i in range(20))
        >>> list(grouped(layers).families), grouped(layers[:3]).singles
        (['h.*.mlp'], (0, 1, 2))
    """
    matrices = tuple(i for i, info in enumerate(layers) if info.is_matrix)
    if len(matrices) <= MAX_LAYERS_ONE_BY_ONE:
        return Groups(matrices, {}, matrices)
    found = families_of([layers[i].name for i in matrices])
    alone = found.pop(OTHERS, [])
    # The largest families; layers of the others are single ones, and if those are many, a family of their own.
    most = sorted(found, key=lambda name: -len(found[name]))
    alone = sorted([*alone, *(k for name in most[MAX_FAMILIES:] for k in found[name])])
    families = {name: found[name] for name in found if name in most[:MAX_FAMILIES]}
    if len(alone) > MAX_SINGLES:
        families, alone = {**families, OTHERS: alone}, []
    placed = {name: tuple(matrices[k] for k in places) for name, places in families.items()}
    return Groups(matrices, placed, tuple(matrices[k] for k in alone))


def essentials(measurement: Measurement, log: Log = "essential", asked: Sequence[str] = ()) -> dict[str, float]:
    """Return what a logger is given of a measurement, key -> finite number.

    Args:
        log: ``"essential"``; ``"all"`` for every number too, under :meth:`Measurement.scalars`'s keys; or patterns on
            ``<quantity>/<layer>`` of single numbers that are given besides.
        asked: quantities that a user has named, which are essential then.
    """
    groups, columns = grouped(measurement.layers), _columns(measurement, asked)
    names = [info.name for info in measurement.layers]
    told = _told(measurement, groups)
    nodes = [i for i, info in enumerate(measurement.layers) if info.role == NODE]
    found = {}
    for key, values in columns.items():
        for i in (*groups.singles, *nodes, *told):
            found[f"{group(key)}/{names[i]}"] = values[i]
        for family, places in groups.families.items():
            found |= _spread(f"{group(key)}/{family_key(family)}", [values[i] for i in places])
        every = _spread(f"{group(key)}/{ALL}", [values[i] for i in groups.matrices])
        if not groups.families:
            every = {name: value for name, value in every.items() if name.removeprefix(f"{PREFIX}_") in OVERLAID}
        found |= every
    found |= _limits(measurement)
    found |= {f"{PREFIX}/summary/{key}": measurement.summary.get(key, math.nan) for key in SUMMARIES}
    if log == "all":
        found = measurement.scalars(PREFIX) | found
    elif log != "essential":
        for key, column in measurement.values.items():
            for name, value in zip(names, column.tolist(), strict=True):
                if matches(log, f"{key}/{name}"):
                    found[f"{group(key)}/{name}"] = value
    return {key: value for key, value in found.items() if math.isfinite(value)}


def overall(measurement: Measurement) -> dict[str, float]:
    """Return the numbers that are about the network as a whole: they have the same keys in every network."""
    found = essentials(measurement)
    return {key: value for key, value in found.items() if key.startswith(f"{PREFIX}/summary/") or f"/{ALL}/" in key}


def _columns(measurement: Measurement, asked: Sequence[str]) -> dict[str, list[float]]:
    """Return the essential quantities that were measured, and what is compared with something as its log2."""
    values, columns = measurement.values, {}
    for quantity in ("update_natural", "weight_natural", *asked):
        typical = quantity == "update_natural"  # which is held against the median where it has no reference
        ratios = vs_typical(measurement) if typical else over_reference(measurement, quantity)
        if any(map(math.isfinite, ratios)):
            columns[log2_of(quantity)] = [log2_within(ratio, FAR) for ratio in ratios]
    columns |= {key: values[key].tolist() for key in dict.fromkeys((*essential_keys(), *asked)) if key in values}
    if "lr_multiplier" in values and bool(((values["lr_multiplier"] - 1).abs() > 0).any()):
        columns["lr_multiplier"] = values["lr_multiplier"].tolist()
    return columns


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the lowest, the median (the lower one of two) and the highest of what is finite."""
    known = sorted(value for value in values if math.isfinite(value))
    if not known:
        return {}
    chosen = (known[0], known[(len(known) - 1) // 2], known[-1])
    return {f"{name}/{which}": value for which, value in zip(SPREAD, chosen, strict=True)}


def _limits(measurement: Measurement) -> dict[str, float]:
    """Return the limits that most layers share, for charts of what is compared."""
    found = {}
    for quantity in ("update_natural", "weight_natural"):
        ends = limits(measurement, quantity) if quantity in measurement.values else (math.nan, math.nan)
        for end, limit in zip(("low", "high"), ends, strict=True):
            if 0 < limit < math.inf:
                found[f"{group(log2_of(quantity))}/{LIMITS}/{end}"] = math.log2(limit)
    return found


def _told(measurement: Measurement, groups: Groups) -> list[int]:
    """Return places of layers that have had a verdict and are not logged anyway, those that are off first."""
    place = {info.name: i for i, info in enumerate(measurement.layers)}
    ever = sorted(measurement.flags, key=lambda name: -measurement.flags[name])
    found = [place[name] for name in ever if name in place and place[name] not in groups.singles]
    return found[:MAX_WITH_VERDICT]


def checked_log(log: object) -> Log:
    """Return what to log.

    Raises:
        ValueError: neither ``"essential"``, ``"all"`` nor a list of patterns, or one that can match no quantity.
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
