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
from spectral_monitor.scaling.sweeps.limit import LimitMethod, WidthLimit, limit_of
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
        slopes: one for each layer and quantity (and for each depth, where widths are swept at several).
        excluded: points that are left out as a whole, with the reason.
        axis: ``"width"`` or ``"depth"``: the horizontal axis of slopes.
        step: the optimizer step whose values are fitted.
        recipe: how the networks were trained.
        keys: width, depth and seed of every point of the sweep, missing ones included.
        limit: how limits of infinite width are found, ``"exact"`` or ``"extrapolated"``; ``None`` for not at all.
        exact: seed -> network at infinite width, or the reason why there is none.
    """

    points: tuple[Point, ...]
    slopes: tuple[Slope, ...]
    excluded: tuple[str, ...]
    axis: Axis
    step: int
    recipe: SweepConfig
    keys: tuple[RunKey, ...]
    limit: LimitMethod | None = None
    exact: Mapping[int, Point | str] = field(default_factory=dict)

    @cached_property
    def limits(self) -> dict[tuple[str, str], WidthLimit]:
        """(layer, quantity) -> its limit of infinite width; empty without ``limit=``."""
        return {} if self.limit is None else {(s.layer, s.quantity): limit_of(self, s) for s in self.slopes}

    @property
    def off(self) -> tuple[Slope, ...]:
        """The slopes that are not as predicted, or without predictions not flat; the farthest off first."""
        any_predicted = any(not math.isnan(slope.predicted) for slope in self.slopes)
        verdicts = ("not as predicted",) if any_predicted else ("grows", "vanishes")
        return tuple(sorted((s for s in self.slopes if s.verdict in verdicts), key=lambda slope: -slope.distance))

    def at(self, step: int) -> SweepResult:
        """Return the result of the same networks at another measured step.

        Raises:
            ValueError: the step was not measured; the message lists those that were.
        """
        if step not in self.recipe.measured_steps:
            raise ValueError(
                f"step {step} was not measured; measured: {', '.join(map(str, self.recipe.measured_steps))}"
            )
        result = evaluated(self.recipe, self.keys, self.points, self.axis, step)
        return replace(result, limit=self.limit, exact=self.exact)

    def table(self) -> str:
        """Return the answer in one line, then a row for each layer and quantity, offenders first."""
        return str(sweep_table(self))

    def figure(self) -> Figure:
        """Draw a panel for each quantity, with its layers against width on log-log axes.

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
    """Return the slopes at a step; points that are missing or cannot be used are listed in ``excluded``."""
    by_key = {point.key: point for point in points}
    slopes: list[Slope] = []
    excluded: list[str] = []
    for other_size in dict.fromkeys(_split(key, axis)[1] for key in keys):
        group_keys = [key for key in keys if _split(key, axis)[1] == other_size]
        group = _Group(axis, other_size, group_keys, by_key, step)
        slopes += [group.slope(recipe, layer, quantity) for layer in group.layers for quantity in recipe.quantities]
        excluded += group.excluded
    trained = tuple(by_key[key] for key in keys if key in by_key)
    return SweepResult(trained, tuple(slopes), tuple(excluded), axis, step, recipe, tuple(keys))


def _split(key: RunKey, axis: str) -> tuple[int, int | None]:
    """Return the size of a point along the axis, and the other one."""
    if axis == "width":
        return key.width, key.depth
    assert key.depth is not None
    return key.depth, key.width


