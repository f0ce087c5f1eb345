"""Limits of layers at infinite width: of a sweep, by a twin or extrapolated from the widths; of a run, by a twin."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from spectral_monitor.fitting.extrapolation import extrapolate
from spectral_monitor.fitting.power_law import Fit, fit_slope
from spectral_monitor.measurement import Measurement
from spectral_monitor.parametrization.rules import Parametrization
from spectral_monitor.scaling.batches import SweepError
from spectral_monitor.scaling.sweeps.point import Point, RunKey, SweepConfig
from spectral_monitor.scaling.sweeps.slope import Slope

if TYPE_CHECKING:
    from spectral_monitor.scaling.sweeps.result import SweepResult

How = Literal["exact", "extrapolated"]
FLAT = 0.1
"""Slopes beyond this, with their whole interval, belong to quantities without a limit."""


@dataclass(frozen=True)
class WidthLimit:
    """One quantity of one layer at infinite width, and the distance of single networks from it."""

    layer: str
    quantity: str
    value: float = math.nan  # at infinite width, mean over seeds; NaN where there is none
    # lower end of the 95 % interval of an extrapolated value; the value itself where it is exact
    low: float = math.nan
    high: float = math.nan  # the same of the upper end
    # width -> relative distance of the mean over seeds from it
    distances: Mapping[int, float] = field(default_factory=dict)
    # what the mean distance of single networks goes like; -1/2 is expected
    fit: Fit = field(default_factory=lambda: Fit(reason="no values"))
    reason: str = ""  # why there is no value; empty if there is one

    @property
    def sentence(self) -> str:
        """The distance of the widest networks from the limit, in words.

        Example:
            >>> WidthLimit("0", "feature_change", 0.5, 0.5, 0.5, {64: 0.1, 512: 0.037}).sentence
            'at width 512 feature_change of 0 is within 4 % of its limit'
        """
        if self.reason:
            return f"{self.quantity} of {self.layer} has no limit: {self.reason}"
        width = max(self.distances)
        percent = math.ceil(100 * self.distances[width])
        return f"at width {width} {self.quantity} of {self.layer} is within {percent} % of its limit"


def checked_limit(limit: How | None, axis: str, recipe: SweepConfig, depths: Any) -> How | None:
    """Return how limits are found.

    Raises:
        SweepError: another word, or a sweep that has no such limits.
    """
    if limit is None:
        return None
    if limit not in get_args(How):
        raise SweepError(f"limit must be 'exact' or 'extrapolated', got {limit!r}")
    if axis != "width" or depths is not None:
        raise SweepError("limit= is for sweeps over widths, without depths=")
    if limit == "exact" and (recipe.parametrization is None or recipe.family != "sgd"):
        raise SweepError("limit='exact' needs parametrization= and optimizer='sgd': Adam has no exact limit here")
    if limit == "exact" and recipe.processes_per_point > 1:
        raise SweepError("limit='exact' reads the network in this process, and processes_per_point= is more than 1")
    return limit


def exact_points(recipe: SweepConfig, width: int, seeds: Sequence[int]) -> dict[int, Point | str]:
    """Return seed -> a twin trained on its data and measured by the same probe, or why there is no limit.

    ``width``: of a module to read the shapes from.

    Raises:
        SweepError: the module has no exact limit.
    """
    from spectral_monitor.limits.scales import NoLimitError
    from spectral_monitor.limits.twin import twin_inside

    parametrization, lr, held = recipe.parametrization, recipe.lr, dict[str, Any]()
    assert parametrization is not None
    assert lr is not None

    def make(_: int) -> nn.Module:
        module, held["twin"] = twin_inside(recipe.make_module(width), parametrization, lr)
        return module

    def optimizer(_: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(held["twin"].param_groups, lr=lr)

    try:
        make(width)
    except NoLimitError as error:
        return dict.fromkeys(seeds, str(error))
    except ValueError as error:
        raise SweepError(str(error)) from error
    at_infinity = replace(
        recipe, make_module=make, parametrization=None, optimizer=optimizer, lr=None, measured=list(recipe.at)
    )
    found: dict[int, Point | str] = {}
    for seed in seeds:
        point = at_infinity.train(RunKey(width, None, seed))
        found[seed] = replace(point, measurements=tuple(map(held["twin"].measurement, point.measurements)))
    return found


def limit_of(result: SweepResult, slope: Slope) -> WidthLimit:
    """Return the limit of the layer and quantity that a slope of a sweep is of."""
    layer, quantity, seeds = slope.layer, slope.quantity, list(dict.fromkeys(key.seed for key in result.keys))
    found = {(p.key.width, p.key.seed): _value(p, result.step, quantity, layer) for p in result.points if not p.failure}
    rows = {seed: [found.get((width, seed), math.nan) for width in slope.sizes] for seed in seeds}
    if result.limit == "exact":
        whys = {why for why in result.exact.values() if isinstance(why, str)}
        if whys:
            return WidthLimit(layer, quantity, reason=whys.pop())
        goals = {s: _value(p, result.step, quantity, layer) for s, p in result.exact.items() if isinstance(p, Point)}
        value = low = high = math.fsum(goals.values()) / len(goals)
        if math.isnan(value):
            point = next(p for p in result.exact.values() if isinstance(p, Point))
            measured = point.at(result.step)
            why = "" if measured is None else measured.why(quantity, layer)
            return WidthLimit(layer, quantity, reason=why or point.failure or "no value at infinite width")
    else:
        if not slope.fit.reason and (slope.fit.low > FLAT or slope.fit.high < -FLAT):
            return WidthLimit(layer, quantity, reason=f"it {slope.behaviour}")
        fitted = extrapolate(slope.sizes, list(rows.values()))
        if fitted.reason:
            return WidthLimit(layer, quantity, reason=fitted.reason)
        goals, value, low, high = dict.fromkeys(seeds, fitted.value), fitted.value, fitted.low, fitted.high
    apart = [[abs(q - goals[seed]) for q in row] for seed, row in rows.items()]
    means = {}
    for place, width in enumerate(slope.sizes):
        known = [row[place] - goals[seed] for seed, row in rows.items() if math.isfinite(row[place])]
        if known and value:
            means[width] = abs(math.fsum(known) / len(known) / value)
    if not means:
        return WidthLimit(layer, quantity, reason="no values")
    return WidthLimit(layer, quantity, value, low, high, means, fit_slope(slope.sizes, apart))


def _value(point: Point, step: int, quantity: str, layer: str) -> float:
    """Return a value; NaN where the layer was not measured."""
    measurement = point.at(step)
    if measurement is None or layer not in {info.name for info in measurement.layers}:
        return math.nan
    return measurement.value(quantity, layer)


def limit_sentences(result: SweepResult) -> list[str]:
    """Return one sentence for each quantity, of the layer that is farthest from its limit, and of those without one."""
    said = []
    for quantity in result.recipe.quantities:
        some = [limit for (_, of), limit in result.limits.items() if of == quantity]
        known = [limit for limit in some if not limit.reason]
        if known:
            said.append(max(known, key=lambda limit: limit.distances[max(limit.distances)]).sentence)
        reasons = list(dict.fromkeys(limit.reason for limit in some if limit.reason))
        if reasons:
            said.append(f"no limit of {quantity} in {len(some) - len(known)} of {len(some)} layers: {reasons[0]}")
    return said


def reference_run(
    make_module: Callable[[int], nn.Module],
    data: Any,
    *,
    parametrization: Parametrization,
    lr: float,
    steps: int,
    measured: Sequence[int] | None = None,
    quantities: str | Sequence[str] = "standard",
    seed: int = 0,
) -> list[Measurement]:
    """Return what the probe would measure on a module of infinite width in the first steps of SGD.

    Args:
        make_module: from a width to a module, as for :func:`~spectral_monitor.scaling.sweep`: an ``nn.Sequential`` of
            two linear layers, with or without an activation such as ``nn.Tanh`` between them. Or a module around one
            that has all its parameters and returns the loss.
        data: as for ``sweep``; for the order of your training give its batches as a list.
        parametrization: with maximal updates, such as ``MUP``.
        lr: the learning rate that the parametrization's factors multiply.
        steps: of SGD.
        measured: which of them; by default the first and the last.
        quantities: as for the probe.
        seed: of the data's order.

    Raises:
        ValueError: another module, a parametrization without this limit, data or numbers that do not fit.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from spectral_monitor.scaling import MUP
        >>> class Net(nn.Module):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.net = nn.Sequential(nn.Linear(2, width, bias=False), nn.Linear(width, 1, bias=False))
        ...     def forward(self, x, y):
        ...         return (self.net(x) - y).square().mean()
        >>> x = torch.eye(2)
        >>> (line,) = reference_run(Net, (x, x[:, :1]), parametrization=MUP, lr=0.1, steps=1, quantities="light")
        >>> round(line.value("weight_natural", "net.0"), 2)
        1.0
    """
    recipe = SweepConfig(make_module, data, steps, quantities, measured, parametrization, "sgd", lr)
    (point,) = exact_points(recipe, 8, [seed]).values()
    if isinstance(point, str):
        raise SweepError(point)
    if point.failure:
        raise SweepError(f"the limit cannot be followed: {point.failure}")
    return list(point.measurements)
