"""Predictions of a parametrization: how every quantity of every layer scales with the width or the depth."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from spectral_monitor.measurement import DENSE, LayerInfo
from spectral_monitor.parametrization.layer_position import Kind, LayerPosition, kinds
from spectral_monitor.parametrization.param_groups import Family, check_family
from spectral_monitor.parametrization.rules import Parametrization, Scale

Axis = Literal["width", "depth"]
UNSTABLE = (
    *("feature_change", "feature_change_local", "feature_drift"),
    *("contribution", "sensitivity", "bfa_cos", "alignment"),
)
GROWS = 0.25
"""With updates of a larger slope training counts as unstable; exponents of parametrizations are halves."""
SAME = 0.05
"""Slopes this close count as the same power, for sizes of layers are never in exact proportion."""


def predict(
    parametrization: Parametrization,
    optimizer: Family,
    quantity: str,
    sizes: Sequence[int],
    layers: Sequence[Sequence[LayerInfo]],
    places: Sequence[Mapping[str, LayerPosition]] | None = None,
    *,
    axis: Axis = "width",
    start: bool = False,
) -> dict[str, float]:
    r"""Return layer -> the slope that theory predicts against width or depth, on log-log axes, over these sizes.

    With n the fan_in, m the fan_out, R the size of a gradient's entry before the readout (that of the readout's
    weights or of their update, whichever goes with the larger power; 1 at the readout itself), and updates of low rank
    that are aligned with their inputs (A Spectral Condition for Feature Learning, Table 1 and sections 3 and 4):

    ========================  ====================================================================================
    quantity                  goes like
    ========================  ====================================================================================
    ``update_natural``        sgd ``n lr R``; adam ``n lr`` (n = 1 for one-hot tokens, biases, gains)
    ``weight_natural``        at the start ``sqrt(n/m) std (sqrt n + sqrt m)``; embeddings ``std``
    ``update_ratio``          the first over the second
    ``drift_ratio``           the same
    ``drift_fro_ratio``       an update of low rank over ``std sqrt(n m)``
    ``feature_rms``           ``sqrt(n) std``; of readouts at the start alone
    ``feature_change``        the largest ``update_natural`` up to the layer over ``feature_rms``; not of readouts
    ``feature_drift``         the same
    ``feature_change_local``  the layer's own ``update_natural`` over ``feature_rms``; not of readouts
    ``contribution``          sgd ``n m lr R^2``; adam ``n m lr R``
    ``sensitivity``           ``1 / (m R)``; not of readouts
    ``alignment``             near the start ``sqrt m / (sqrt n + sqrt m)``; of readouts at the start alone
    ``update_stable_rank``    1
    ``update_alignment``      1
    ========================  ====================================================================================

    Against depth the same formulas hold, with L as in the rules. Let v be the number of operators that move a layer's
    outputs; the input's counts twice, because no ReLU halves its inputs. The cosine of a chain's backward-feature angle
    is ``1/sqrt v`` (The Feature Speed Formula, Theorem 2.1, Prop. 5.1). For one sample:

    ========================  ======================================  ==============================================
    quantity                  in a chain                              in a residual net, with branches times beta
    ========================  ======================================  ==============================================
    R                         as above                                on branches times beta
    ``feature_change``        ``v^1.5 update_natural / feature_rms``  of ``update_natural``, and of
                                                                      ``beta v update_natural`` in the stream, the
                                                                      larger; over ``feature_rms``
    ``feature_drift``         the same                                the same
    ``bfa_cos``               ``1 / sqrt v``                          1, where a layer's own update and the stream
                                                                      move its outputs alike; of branches, which are
                                                                      no cut nodes
    ``sensitivity``           ``1 / (R bfa_cos)``                     the same
    ========================  ======================================  ==============================================

    A network is a chain unless the parametrization has branches. A chain keeps its signal at any depth only with a
    standard deviation of ``sqrt(2/n)``, and ReLUs; else nothing is predicted that depends on features.

    Powers of n and m are taken at the real fans of the layers, so a layer between fixed and growing fans has the slope
    it will show. Where an update grows with the width, nothing is predicted of features and contributions: they blow up
    within a few steps, each in its own way. Theory does not cover constants, such as which of two powers is larger at
    small widths, nor batches of more examples than a layer has units.

    Embeddings that are tied to a readout follow its rule, and so begin smaller than 1. The effect on gradients and
    features depends on normalization: there nothing is predicted of updates by sgd, ``feature_rms``, contributions and
    sensitivities, nor of ratios of embeddings. Nothing is predicted either of weights that are computed from others,
    which have no rule, or of a layer with more blocks in wider networks, such as a depthwise convolution: the largest
    of more blocks is larger.

    Args:
        parametrization: the rules that weights and learning rates follow.
        optimizer: ``"sgd"`` or ``"adam"``.
        quantity: a key of the registry.
        sizes: widths or depths, growing.
        layers: for each size the measured layers; those of one name belong together.
        places: for each size, layer -> position of its parameter, as a sweep keeps it. By default the layers alone
            determine it: without ties, and with one group of each grouped convolution.
        axis: ``"width"`` or ``"depth"``. For depths give places.
        start: whether values are of the first step, of weights that have not moved.

    Returns:
        NaN where nothing is predicted.

    Raises:
        ValueError: fewer than two sizes, not one tuple of layers for each, an unknown family, depths without places.

    Example:
        >>> from spectral_monitor.scaling import MUP, NTP
        >>> def hidden(width):
        ...     return (LayerInfo("0", "operator", width, 64, (width, 64)),
        ...             LayerInfo("2", "operator", width, width, (width, width)),
        ...             LayerInfo("4", "readout", 10, width, (10, width)))
        >>> widths = (64, 256, 1024)
        >>> for p in (MUP, NTP):
        ...     slopes = predict(p, "sgd", "update_natural", widths, [hidden(w) for w in widths])
        ...     print(p.name, {name: round(slope, 2) + 0 for name, slope in slopes.items()})
        muP {'0': 0.0, '2': 0.0, '4': 0.0}
        NTP {'0': -0.5, '2': -0.5, '4': 0.0}
    """
    check_family(optimizer)
    if len(sizes) < 2 or len(sizes) != len(layers):
        raise ValueError(f"a slope needs two {axis}s, and the layers of each; got {len(sizes)} and {len(layers)}")
    if places is None and axis == "depth":
        raise ValueError("depths need places=: layers alone do not tell how deep they are")
    positions = [_untied_positions(infos) for infos in layers] if places is None else places
    network = _NetworkSlopes(parametrization, optimizer, axis, sizes, layers, positions, start)
    return {name: network.slope(quantity, name) for name in network.names}


def _untied_positions(infos: Sequence[LayerInfo]) -> dict[str, LayerPosition]:
    """Return layer -> position, as if none were tied and every convolution had one group."""
    dense = [info.name for info in infos if info.is_dense]
    index, depth, kind = {name: i for i, name in enumerate(dense)}, max(1, len(dense)), kinds(infos)
    return {
        info.name: LayerPosition(kind[info.name], info.fan_in, info.fan_out, index.get(info.name, 0), depth)
        for info in infos
    }


class _NetworkSlopes:
    """A network at all sizes; every number is a slope against the size, NaN where theory predicts nothing."""

    def __init__(
        self,
        parametrization: Parametrization,
        optimizer: Family,
        axis: Axis,
        sizes: Sequence[int],
        layers: Sequence[Sequence[LayerInfo]],
        positions: Sequence[Mapping[str, LayerPosition]],
        start: bool,
    ) -> None:
        self._parametrization, self._sgd, self._start = parametrization, optimizer == "sgd", start
        self._deep, self._chain = axis == "depth", parametrization.branch is None
        self._logs = [math.log(size) for size in sizes]
        by_name = [{info.name: info for info in infos} for infos in layers]
        self.names = [info.name for info in layers[0] if all(info.name in infos for infos in by_name)]
        self._infos = {name: [infos[name] for infos in by_name] for name in self.names}
        self._kinds: dict[str, Kind] = kinds(layers[0])  # for gradients; positions decide which rule holds
        self._positions = {name: [of_size[name] for of_size in positions if name in of_size] for name in self.names}
        embeddings = [name for name in self.names if self._role(name) == "embedding"]
        self._tied = any(position.kind == "readout" for name in embeddings for position in self._positions[name])
        readouts = [name for name in self.names if self._role(name) == "readout"]
        self._gradient = 0.0  # R
        if readouts:
            self._gradient = self._slope_of(readouts[-1], lambda s, n, m: s.std)
            if not start:
                self._gradient = max(self._gradient, self._slope_of(readouts[-1], lambda s, n, m: self._rate(s)))
        if self._deep and not self._keeps_its_signal():
            self._gradient = math.nan  # and with it everything that depends on features
        self._updates = {name: self._update(name) for name in self.names}

    def slope(self, quantity: str, name: str) -> float:
        """Return the slope of one layer; NaN where nothing is predicted."""
        role = self._role(name)
        matrix, dense = role != "vector", role in DENSE
        if len({info.blocks for info in self._infos[name]}) > 1:
            return math.nan
        unmoved = self._start and quantity == "alignment"  # of initial features, which are stable
        if quantity in UNSTABLE and not unmoved and not all(update <= GROWS for update in self._updates.values()):
            return math.nan
        if quantity == "update_natural":
            return self._updates[name]
        if quantity in ("update_stable_rank", "update_alignment"):
            return 0.0 if matrix else math.nan
        if quantity == "contribution":
            return self._contribution(name)
        if quantity == "weight_natural":
            return self._weight(name)
        if quantity in ("update_norm", "update_fro") and dense:
            return self._updates[name] + self._slope_of(name, lambda s, n, m: math.sqrt(m / n))
        if quantity in ("weight_norm", "weight_fro") and dense:
            spectral = quantity == "weight_norm"
            return self._slope_of(name, lambda s, n, m: s.std * (n**0.5 + m**0.5 if spectral else (n * m) ** 0.5))
        if quantity == "weight_stable_rank" and dense:
            return self._slope_of(name, lambda s, n, m: n * m / (n**0.5 + m**0.5) ** 2)
        if quantity in ("update_ratio", "drift_ratio") and matrix:
            if self._tied and role == "embedding":
                return math.nan
            return self._updates[name] - self._weight(name)
        if quantity == "drift_fro_ratio" and dense:
            return self.slope("update_fro", name) - self.slope("weight_fro", name)
        return self._feature_slope(quantity, name) if role == "operator" or self._starts(name) else math.nan

    def _starts(self, name: str) -> bool:
        """Return whether a layer is a readout that has not moved."""
        return self._start and self._role(name) == "readout"

    def _feature_slope(self, quantity: str, name: str) -> float:
        if quantity == "feature_rms":
            return math.nan if self._tied else self._features(name)
        if quantity == "alignment":
            return self._slope_of(name, lambda s, n, m: m**0.5 / (n**0.5 + m**0.5))
        if self._starts(name):
            return math.nan
        if quantity == "feature_change_local":
            return self._updates[name] - self._features(name)
        if quantity in ("feature_change", "feature_drift"):
            return self._change(name) - self._features(name)
        if quantity == "sensitivity" and not self._tied:
            return -self._slope_of(name, lambda s, n, m: m) - self._backward(name) - self._cosine(name)
        if quantity == "bfa_cos" and self._deep:
            return self._cosine(name)
        return math.nan

    def _change(self, name: str) -> float:
        """Return the slope of the change of a layer's outputs, the largest among those caused by updates up to it."""
        before = self.names[: self.names.index(name) + 1]
        return max(self._effect(other, name) for other in before if self._kinds[other] != "readout")

    def _cosine(self, name: str) -> float:
        """Return the slope of the cosine of the backward-feature angle."""
        if not self._deep:
            return 0.0
        if self._chain:
            return -0.5 * self._passed(name) + self._signal_slope()
        # A branch is no cut node: only its own update moves it downhill. Constants decide between different powers.
        own = self._updates[name] - self._change(name)
        return own if abs(own) < SAME else math.nan

    def _keeps_its_signal(self) -> bool:
        """Return whether features and gradients have the same size in deeper networks."""
        hidden = [name for name in self.names if self._kinds[name] == "hidden" and self._role(name) == "operator"]
        positions = [position for name in hidden for position in self._positions[name]]
        return not self._chain or all(
            math.isclose(self._parametrization.scale(position).std, math.sqrt(2 / position.fan_in))
            for position in positions
        )

    def _signal_slope(self) -> float:
        """Return 0, or NaN if features and gradients do not follow a power of the depth."""
        return 0.0 if not self._deep or math.isfinite(self._gradient) else math.nan

    def _update(self, name: str) -> float:
        """Return the slope of the natural norm of an update."""
        size = self._slope_of(name, lambda s, n, m: n * self._rate(s))
        if not self._sgd:
            return size
        return math.nan if self._tied else size + self._backward(name)

    def _backward(self, name: str) -> float:
        """Return the slope of the gradient's entries at a layer's outputs."""
        if self._kinds[name] == "readout":
            return self._signal_slope()
        return self._gradient + self._branch(name)

    def _branch(self, name: str) -> float:
        """Return the slope of the multiplier of a layer's branch."""
        branch, positions = self._parametrization.branch, self._positions[name]
        if not self._deep or branch is None or not all(position.on_branch for position in positions):
            return 0.0
        return self._fit([branch.at(depth=position.branches) for position in positions])

    def _passed(self, name: str) -> float:
        """Return the slope of the number of operators that move a layer's outputs; on a branch, its inputs.

        The input layer counts twice, because no ReLU halves its inputs.
        """
        own = 1 if self._chain else 0
        return self._fit([position.index + 1 + own for position in self._positions[name]])

    def _effect(self, other: str, name: str) -> float:
        """Return the slope of the change in a layer's outputs by another's update; of tokens relative to their size."""
        own = self._updates[other] - (self._weight(other) if self._role(other) == "embedding" else 0.0)
        if not self._deep:
            return own
        if self._chain:
            return own + 1.5 * self._passed(name)
        if other == name or self._kinds[other] != "hidden":
            return own
        return own + self._branch(other) + self._passed(name)  # all branches before it add up

    def _contribution(self, name: str) -> float:
        if self._tied:
            return math.nan
        size = self._slope_of(name, lambda s, n, m: n * m * self._rate(s))
        return size + self._backward(name) * (2 if self._sgd else 1)

    def _weight(self, name: str) -> float:
        if self._role(name) == "vector":
            return math.nan  # zero at the start
        if self._role(name) == "embedding":
            return self._slope_of(name, lambda s, n, m: s.std)
        return self._slope_of(name, lambda s, n, m: s.std * math.sqrt(n / m) * (n**0.5 + m**0.5))

    def _features(self, name: str) -> float:
        return self._slope_of(name, lambda s, n, m: s.std * math.sqrt(n)) + self._signal_slope()

    def _role(self, name: str) -> str:
        return self._infos[name][0].role

    def _rate(self, scale: Scale) -> float:
        """Return the factor on the learning rate."""
        return scale.sgd if self._sgd else scale.adam

    def _slope_of(self, name: str, value: Callable[[Scale, float, float], float]) -> float:
        """Return the slope of a function of scale, fan_in and fan_out over the sizes; NaN if there is no rule."""
        infos, positions = self._infos[name], self._positions[name]
        if len(positions) < len(infos):
            return math.nan
        scales = map(self._parametrization.scale, positions)
        return self._fit([value(s, info.fan_in, info.fan_out) for s, info in zip(scales, infos, strict=True)])

    def _fit(self, values: Sequence[float]) -> float:
        """Return the slope of positive values over the sizes, by least squares on log-log axes."""
        if len(values) < len(self._logs):
            return math.nan
        return statistics.linear_regression(self._logs, [math.log(value) for value in values]).slope
