"""The result of a sweep: how every quantity of every layer scales with the width or the depth."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from spectral_monitor.fitting.power_law import Fit, fit_slope
from spectral_monitor.measurement import LayerInfo, Measurement
from spectral_monitor.parametrization.layer_position import LayerPosition
from spectral_monitor.parametrization.param_groups import Family
from spectral_monitor.parametrization.prediction import Axis, predict
from spectral_monitor.reporting.content.families import family_of
from spectral_monitor.scaling.sweeps.figure import sweep_figure
from spectral_monitor.scaling.sweeps.limit import How, WidthLimit, limit_of
from spectral_monitor.scaling.sweeps.point import Point, RunKey, SweepConfig
from spectral_monitor.scaling.sweeps.slope import Slope
from spectral_monitor.scaling.sweeps.table import sweep_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class SweepResult:
    """The result of :func:`~spectral_monitor.scaling.sweep`; ``print`` it.

    Attributes:
        points: every network that was trained, with its measurements.
        slopes: one for each layer and quantity (and depth, where there are several beside widths).
        excluded: points that are left out as a whole, with the reason.
        axis: ``"width"`` or ``"depth"``, what slopes are against.
        step: the optimizer step that slopes are of.
        recipe: how the networks were trained.
        keys: width, depth and seed of every point there should be.
        limit: how limits of infinite width are found, ``"exact"`` or ``"extrapolated"``; ``None`` for not at all.
        exact: seed -> what its networks are at infinite width, or why they have no limit.
    """

    points: tuple[Point, ...]
    slopes: tuple[Slope, ...]
    excluded: tuple[str, ...]
    axis: Axis
    step: int
    recipe: SweepConfig
    keys: tuple[RunKey, ...]
    limit: How | None = None
    exact: Mapping[int, Point | str] = field(default_factory=dict)

    @cached_property
    def limits(self) -> dict[tuple[str, str], WidthLimit]:
        """(layer, quantity) -> its limit of infinite width; empty where none was asked for."""
        return {} if self.limit is None else {(s.layer, s.quantity): limit_of(self, s) for s in self.slopes}

    @property
    def off(self) -> tuple[Slope, ...]:
        """The slopes that are wrong, the farthest off first: against the prediction, or without one against flat."""
        foretold = any(not math.isnan(slope.predicted) for slope in self.slopes)
        verdicts = ("not as predicted",) if foretold else ("grows", "vanishes")
        return tuple(sorted((s for s in self.slopes if s.verdict in verdicts), key=lambda slope: -slope.distance))

    def at(self, step: int) -> SweepResult:
        """Return the same networks at another step that was measured.

        Raises:
            ValueError: it was not, with those that were.
        """
        if step not in self.recipe.at:
            raise ValueError(f"step {step} was not measured; measured: {', '.join(map(str, self.recipe.at))}")
        found = evaluated(self.recipe, self.keys, self.points, self.axis, step)
        return replace(found, limit=self.limit, exact=self.exact)

    def table(self) -> str:
        """Return one line that answers, then a row for each layer and quantity, offenders first."""
        return str(sweep_table(self))

    def figure(self) -> Figure:
        """Draw a panel for each quantity, its layers against width on log-log axes.

        Raises:
            ModuleNotFoundError: matplotlib is not installed (``pip install spectral-monitor[plots]``).
        """
        return sweep_figure(self)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one plain dict for each slope, in the order of the network."""
        return [slope.to_row() for slope in self.slopes]

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"SweepResult({len(self.points)} points, {len(self.slopes)} slopes against {self.axis})"


def evaluated(
    recipe: SweepConfig, keys: Sequence[RunKey], points: Iterable[Point], axis: Axis, step: int
) -> SweepResult:
    """Return the slopes at a step, of all the points there should be; missing ones are named."""
    found = {point.key: point for point in points}
    slopes: list[Slope] = []
    excluded: list[str] = []
    for beside in dict.fromkeys(_split(key, axis)[1] for key in keys):
        some = [key for key in keys if _split(key, axis)[1] == beside]
        group = _Group(axis, beside, some, {key: found[key] for key in some if key in found}, step)
        slopes += [group.slope(recipe, layer, quantity) for layer in group.layers for quantity in recipe.quantities]
        excluded += group.excluded
    present = tuple(found[key] for key in keys if key in found)
    return SweepResult(present, tuple(slopes), tuple(excluded), axis, step, recipe, tuple(keys))


def _split(key: RunKey, axis: str) -> tuple[int, int | None]:
    """Return the size of a point along the axis, and the other one."""
    if axis == "width":
        return key.width, key.depth
    assert key.depth is not None
    return key.depth, key.width


