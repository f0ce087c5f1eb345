"""Predictions of a parametrization: how every quantity of every layer scales with the width."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from spectral_monitor.measurement import LayerInfo
from spectral_monitor.parametrization.layer_position import Kind, LayerPosition, kinds
from spectral_monitor.parametrization.param_groups import Family, check_family
from spectral_monitor.parametrization.rules import Parametrization, Scale
from spectral_monitor.parametrization.tying import DENSE

UPDATES = ("update_norm", "update_fro")
DRIFTS = ("feature_change", "feature_drift")
UNSTABLE = ("feature_change", "feature_change_local", "feature_drift", "contribution")
GROWS = 0.25
"""A slope of updates from which on training is taken to blow up; exponents of parametrizations are halves."""


def predict(
    parametrization: Parametrization,
    optimizer: Family,
    quantity: str,
    widths: Sequence[int],
    layers: Sequence[Sequence[LayerInfo]],
    places: Sequence[Mapping[str, LayerPosition]] | None = None,
) -> dict[str, float]:
    r"""Layer -> the slope against width that theory predicts, on log-log axes, over these very widths.

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
    ``feature_rms``           at the start ``sqrt(n) std``; not of readouts
    ``feature_change``        the largest ``update_natural`` up to the layer over ``feature_rms``; not of readouts
    ``feature_drift``         the same
    ``feature_change_local``  the layer's own ``update_natural`` over ``feature_rms``; not of readouts
    ``contribution``          sgd ``n m lr R^2``; adam ``n m lr R``
    ``update_stable_rank``    1
    ``update_alignment``      1
    ========================  ====================================================================================

    Powers of n and m are taken at the fans the layers really have, so that a layer between fixed and growing fans has
    the slope it will show. Where an update grows with the width, nothing is predicted of features and contributions:
    they blow up within steps, each in its own way. What hangs on constants, such as which of two powers is ahead at
    small widths, or a batch of examples larger than a layer, theory does not know.

    Embeddings that are tied to a readout follow its rule, and so begin smaller than 1. What gradients and features make
    of that hangs on normalization: there nothing is predicted of updates by sgd, ``feature_rms`` and contributions, nor
    of ratios of embeddings. Neither is anything of weights that are computed from others, which no rule is for, or of a
    layer that has more blocks in wider networks, such as a depthwise convolution: the largest of more is larger.

    Args:
        parametrization: the rules that weights and learning rates follow.
        optimizer: ``"sgd"`` or ``"adam"``.
        quantity: a key of the registry.
        widths: W of them, growing.
        layers: for each width the measured layers; those of one name belong together.
        places: for each width, layer -> where the parametrization sees its parameter, as a sweep keeps it; by default
            as the layers alone tell, which do not say what is tied, and of grouped convolutions only one group.

    Returns:
        NaN where nothing is predicted.

    Raises:
        ValueError: fewer than two widths, not one tuple of layers for each, an unknown family.

    Example:
        >>> from spectral_monitor.scaling import MUP, NTP
        >>> def hidden(width):
        ...     return (LayerInfo("0", "operator", width, 64, (width, 64)),
        ...             LayerInfo("2", "operator", width, width, (width, width)),
        ...             LayerInfo("4", "readout", 10, width, (10, width)))
        >>> widths = (64, 256, 1024)
        >>> for p in (MUP, NTP):
        ...     found = predict(p, "sgd", "update_natural", widths, [hidden(w) for w in widths])
        ...     print(p.name, {name: round(slope, 2) + 0 for name, slope in found.items()})
        muP {'0': 0.0, '2': 0.0, '4': 0.0}
        NTP {'0': -0.5, '2': -0.5, '4': 0.0}
    """
    check_family(optimizer)
    if len(widths) < 2 or len(widths) != len(layers):
        raise ValueError(f"a slope needs two widths, and the layers of each; got {len(widths)} and {len(layers)}")
    if places is None:
        places = [_told(infos) for infos in layers]
    network = _Network(parametrization, optimizer, widths, layers, places)
    return {name: network.slope(quantity, name) for name in network.names}


def _told(infos: Sequence[LayerInfo]) -> dict[str, LayerPosition]:
    """Places as far as layers tell them: none is tied, and each group of a convolution is alone."""
    dense = [info.name for info in infos if info.role in DENSE]
    index, depth, kind = {name: i for i, name in enumerate(dense)}, max(1, len(dense)), kinds(infos)
    return {i.name: LayerPosition(kind[i.name], i.fan_in, i.fan_out, index.get(i.name, 0), depth) for i in infos}


class _Network:
    """A network at all widths; every number is a slope against width, NaN where theory is silent."""

    def __init__(
        self,
        p: Parametrization,
        optimizer: Family,
        widths: Sequence[int],
        layers: Sequence[Sequence[LayerInfo]],
        places: Sequence[Mapping[str, LayerPosition]],
    ) -> None:
        self._p, self._sgd = p, optimizer == "sgd"
        self._logs = [math.log(width) for width in widths]
        by_name = [{info.name: info for info in infos} for infos in layers]
        self.names = [info.name for info in layers[0] if all(info.name in found for found in by_name)]
        self._infos = {name: [found[name] for found in by_name] for name in self.names}
        self._kinds: dict[str, Kind] = kinds(layers[0])  # of gradients; whose rule holds, places say
        self._places = {name: [some[name] for some in places if name in some] for name in self.names}
        self._tied = any(
            self._role(name) == "embedding" and place.kind == "readout"
            for name, some in self._places.items()
            for place in some
        )
        readouts = [name for name in self.names if self._role(name) == "readout"]
        self._gradient = 0.0  # R
        if readouts:
            last = readouts[-1]
            of_update = self._of(last, lambda s, n, m: s.sgd if self._sgd else s.adam)
            self._gradient = max(self._of(last, lambda s, n, m: s.std), of_update)
        self._updates = {name: self._update(name) for name in self.names}

    def slope(self, quantity: str, name: str) -> float:
        """Return the slope of one layer; NaN where nothing is predicted."""
        matrix, operator = self._role(name) != "vector", self._role(name) == "operator"
        if len({info.blocks for info in self._infos[name]}) > 1:
            return math.nan
        if quantity in UNSTABLE and not all(update <= GROWS for update in self._updates.values()):
            return math.nan
        if quantity == "update_natural":
            return self._updates[name]
        if quantity in ("update_stable_rank", "update_alignment"):
            return 0.0 if matrix else math.nan
        if quantity == "contribution":
            return self._contribution(name)
        if quantity == "weight_natural":
            return self._weight(name)
        if quantity in UPDATES and self._role(name) in DENSE:
            return self._updates[name] + self._of(name, lambda s, n, m: math.sqrt(m / n))
        if quantity in ("weight_norm", "weight_fro") and self._role(name) in DENSE:
            spectral = quantity == "weight_norm"
            return self._of(name, lambda s, n, m: s.std * (n**0.5 + m**0.5 if spectral else (n * m) ** 0.5))
        if quantity == "weight_stable_rank" and self._role(name) in DENSE:
            return self._of(name, lambda s, n, m: n * m / (n**0.5 + m**0.5) ** 2)
        if quantity in ("update_ratio", "drift_ratio") and matrix:
            if self._tied and self._role(name) == "embedding":
                return math.nan
            return self._updates[name] - self._weight(name)
        if quantity == "drift_fro_ratio" and self._role(name) in DENSE:
            return self.slope("update_fro", name) - self.slope("weight_fro", name)
        if quantity == "feature_rms" and operator:
            return math.nan if self._tied else self._features(name)
        if quantity == "feature_change_local" and operator:
            return self._updates[name] - self._features(name)
        if quantity in DRIFTS and operator:
            before = self.names[: self.names.index(name) + 1]
            return max(self._moves(other) for other in before if self._kinds[other] != "readout") - self._features(name)
        return math.nan

    def _update(self, name: str) -> float:
        """Return the slope of the natural norm of an update."""
        size = self._of(name, lambda s, n, m: n * (s.sgd if self._sgd else s.adam))
        if self._sgd and self._tied:
            return math.nan
        return size + (self._gradient if self._sgd and self._kinds[name] != "readout" else 0.0)

    def _moves(self, name: str) -> float:
        """By how much an update changes what later layers read; tokens in relation to what they are."""
        return self._updates[name] - (self._weight(name) if self._role(name) == "embedding" else 0.0)

    def _contribution(self, name: str) -> float:
        if self._tied:
            return math.nan
        gradient = self._gradient if self._kinds[name] != "readout" else 0.0
        size = self._of(name, lambda s, n, m: n * m * (s.sgd if self._sgd else s.adam))
        return size + gradient * (2 if self._sgd else 1)

    def _weight(self, name: str) -> float:
        if self._role(name) == "vector":
            return math.nan  # zero at the start
        if self._role(name) == "embedding":
            return self._of(name, lambda s, n, m: s.std)
        return self._of(name, lambda s, n, m: s.std * math.sqrt(n / m) * (n**0.5 + m**0.5))

    def _features(self, name: str) -> float:
        return self._of(name, lambda s, n, m: s.std * math.sqrt(n))

    def _role(self, name: str) -> str:
        return self._infos[name][0].role

    def _of(self, name: str, value: Callable[[Scale, float, float], float]) -> float:
        """Return the slope of a function's values over the widths, by least squares; NaN if there is no rule."""
        infos, places = self._infos[name], self._places[name]
        if len(places) < len(infos):
            return math.nan
        both = zip(infos, places, strict=True)
        logs = [math.log(value(self._p.scale(place), info.fan_in, info.fan_out)) for info, place in both]
        x, y = sum(self._logs) / len(logs), sum(logs) / len(logs)
        pairs = zip(self._logs, logs, strict=True)
        return sum((a - x) * (b - y) for a, b in pairs) / sum((a - x) ** 2 for a in self._logs)