class _Group:
    """The points that slopes go through: all sizes along the axis and all seeds, at one depth (or width)."""

    def __init__(
        self, axis: Axis, other_size: int | None, keys: Sequence[RunKey], points: Mapping[RunKey, Point], step: int
    ) -> None:
        self.axis, self.other_size, self.step = axis, other_size, step
        self.sizes = tuple(sorted({_split(key, axis)[0] for key in keys}))
        self.seeds = tuple(dict.fromkeys(key.seed for key in keys))
        self.excluded: list[str] = []
        self.measurements: dict[tuple[int, int], Measurement] = {}  # (size, seed) -> measurement of the step
        self.positions: dict[int, Mapping[str, LayerPosition]] = {}
        self.infos: dict[int, tuple[LayerInfo, ...]] = {}
        for key in keys:
            point, size = points.get(key), _split(key, axis)[0]
            measurement = None if point is None else point.at(step)
            if point is None or point.failure or measurement is None:
                reason = "not trained yet" if point is None else point.failure or f"step {step} was not measured"
                self.excluded.append(f"{key}: {reason}")
            else:
                self.measurements[size, key.seed] = measurement
                self.positions.setdefault(size, point.places)
                self.infos.setdefault(size, measurement.layers)
        self.predictions: dict[tuple[str, tuple[int, ...]], dict[str, float]] = {}
        self._drop_duplicates()
        self.names = labels(self.infos, axis)
        self.layers = list(dict.fromkeys(label for size in reversed(self.sizes) for label in self.names.get(size, {})))

    def _drop_duplicates(self) -> None:
        """Leave out a size at which all shapes are those of a smaller one."""
        smallest: dict[tuple[Any, ...], int] = {}  # shapes -> the smallest size that has them
        for size, infos in sorted(self.infos.items()):
            shapes = tuple((info.name, info.shape) for info in infos)
            if shapes in smallest:
                self.excluded.append(f"{self.axis} {size}: all shapes are as at {self.axis} {smallest[shapes]}")
                self.measurements = {key: m for key, m in self.measurements.items() if key[0] != size}
                del self.infos[size]
            smallest.setdefault(shapes, size)

    def slope(self, recipe: SweepConfig, layer: str, quantity: str) -> Slope:
        """Return the slope of one layer and quantity, or the reason why there is none."""
        keys = [(size, seed) for seed in self.seeds for size in self.sizes]
        values = {key: self._value(*key, layer, quantity) for key in keys}
        reasons = {key: reason for key, (_, reason) in values.items() if reason}
        excluded = self._exclusions(reasons)
        finite = [value for value, _ in values.values() if not math.isnan(value)]
        sign = -1.0 if finite and max(finite) < 0 else 1.0
        rows = [[sign * values[size, seed][0] for size in self.sizes] for seed in self.seeds]
        if finite and min(finite) < 0 < max(finite):
            fit = Fit(reason="it is positive at some points and negative at others")
        else:
            fit = fit_slope(self.sizes, rows)
        if not finite:
            excluded = []
            distinct = set(reasons.values())
            fit = replace(fit, reason=distinct.pop() if len(distinct) == 1 else "no values")
        for i, seed in enumerate(self.seeds):
            if fit.seeds and i not in fit.seeds:
                excluded.append(f"seed {seed}: values at too few {self.axis}s")
        fitted_rows = [rows[i] for i in fit.seeds] or rows
        columns = [[row[i] for row in fitted_rows if not math.isnan(row[i])] for i in range(len(self.sizes))]
        fitted_sizes = [size for size, column in zip(self.sizes, columns, strict=True) if column]
        return Slope(
            layer=layer,
            quantity=quantity,
            axis=self.axis,
            beside=self.other_size,
            sizes=self.sizes,
            values=tuple(sign * _geometric_mean(column) for column in columns),
            least=tuple(sign * min(column, default=math.nan) for column in columns),
            most=tuple(sign * max(column, default=math.nan) for column in columns),
            fit=fit,
            predicted=self._predicted(recipe, layer, quantity, fitted_sizes),
            excluded=tuple(excluded),
            note=self._note(layer),
        )

    def _exclusions(self, reasons: Mapping[tuple[int, int], str]) -> list[str]:
        """Return excluded values with reasons, in words; all seeds of a size at once where they share the reason."""
        sentences: list[str] = []
        for size in self.sizes:
            by_seed = {seed: reasons[size, seed] for seed in self.seeds if (size, seed) in reasons}
            distinct = set(by_seed.values())
            if len(distinct) == 1 and all(
                seed in by_seed or (size, seed) not in self.measurements for seed in self.seeds
            ):
                sentences.append(f"{self.axis} {size}: {distinct.pop()}")
            else:
                sentences += [f"{self.axis} {size}, seed {seed}: {reason}" for seed, reason in by_seed.items()]
        return sentences

    def _value(self, size: int, seed: int, layer: str, quantity: str) -> tuple[float, str]:
        """Return a value, or NaN with the reason; without one where the whole point is excluded."""
        measurement = self.measurements.get((size, seed))
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
        """Return a note on widths at which the layer has one shape; other layers may still change its behaviour."""
        if self.axis != "width":
            return ""
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for size, infos in sorted(self.infos.items()):
            shape = next((info.shape for info in infos if info.name == self.names[size].get(layer)), None)
            if shape is not None:
                by_shape.setdefault(shape, []).append(size)
        if len(by_shape) == 1 and len(self.sizes) > 1:
            return "its shape does not change with the width"
        groups = [" and ".join(map(str, sizes)) for sizes in by_shape.values() if len(sizes) > 1]
        return f"of one shape at widths {', '.join(groups)}" if groups else ""

    def _predicted(self, recipe: SweepConfig, layer: str, quantity: str, sizes: Sequence[int]) -> float:
        if recipe.parametrization is None or len(sizes) < 2:
            return math.nan
        key = (quantity, tuple(sizes))  # one prediction serves all layers
        if key not in self.predictions:
            labelled = [self._labelled(size) for size in sizes]
            self.predictions[key] = predict(
                recipe.parametrization,
                cast(Family, recipe.family),
                quantity,
                sizes,
                [infos for infos, _ in labelled],
                [positions for _, positions in labelled],
                axis=self.axis,
                start=self.step == 1,
            )
        return self.predictions[key].get(layer, math.nan)

    def _labelled(self, size: int) -> tuple[list[LayerInfo], dict[str, LayerPosition]]:
        """Return the layers of a size and their positions; against depth only those with labels, under these."""
        infos, positions = self.infos[size], self.positions[size]
        if self.axis == "width":
            return list(infos), dict(positions)
        label_of = {name: label for label, name in self.names[size].items()}
        return (
            [replace(info, name=label_of[info.name]) for info in infos if info.name in label_of],
            {label: positions[name] for name, label in label_of.items() if name in positions},
        )