class _Group:
    """The points that slopes go through: all sizes and seeds, one depth (or width)."""

    def __init__(
        self, axis: Axis, beside: int | None, keys: Sequence[RunKey], points: Mapping[RunKey, Point], step: int
    ) -> None:
        self.axis, self.beside, self.step = axis, beside, step
        self.sizes = tuple(sorted({_split(key, axis)[0] for key in keys}))
        self.seeds = tuple(dict.fromkeys(key.seed for key in keys))
        self.excluded: list[str] = []
        self.used: dict[tuple[int, int], Measurement] = {}
        self.places: dict[int, Mapping[str, LayerPosition]] = {}
        self.infos: dict[int, tuple[LayerInfo, ...]] = {}
        for key in keys:
            point, size = points.get(key), _split(key, axis)[0]
            measurement = None if point is None else point.at(step)
            if point is None or point.failure or measurement is None:
                why = "not trained yet" if point is None else point.failure or f"step {step} was not measured"
                self.excluded.append(f"{key}: {why}")
            else:
                self.used[size, key.seed] = measurement
                self.places.setdefault(size, point.places)
                self.infos.setdefault(size, measurement.layers)
        self.predictions: dict[tuple[str, tuple[int, ...]], dict[str, float]] = {}
        self._drop_twins()
        self.names = labels(self.infos, axis)
        self.layers = list(dict.fromkeys(label for size in reversed(self.sizes) for label in self.names.get(size, {})))

    def _drop_twins(self) -> None:
        """Leave out a size at which all shapes are those of a smaller one."""
        seen: dict[tuple[Any, ...], int] = {}
        for size, infos in sorted(self.infos.items()):
            shapes = tuple((info.name, info.shape) for info in infos)
            if shapes in seen:
                self.excluded.append(f"{self.axis} {size}: all shapes are as at {self.axis} {seen[shapes]}")
                self.used = {at: m for at, m in self.used.items() if at[0] != size}
                del self.infos[size]
            seen.setdefault(shapes, size)

    def slope(self, recipe: SweepConfig, layer: str, quantity: str) -> Slope:
        """Return the slope of one layer and quantity, or why there is none."""
        found = {at: self._value(*at, layer, quantity) for at in ((x, seed) for seed in self.seeds for x in self.sizes)}
        reasons = {at: why for at, (_, why) in found.items() if why}
        excluded = self._left_out(reasons)
        finite = [value for value, _ in found.values() if not math.isnan(value)]
        sign = -1.0 if finite and max(finite) < 0 else 1.0
        rows = [[sign * found[size, seed][0] for size in self.sizes] for seed in self.seeds]
        if finite and min(finite) < 0 < max(finite):
            fit = Fit(reason="it is positive at some points and negative at others")
        else:
            fit = fit_slope(self.sizes, rows)
        if not finite:
            excluded = []
            whys = set(reasons.values())
            fit = replace(fit, reason=whys.pop() if len(whys) == 1 else "no values")
        for place, seed in enumerate(self.seeds):
            if fit.seeds and place not in fit.seeds:
                excluded.append(f"seed {seed}: values at too few {self.axis}s")
        shown = [rows[place] for place in fit.seeds] or rows
        columns = [[row[i] for row in shown if not math.isnan(row[i])] for i in range(len(self.sizes))]
        used = [size for size, column in zip(self.sizes, columns, strict=True) if column]
        return Slope(
            layer=layer,
            quantity=quantity,
            axis=self.axis,
            beside=self.beside,
            sizes=self.sizes,
            values=tuple(sign * _geometric_mean(column) for column in columns),
            least=tuple(sign * min(column, default=math.nan) for column in columns),
            most=tuple(sign * max(column, default=math.nan) for column in columns),
            fit=fit,
            predicted=self._predicted(recipe, layer, quantity, used),
            excluded=tuple(excluded),
            note=self._note(layer),
        )

    def _left_out(self, why: Mapping[tuple[int, int], str]) -> list[str]:
        """Return what is left out and why, in words; all seeds of a size at once where the reason is the same."""
        found: list[str] = []
        for size in self.sizes:
            here = {seed: why[size, seed] for seed in self.seeds if (size, seed) in why}
            reasons = set(here.values())
            if len(reasons) == 1 and all((size, seed) not in self.used or seed in here for seed in self.seeds):
                found.append(f"{self.axis} {size}: {reasons.pop()}")
            else:
                found += [f"{self.axis} {size}, seed {seed}: {reason}" for seed, reason in here.items()]
        return found

    def _value(self, size: int, seed: int, layer: str, quantity: str) -> tuple[float, str]:
        """Return a number, or NaN and why; no reason where the whole point is out."""
        measurement = self.used.get((size, seed))
        if measurement is None:
            return math.nan, ""
        name = self.names[size].get(layer)
        if name is None:
            return math.nan, "there is no such layer"
        value = measurement.value(quantity, name)
        if math.isnan(value):
            return math.nan, measurement.why(quantity, name) or "nan"
        if value == 0 or math.isinf(value):
            return math.nan, f"{value:g}"
        return value, ""

    def _note(self, layer: str) -> str:
        """Return the sizes that leave the layer's shape as it is; other layers may still change what it does."""
        if self.axis != "width":
            return ""
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for size, infos in sorted(self.infos.items()):
            shape = next((info.shape for info in infos if info.name == self.names[size].get(layer)), None)
            if shape is not None:
                by_shape.setdefault(shape, []).append(size)
        if len(by_shape) == 1 and len(self.sizes) > 1:
            return "its shape does not change with the width"
        same = [" and ".join(map(str, sizes)) for sizes in by_shape.values() if len(sizes) > 1]
        return f"of one shape at widths {', '.join(same)}" if same else ""

    def _predicted(self, recipe: SweepConfig, layer: str, quantity: str, sizes: Sequence[int]) -> float:
        if recipe.parametrization is None or len(sizes) < 2:
            return math.nan
        key = (quantity, tuple(sizes))  # one prediction is of all layers
        if key not in self.predictions:
            places = [self.places[size] for size in sizes]
            if self.axis == "depth" and not all(places):
                return math.nan  # points of older files have none
            named = [self._labelled(size) for size in sizes]
            self.predictions[key] = predict(
                recipe.parametrization,
                cast(Family, recipe.family),
                quantity,
                sizes,
                [infos for infos, _ in named],
                [placed for _, placed in named] if all(places) else None,
                axis=self.axis,
                start=self.step == 1,
            )
        return self.predictions[key].get(layer, math.nan)

    def _labelled(self, size: int) -> tuple[list[LayerInfo], dict[str, LayerPosition]]:
        """Return the layers of a size and their places: against depth those that have labels, by these."""
        infos, places = self.infos[size], self.places[size]
        if self.axis == "width":
            return list(infos), dict(places)
        label = {name: label for label, name in self.names[size].items()}
        followed = [info for info in infos if info.name in label]
        return (
            [replace(info, name=label[info.name]) for info in followed],
            {label[info.name]: places[info.name] for info in followed if info.name in places},
        )


