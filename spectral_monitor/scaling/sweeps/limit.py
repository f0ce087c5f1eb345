"""Limits at infinite width: by a twin of infinite width, or for sweeps also extrapolated from the widths."""

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

LimitMethod = Literal["exact", "extrapolated"]
MAX_FLAT_SLOPE = 0.1
"""A quantity has no limit if the whole interval of its slope is beyond this."""


@dataclass(frozen=True)
class WidthLimit:
    """One quantity of one layer at infinite width, and the distance of the networks from it."""

    layer: str
    quantity: str
    value: float = math.nan  # at infinite width, mean over seeds; NaN where there is none
    # lower end of the 95 % interval of an extrapolated value; the value itself where it is exact
    low: float = math.nan
    high: float = math.nan  # upper end of that interval
    # width -> distance of the mean over seeds from the limit, relative to it
    distances: Mapping[int, float] = field(default_factory=dict)
    # slope of the mean distance of single networks against width; -1/2 is expected
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


def check_limit(limit: LimitMethod | None, axis: str, recipe: SweepConfig, depths: Any) -> None:
    """Refuse limits that the sweep does not have.

    Raises:
        SweepError: an unknown method, or one that does not suit the sweep.
    """
    if limit is None:
        return
    if limit not in get_args(LimitMethod):
        raise SweepError(f"limit must be 'exact' or 'extrapolated', got {limit!r}")
    if axis != "width" or depths is not None:
        raise SweepError("limit= is for sweeps over widths, without depths=")
    if limit == "exact" and (recipe.parametrization is None or recipe.family != "sgd"):
        raise SweepError("limit='exact' needs parametrization= and optimizer='sgd': Adam has no exact limit here")
    if limit == "exact" and recipe.processes_per_point > 1:
        raise SweepError("limit='exact' reads the network in this process, and processes_per_point= is more than 1")


def exact_points(recipe: SweepConfig, width: int, seeds: Sequence[int]) -> dict[int, Point | str]:
    """Return seed -> a twin of infinite width trained on its data and measured, or the reason why there is no limit.

    ``width``: of the module whose shapes are read.

    Raises:
        SweepError: the module has no exact limit.
    """
    from spectral_monitor.limits.scales import NoLimitError
    from spectral_monitor.limits.twin import twin_inside

    parametrization, lr = recipe.parametrization, recipe.lr
    assert parametrization is not None
    assert lr is not None
    twin: Any = None  # of the latest module

    def make(_: int) -> nn.Module:
        nonlocal twin
        module, twin = twin_inside(recipe.make_module(width), parametrization, lr)
        return module

    def optimizer(_: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(twin.param_groups, lr=lr)

    try:
        make(width)
    except NoLimitError as error:
        return dict.fromkeys(seeds, str(error))
    except ValueError as error:
        raise SweepError(str(error)) from error
    at_infinity = replace(
        recipe,
        make_module=make,
        parametrization=None,
        optimizer=optimizer,
        lr=None,
        measured=list(recipe.measured_steps),
    )
    points: dict[int, Point | str] = {}
    for seed in seeds:
        point = at_infinity.train(RunKey(width, None, seed))
        points[seed] = replace(point, measurements=tuple(map(twin.measurement, point.measurements)))
    return points


def limit_of(result: SweepResult, slope: Slope) -> WidthLimit:
    """Return the limit of a slope's layer and quantity."""
    layer, quantity, seeds = slope.layer, slope.quantity, list(dict.fromkeys(key.seed for key in result.keys))
    points = {(p.key.width, p.key.seed): p for p in result.points if not p.failure}
    values = {key: _value(point, result.step, quantity, layer) for key, point in points.items()}
    rows = {seed: [values.get((width, seed), math.nan) for width in slope.sizes] for seed in seeds}
    if result.limit == "exact":
        reasons = {reason for reason in result.exact.values() if isinstance(reason, str)}
        if reasons:
            return WidthLimit(layer, quantity, reason=reasons.pop())
        twins = {seed: point for seed, point in result.exact.items() if isinstance(point, Point)}
        limits = {seed: _value(point, result.step, quantity, layer) for seed, point in twins.items()}
        value = low = high = math.fsum(limits.values()) / len(limits)
        if math.isnan(value):
            point = next(iter(twins.values()))
            measurement = point.at(result.step)
            reason = "" if measurement is None else measurement.why(quantity, layer)
            return WidthLimit(layer, quantity, reason=reason or point.failure or "no value at infinite width")
    else:
        if not slope.fit.reason and (slope.fit.low > MAX_FLAT_SLOPE or slope.fit.high < -MAX_FLAT_SLOPE):
            return WidthLimit(layer, quantity, reason=f"it {slope.behaviour}")
        fitted = extrapolate(slope.sizes, list(rows.values()))
        if fitted.reason:
            return WidthLimit(layer, quantity, reason=fitted.reason)
        limits, value, low, high = dict.fromkeys(seeds, fitted.value), fitted.value, fitted.low, fitted.high
    distances = {}
    for i, width in enumerate(slope.sizes):
        deviations = [row[i] - limits[seed] for seed, row in rows.items() if math.isfinite(row[i])]
        if deviations and value:
            distances[width] = abs(math.fsum(deviations) / len(deviations) / value)
    if not distances:
        return WidthLimit(layer, quantity, reason="no values")
    fit = fit_slope(slope.sizes, [[abs(q - limits[seed]) for q in row] for seed, row in rows.items()])
    return WidthLimit(layer, quantity, value, low, high, distances, fit)


def _value(point: Point, step: int, quantity: str, layer: str) -> float:
    """Return a value; NaN where the layer was not measured."""
    measurement = point.at(step)
    if measurement is None or layer not in {info.name for info in measurement.layers}:
        return math.nan
    return measurement.value(quantity, layer)


def limit_sentences(result: SweepResult) -> list[str]:
    """Return for each quantity a sentence on the layer farthest from its limit, and one on layers without a limit."""
    sentences = []
    for quantity in result.recipe.quantities:
        limits = [limit for limit in result.limits.values() if limit.quantity == quantity]
        reached = [limit for limit in limits if not limit.reason]
        if reached:
            sentences.append(max(reached, key=lambda limit: limit.distances[max(limit.distances)]).sentence)
        reasons = [limit.reason for limit in limits if limit.reason]
        if reasons:
            sentences.append(f"no limit of {quantity} in {len(reasons)} of {len(limits)} layers: {reasons[0]}")
    return sentences


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
        make_module: makes a module of a width, as for :func:`~spectral_monitor.scaling.sweep`: an ``nn.Sequential`` of
            two linear layers, with or without an activation such as ``nn.Tanh`` between them; or a module around one
            that holds all its parameters and returns the loss.
        data: as for ``sweep``; for the order of your training give its batches as a list.
        parametrization: with maximal updates, such as ``MUP``.
        lr: the learning rate that the parametrization's factors multiply.
        steps: of SGD.
        measured: the steps that are measured; by default the first and the last.
        quantities: as for the probe.
        seed: of the order of the data.

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
