"""Counts of layers that are healthy, off, disturbed or not judged; every report uses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spectral_monitor.condition.verdict import NETWORK, Verdict
from spectral_monitor.measurement import HEALTHY, NOT_JUDGED, OFF, LayerState, Measurement

NOBODY = "this measurement was not judged"
"""The reason of a measurement that was never judged."""
JUDGED_BY = ("update_natural", "weight_natural", "update_ratio")
"""Quantities by which layers are judged; a measurement without any of them cannot be judged."""


@dataclass(frozen=True)
class Tally:
    """The layers of one measurement by their state; every layer is counted once."""

    layers: int  # number of layers: matrices, and vectors with a verdict
    network: tuple[Verdict, ...] = ()  # verdicts on the network as a whole
    off: tuple[str, ...] = ()  # layers that a root verdict names, in the order of the verdicts
    # layer -> the root that it follows from, in the order of the roots
    disturbed: dict[str, str] = field(default_factory=dict)
    # reason -> layers, the most frequent reason first
    not_judged: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def judged(self) -> int:
        """Number of layers with a state."""
        return self.layers - sum(map(len, self.not_judged.values()))

    @property
    def healthy(self) -> int:
        """Number of healthy layers."""
        return self.judged - len(self.off) - len(self.disturbed)

    @property
    def state(self) -> str:
        """The network's state: off with any root verdict, not judged where no layer was judged, else healthy."""
        if self.network or self.off or self.disturbed:
            return OFF
        return HEALTHY if self.judged else NOT_JUDGED


def named_by(verdict: Verdict) -> tuple[str, ...]:
    """Return the layers of a verdict; none if it is on the network.

    Example:
        >>> named_by(Verdict("head", "lr", 0.1, (0.0, 1.0), 9.0, 40, 5, "lr_too_large", "", ("head", "net.2")))
        ('head', 'net.2')
    """
    if verdict.layer == NETWORK:
        return ()
    return tuple(dict.fromkeys((verdict.layer, *verdict.layers)))


def off(measurement: Measurement) -> tuple[str, ...]:
    """Return the layers of root verdicts, the worst root first; each layer once."""
    return tuple(dict.fromkeys(layer for root in measurement.roots for layer in named_by(root)))


def disturbed(measurement: Measurement) -> dict[str, str]:
    """Return layer -> its root, for every layer that follows from a root and is not off by itself."""
    off_layers = set(off(measurement))
    roots: dict[str, str] = {}
    for root in measurement.roots:
        following = [layer for v in measurement.verdicts if v.root == root.layer for layer in named_by(v)]
        for layer in (*following, *root.consequences):
            roots.setdefault(layer, root.layer)
    for verdict in measurement.verdicts:  # its root may have been lifted at this step
        for layer in named_by(verdict):
            roots.setdefault(layer, verdict.root)
    return {layer: root for layer, root in roots.items() if layer not in off_layers}


def followers(root: Verdict, measurement: Measurement) -> list[str]:
    """Return the layers that follow from a root."""
    return [layer for layer, source in disturbed(measurement).items() if source == root.layer]


def tally(measurement: Measurement) -> Tally:
    """Count the layers of a measurement by their state.

    Example:
        >>> from spectral_monitor import LayerInfo
        >>> layers = tuple(LayerInfo(name, "operator", 8, 8, (8, 8)) for name in "abc")
        >>> states = {"a": LayerState(HEALTHY), "b": LayerState(HEALTHY), "c": LayerState(NOT_JUDGED, "frozen")}
        >>> count = tally(Measurement(50, layers, {}, {"violations": 0.0}, states=states))
        >>> count.layers, count.healthy, count.not_judged
        (3, 2, {'frozen': ('c',)})
    """
    off_layers, follow = dict.fromkeys(off(measurement)), disturbed(measurement)
    names = [info.name for info in measurement.layers if info.is_matrix]
    missing = LayerState(NOT_JUDGED, "" if measurement.states else NOBODY)
    not_judged: dict[str, list[str]] = {}
    for name in names:
        if name not in off_layers and name not in follow:
            state, reason = measurement.states.get(name, missing)
            if state == OFF:
                off_layers[name] = None
            elif state == NOT_JUDGED:
                not_judged.setdefault(reason, []).append(name)
    by_count = sorted(not_judged.items(), key=lambda item: -len(item[1]))
    return Tally(
        layers=len({*names, *off_layers, *follow}),
        network=tuple(root for root in measurement.roots if root.layer == NETWORK),
        off=tuple(off_layers),
        disturbed=follow,
        not_judged={reason: tuple(layers) for reason, layers in by_count},
    )


def root_keys(measurement: Measurement) -> frozenset[tuple[str, ...]]:
    """Return the cause and the layers of each root; if they change, the verdicts are reported again.

    The order of a root's layers and the layers that follow from it make no difference.
    """
    return frozenset((root.cause, *sorted(named_by(root))) for root in measurement.roots)


def is_judged(measurement: Measurement) -> bool:
    """Return whether it was judged: some steps measure other quantities only, and earlier verdicts stay."""
    network = any(root.layer == NETWORK for root in measurement.roots)
    return network or any(key in measurement.values for key in JUDGED_BY)


def latest_judged(measurements: Sequence[Measurement]) -> Measurement | None:
    """Return the newest measurement that was judged; ``None`` if none was."""
    return next(filter(is_judged, reversed(measurements)), None)