def _geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean; NaN of nothing, and of values that are not all positive."""
    return statistics.geometric_mean(values) if values and min(values) > 0 else math.nan


def labels(infos: Mapping[int, Sequence[LayerInfo]], axis: str) -> dict[int, dict[str, str]]:
    """Return, for each size, label -> name of the layer there.

    Biases and gains are left out, unless there is nothing else.

    Against width a layer is what has its name. With depth their number changes: of those that differ by the number in
    their name alone the first, the middle one and the last are followed.

    Example:
        >>> def layers(count):
        ...     return [LayerInfo(f"net.{i}", "operator", 8, 8, (8, 8)) for i in range(count)]
        >>> labels({3: layers(3), 5: layers(5)}, "depth")[5]
        {'net.* (first)': 'net.0', 'net.* (middle)': 'net.2', 'net.* (last)': 'net.4'}
    """
    matrices = {size: [i.name for i in some if i.is_matrix] for size, some in infos.items()}
    names = {size: found or [info.name for info in infos[size]] for size, found in matrices.items()}
    if axis == "width":
        return {size: {name: name for name in some} for size, some in names.items()}
    by_family = {size: _by_family(some) for size, some in names.items()}
    several = {of for groups in by_family.values() for of, some in groups.items() if len(some) > 1}
    return {size: _followed(groups, several) for size, groups in by_family.items()}


def _by_family(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the layers by family; a layer without a number in its name is a family by itself."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(family_of(name, alone=name), []).append(name)
    return found


def _followed(groups: Mapping[str, Sequence[str]], several: set[str]) -> dict[str, str]:
    """Return label -> layer: of a family with several layers at any size, the first, the middle one and the last."""
    found: dict[str, str] = {}
    for of, names in groups.items():
        if of not in several:
            found[names[0]] = names[0]
            continue
        found[f"{of} (first)"] = names[0]
        if len(names) > 2:
            found[f"{of} (middle)"] = names[len(names) // 2]
        found[f"{of} (last)"] = names[-1]
    return found
