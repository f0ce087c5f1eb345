"""Counts of layers that are healthy, off, disturbed or not judged; every report uses them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from spectral_monitor.condition.verdict import NETWORK, Verdict
from spectral_monitor.measurement import HEALTHY, NOT_JUDGED, OFF, LayerState, Measurement

NOBODY = "no judge has seen this measurement"
"""The reason where nothing has judged at all."""
JUDGED_BY = ("update_natural", "weight_natural", "update_ratio")
"""Quantities that layers are compared by; a measurement without any of them judges nothing."""


@dataclass(frozen=True)
class Tally:
    """The layers of one measurement by their state; every layer is counted once."""

    layers: int  # number of layers: matrices, and vectors with a verdict
    network: tuple[Verdict, ...] = ()  # verdicts on the network as a whole
    off: tuple[str, ...] = ()  # layers that a root verdict names, in the order of the verdicts
    # layer -> the root that it follows from, in the order of the roots
    disturbed: dict[str, str] = field(default_factory=dict)
    # layers outside a band that have no verdict yet; only where a measurement has no states
    passing: tuple[str, ...] = ()
    # reason -> layers, the most frequent reason first
    not_judged: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def judged(self) -> int:
        """Number of layers with a state."""
        return self.layers - sum(map(len, self.not_judged.values()))

    @property
    def healthy(self) -> int:
        """Number of healthy layers."""
        return self.judged - len(self.off) - len(self.disturbed) - len(self.passing)

    @property
    def state(self) -> str:
        """The network's state: off with any root verdict, not judged where no layer was judged, else healthy."""
        if self.network or self.off or self.disturbed:
            return OFF
        return HEALTHY if self.judged else NOT_JUDGED


def named_by(verdict: Verdict) -> tuple[str, ...]:
    """Return the layers that a verdict is on; none where it is on the network.

    Example:
        >>> named_by(Verdict("head", "lr", 0.1, (0.0, 1.0), 9.0, 40, 5, "lr_too_large", "", ("head", "net.2")))
        ('head', 'net.2')
    """
    if verdict.layer == NETWORK:
        return ()
    return tuple(dict.fromkeys((verdict.layer, *verdict.layers)))


def off(measurement: Measurement) -> tuple[str, ...]:
    """Return the layers that root verdicts name, the worst root first; each layer once."""
    return tuple(dict.fromkeys(layer for root in measurement.roots for layer in named_by(root)))


def disturbed(measurement: Measurement) -> dict[str, str]:
    """Return layer -> its root, for every layer that follows from a root and is not off by itself."""
    named = set(off(measurement))
    found: dict[str, str] = {}
    for root in measurement.roots:
        following = [layer for v in measurement.verdicts if v.root == root.layer for layer in named_by(v)]
        for layer in (*following, *root.consequences):
            if layer not in named:
                found.setdefault(layer, root.layer)
    for verdict in measurement.verdicts:  # its root may have been lifted at this very step
        for layer in named_by(verdict):
            if layer not in named:
                found.setdefault(layer, verdict.root)
    return found


def followers(root: Verdict, measurement: Measurement) -> list[str]:
    """Return the layers that follow from a root."""
    return [layer for layer, of in disturbed(measurement).items() if of == root.layer]


def tally(measurement: Measurement) -> Tally:
    """Count the layers of a measurement by their state.

    Where a file of an earlier version has no states, layers count as judged if anything they are compared by is known.

    Example:
        >>> from spectral_monitor import LayerInfo
        >>> layers = tuple(LayerInfo(name, "operator", 8, 8, (8, 8)) for name in "abc")
        >>> states = {"a": LayerState(HEALTHY), "b": LayerState(HEALTHY), "c": LayerState(NOT_JUDGED, "frozen")}
        >>> found = tally(Measurement(50, layers, {}, {"violations": 0.0}, states=states))
        >>> found.layers, found.healthy, found.not_judged
        (3, 2, {'frozen': ('c',)})
    """
    bad, follow = dict.fromkeys(off(measurement)), disturbed(measurement)
    names = [info.name for info in measurement.layers if info.is_matrix]
    states = measurement.states or _states(measurement, names)
    healthy: set[str] = set()
    not_judged: dict[str, list[str]] = {}
    for name in names:
        if name not in bad and name not in follow:
            state, reason = states.get(name, LayerState(NOT_JUDGED))  # what a judge said nothing of was not judged
            if state == OFF:
                bad[name] = None
            elif state == NOT_JUDGED:
                not_judged.setdefault(reason, []).append(name)
            else:
                healthy.add(name)
    by_count = sorted(not_judged.items(), key=lambda item: -len(item[1]))
    return Tally(
        layers=len({*names, *bad, *follow}),
        network=tuple(root for root in measurement.roots if root.layer == NETWORK),
        off=tuple(bad),
        disturbed=follow,
        passing=() if measurement.states else _passing(measurement, healthy),
        not_judged={reason: tuple(some) for reason, some in by_count},
    )


def told(measurement: Measurement) -> frozenset[tuple[str, ...]]:
    """Return what makes it worth saying again what is off: the roots by cause and layers.

    Layers that begin or cease to follow from a root, and which of a cause's layers is the worst, make no difference.
    """
    return frozenset((root.cause, *sorted(named_by(root))) for root in measurement.roots)


def is_judged(measurement: Measurement) -> bool:
    """Return whether it has anything to judge by: some steps measure other quantities only, and verdicts just stand."""
    network = any(root.layer == NETWORK for root in measurement.roots)
    return network or any(key in measurement.values for key in JUDGED_BY)


def latest_judged(measurements: Sequence[Measurement]) -> Measurement | None:
    """Return the newest measurement that has what layers are judged by; ``None`` if none has."""
    return next(filter(is_judged, reversed(measurements)), None)


def _nothing_known(measurement: Measurement) -> str:
    """Return why nothing is known that layers are compared by; empty if anything is.

    No verdict then means nothing: what is NaN, and what was not measured, violates nothing.
    """
    key = next((key for key in JUDGED_BY if key in measurement.values), None)
    if key is None:
        return f"none of {', '.join(JUDGED_BY)} was measured"
    matrices = [i for i, info in enumerate(measurement.layers) if info.is_matrix]
    values = measurement.values[key].tolist()
    if not matrices or any(math.isfinite(values[i]) for i in matrices):
        return ""
    return measurement.why(key, measurement.layers[matrices[0]].name) or f"no layer has a value of {key}"


def _states(measurement: Measurement, names: Sequence[str]) -> dict[str, LayerState]:
    """Return the states that a measurement without any stands for."""
    judged = "violations" in measurement.summary or measurement.verdicts
    why = _nothing_known(measurement) if judged else NOBODY
    return dict.fromkeys(names, LayerState(NOT_JUDGED, why) if why else LayerState(HEALTHY))


def _passing(measurement: Measurement, among: set[str]) -> tuple[str, ...]:
    """Return those layers that are outside a band at this one measurement, in the order of the network."""
    outside: set[str] = set()
    for quantity, bands in measurement.bands.items():
        if quantity in measurement.values:
            rows = zip(measurement.layers, measurement.values[quantity].tolist(), bands.tolist(), strict=True)
            outside.update(info.name for info, value, (low, high, _) in rows if value < low or value > high)
    return tuple(info.name for info in measurement.layers if info.name in outside & among)