def _geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean; NaN without values and if any is not positive."""
    return statistics.geometric_mean(values) if values and min(values) > 0 else math.nan


def labels(infos: Mapping[int, Sequence[LayerInfo]], axis: str) -> dict[int, dict[str, str]]:
    """Return, for each size, label -> name of the layer at that size.

    Biases and gains are left out, unless there is nothing else. Against width, labels are names. Against depth, the
    number of layers changes: of those whose names differ only by a number, the first, middle and last are followed.

    Example:
        >>> def layers(count):
        ...     return [LayerInfo(f"net.{i}", "operator", 8, 8, (8, 8)) for i in range(count)]
        >>> labels({3: layers(3), 5: layers(5)}, "depth")[5]
        {'net.* (first)': 'net.0', 'net.* (middle)': 'net.2', 'net.* (last)': 'net.4'}
    """
    matrices = {size: [i.name for i in layers if i.is_matrix] for size, layers in infos.items()}
    names = {size: matrices[size] or [info.name for info in layers] for size, layers in infos.items()}
    if axis == "width":
        return {size: {name: name for name in layers} for size, layers in names.items()}
    by_family = {size: _by_family(layers) for size, layers in names.items()}
    repeated = {family for families in by_family.values() for family, layers in families.items() if len(layers) > 1}
    return {size: _followed(families, repeated) for size, families in by_family.items()}


def _by_family(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the layers by family; a layer without a number in its name is a family by itself."""
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(family_of(name, alone=name), []).append(name)
    return families


def _followed(families: Mapping[str, Sequence[str]], repeated: set[str]) -> dict[str, str]:
    """Return label -> layer: of a family with several layers at any size, the first, the middle one and the last."""
    followed: dict[str, str] = {}
    for family, names in families.items():
        if family not in repeated:
            followed[names[0]] = names[0]
            continue
        followed[f"{family} (first)"] = names[0]
        if len(names) > 2:
            followed[f"{family} (middle)"] = names[len(names) // 2]
        followed[f"{family} (last)"] = names[-1]
    return followed
