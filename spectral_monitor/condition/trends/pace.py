"""The pace of the network: steps that are too large or too small.

The layers of each optimizer are judged separately. Networks that are trained against each other, or side by side, need
not move at one pace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from spectral_monitor.condition.findings import Finding
from spectral_monitor.condition.network import ALL, Network
from spectral_monitor.condition.row import Row
from spectral_monitor.condition.trends.memory import Memory
from spectral_monitor.condition.verdict import NETWORK
from spectral_monitor.fitting.medians import geometric_median, nanmax

SPEED_LIMIT = 1.8
"""Limit of the drift ratio over the root of the number of steps.

Networks that train well at four times their best rate reach 1.75.
"""
SLOW = 0.0065
"""Least geometric mean of two sizes, at the peak of the learning rate: the relative update of the fastest layer and the
natural norm of the median layer's update.

Networks that are tuned for their number of steps reach four times this or more. At published rates it is about this,
because those are meant for many more steps than a small network needs.
"""
LAG = 20.0
"""Slow steps of one optimizer are a finding, although another takes large enough ones, if these are larger by this
factor. Healthy optimizers that train side by side are within a factor of 10.
"""
NARROW = 32
"""Below this number of inputs, steps at usual learning rates shrink with the number of inputs."""
SETTLED = 16
"""First step at which a network may be found to hardly move."""


class _Steps(NamedTuple):
    """The largest steps so far, scaled to the peak of the learning rate."""

    fastest: float = 0.0  # relative update of the layer that moves most
    natural: float = 0.0  # natural norm of the median layer's update

    def grown(self, rows: Sequence[Row]) -> _Steps:
        """Return the larger of these and of the present steps of the layers."""
        fastest = nanmax(row.get("update_ratio") * row.to_settled for row in rows)
        natural = geometric_median(row.update * row.to_settled for row in rows)
        return _Steps(nanmax((self.fastest, fastest)), nanmax((self.natural, natural)))


@dataclass
class PaceTrend(Memory):
    """Remembers the largest steps."""

    pace: float = math.nan  # the largest relative update of the median layer so far; NaN if none is known
    first_pace: float = math.nan  # the first known one, before large steps have led to larger ones
    # Relative update of the fastest layer that the latest finding on slow steps is about, at the peak of its learning
    # rate; 0 if none is known.
    fastest: float = 0.0
    steps: dict[int, _Steps] = field(default_factory=dict)  # of each optimizer, and of all
    rate: float = math.nan  # highest learning rate at the previous measurement
    looked: int = 0  # number of measurements at which layers moved

    def findings(self, network: Network) -> Iterator[Finding]:
        """Yield the findings on the size of steps, healthy or not."""
        yield from self._speed(network)
        yield from self._slowness(network)

    def _speed(self, network: Network) -> Iterator[Finding]:
        """Compare the drift of the median layer with the number of steps."""
        parts = network.parts.values()
        ratio = nanmax(geometric_median(row.get("update_ratio") for row in _grown_layers(part)) for part in parts)
        self.pace = nanmax((self.pace, ratio))
        self.first_pace = ratio if math.isnan(self.first_pace) else self.first_pace
        limit = SPEED_LIMIT * math.sqrt(network.step)
        drifting = [part for part in parts if not math.isnan(part.drift)]
        if not drifting:
            return
        farthest = max(drifting, key=lambda part: part.drift)
        too_far = sum(part.drift > limit for part in drifting)
        layers = _names(farthest) if 0 < too_far < len(parts) else _of_one(network, _grown_layers(network))
        drift, against = farthest.drift, "a healthy pace"
        yield Finding("rates_too_large", NETWORK, "drift_ratio", drift, limit, (0.0, 1.0), 1.25, against, layers=layers)

    def _slowness(self, network: Network) -> Iterator[Finding]:
        """Compare the largest steps so far with healthy ones, once a new network has been measured for long enough."""
        rises, self.rate = network.top_lr > 1.01 * self.rate, network.top_lr
        if not _moving(network):
            return
        self.looked += 1
        for key, part in ({ALL: network} | network.parts).items():
            rows = [row for row in _moving(part) if network.step >= SETTLED or not row.slows_down]
            self.steps[key] = self.steps.get(key, _Steps()).grown(rows)
        if network.step < SETTLED or self.looked < 4 or rises or not network.fresh or not self.steps[ALL].natural:
            return
        finding = replace(self._compare(ALL, network), layers=_of_one(network, _moving(network)))
        self.fastest = self.steps[ALL].fastest
        of_parts = {key: self._compare(key, part) for key, part in network.parts.items() if _moving(part)}
        slow = [key for key, of_part in of_parts.items() if not of_part.inside()]
        slowest = min(of_parts, key=lambda key: of_parts[key].ratio, default=ALL)
        lags = slowest in slow and of_parts[slowest].ratio < max(of_part.ratio for of_part in of_parts.values()) / LAG
        if 0 < len(slow) < len(network.parts) and (lags or not finding.inside()):
            finding = replace(of_parts[slowest], layers=_names(network.parts[slowest]))
            self.fastest = self.steps[slowest].fastest
        yield finding

    def _compare(self, key: int, part: Network) -> Finding:
        """Compare the largest steps of a part of the network with healthy ones."""
        inputs = geometric_median(row.info.fan_in * row.taps for row in _moving(part))
        value, slow = math.sqrt(math.prod(self.steps[key])), SLOW * min(1.0, inputs / NARROW)
        return Finding("rates_too_small", NETWORK, "update_natural", value, slow, (1.0, math.inf), 1.2, "healthy")

    def state_dict(self) -> dict[str, Any]:
        """Return what is remembered, in plain types."""
        return super().state_dict() | {"steps": [[key, *steps] for key, steps in self.steps.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        super().load_state_dict(state)
        saved = state.get("steps") or [[ALL, self.fastest, state.get("natural", 0.0)]]  # the latter in older versions
        self.steps = {int(key): _Steps(*map(float, steps)) for key, *steps in saved}


def _grown_layers(network: Network) -> list[Row]:
    """Return the layers whose steps are set by a learning rate, without those that began next to zero."""
    return [row for row in network.moved_by_rate if not network.began_small(row)]


def _moving(network: Network) -> list[Row]:
    """Return those of these layers that a gradient moves, without those that it reaches late."""
    rows = [row for row in _grown_layers(network) if row.name not in network.late_layers]
    return [row for row in rows if row.get("update_ratio") > 0 and row.has_gradient]


def _of_one(network: Network, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the layers of the optimizer that trains all of these rows if there is another one; else nothing."""
    owners = {row.settings.owner for row in rows}
    layers = tuple(row.name for row in network.rows if row.settings.owner in owners)
    others = any(row.settings.optimizer and row.settings.owner not in owners for row in network.rows)
    return layers if len(owners) == 1 and others else ()


def _names(network: Network) -> tuple[str, ...]:
    return tuple(row.name for row in network.rows)
