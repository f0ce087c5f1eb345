"""The pace of the whole network: steps that are too large to settle, or lead hardly anywhere.

Of several optimizers each is looked at, for networks that are trained against each other, or side by side, need not
move at one pace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from spectral_monitor.condition.findings import Finding
from spectral_monitor.condition.network import ALL, Network
from spectral_monitor.condition.row import Row
from spectral_monitor.condition.verdict import NETWORK
from spectral_monitor.fitting.medians import geometric_median

SPEED_LIMIT = 1.1
"""Healthy weights have moved by less than this, times the root of the number of steps, of the size they began with."""
SLOW = 0.0065
"""The root of the fastest layer's relative update times the median layer's natural one, at the learning rate's peak:
more than four times this in networks that are tuned for the steps they have, about this at published rates that are
meant for many more steps than a small network needs.
"""
NARROW = 32
"""Layers with fewer inputs take steps that are as much smaller at the rates that people use for them."""
SETTLED = 16
"""From this step on a network that hardly moves is said to."""


class _Steps(NamedTuple):
    """The largest steps so far, at the peak of the learning rate.

    Attributes:
        fastest: relative update of the layer that moves most.
        natural: natural update of the median layer.
    """

    fastest: float = 0.0
    natural: float = 0.0

    def grown(self, rows: Sequence[Row]) -> _Steps:
        """Return the largest after those of some layers more."""
        fastest = _largest(row.get("update_ratio") * row.to_peak for row in rows)
        natural = geometric_median(row.update * row.to_peak for row in rows)
        return _Steps(_largest((self.fastest, fastest)), _largest((self.natural, natural)))


class PaceTrend:
    """Remembers the largest steps.

    Attributes:
        pace: the largest relative update of the median layer so far; NaN if none is known.
        first_pace: of the first measurement that has one, when steps are not yet larger for being large.
        fastest: relative update of the fastest layer of those whose pace was told last, at the peak of its learning
            rate; 0 if none is known.
    """

    def __init__(self) -> None:
        self._steps: dict[int, _Steps] = {}  # of each optimizer, and of all
        self._rate = math.nan  # highest learning rate at the measurement before
        self._looked = 0
        self.pace = self.first_pace = math.nan
        self.fastest = 0.0

    def findings(self, network: Network) -> Iterator[Finding]:
        """Yield what can be said of its steps, healthy or not."""
        yield from self._speed(network)
        yield from self._slowness(network)

    def _speed(self, network: Network) -> Iterator[Finding]:
        """Yield how far the median layer has moved since the start, for so many steps."""
        parts = network.parts.values()
        ratio = _largest(geometric_median(row.get("update_ratio") for row in _own(part)) for part in parts)
        self.pace = _largest((self.pace, ratio))
        self.first_pace = ratio if math.isnan(self.first_pace) else self.first_pace
        usual = SPEED_LIMIT * math.sqrt(network.step)
        known = [part for part in parts if not math.isnan(part.drift)]
        if not known:
            return
        farthest = max(known, key=lambda part: part.drift)
        too_far = sum(part.drift > usual for part in known)
        whose = _names(farthest) if 0 < too_far < len(parts) else ()
        against, value = "a healthy pace", farthest.drift
        yield Finding(
            "rates_too_large", NETWORK, "drift_ratio", value, usual, (0.0, 1.0), against=against, layers=whose
        )

    def _slowness(self, network: Network) -> Iterator[Finding]:
        """Yield how large steps have been so far, if the network was not trained before and has taken its time."""
        rises, self._rate = network.top_lr > 1.01 * self._rate, network.top_lr
        if not _moving(network):
            return
        self._looked += 1
        for key, part in ({ALL: network} | network.parts).items():
            self._steps[key] = self._steps.get(key, _Steps()).grown(_moving(part))
        if network.step < SETTLED or self._looked < 4 or rises or not network.fresh or not self._steps[ALL].natural:
            return
        told, self.fastest = self._size(ALL, network), self._steps[ALL].fastest
        sizes = {key: self._size(key, part) for key, part in network.parts.items() if _moving(part)}
        slow = [key for key, size in sizes.items() if not size.inside()]
        if not told.inside() and 0 < len(slow) < len(network.parts):
            slowest = min(slow, key=lambda key: sizes[key].ratio)
            told, self.fastest = sizes[slowest], self._steps[slowest].fastest
            told = replace(told, layers=_names(network.parts[slowest]))
        yield told

    def _size(self, key: int, part: Network) -> Finding:
        """Return how large the steps of a part have been."""
        inputs = geometric_median(row.info.fan_in * row.taps for row in _moving(part))
        value, slow = math.sqrt(math.prod(self._steps[key])), SLOW * min(1.0, inputs / NARROW)
        return Finding("rates_too_small", NETWORK, "update_natural", value, slow, (1.0, math.inf), 1.2, "healthy")

    def state_dict(self) -> dict[str, Any]:
        """Return plain types."""
        return {
            "pace": self.pace,
            "first_pace": self.first_pace,
            "fastest": self.fastest,
            "steps": [[key, *steps] for key, steps in self._steps.items()],
            "rate": self._rate,
            "looked": self._looked,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.pace, self.first_pace = float(state["pace"]), float(state.get("first_pace", math.nan))
        self.fastest, self._looked, self._rate = float(state["fastest"]), int(state["looked"]), float(state["rate"])
        known = state.get("steps") or [[ALL, self.fastest, state.get("natural", 0.0)]]  # as it was before
        self._steps = {int(key): _Steps(*map(float, steps)) for key, *steps in known}


def _own(network: Network) -> list[Row]:
    """Return the layers whose steps follow from a learning rate and are no larger for having begun next to zero."""
    return [row for row in network.moved_by_rate if not network.began_small(row)]


def _moving(network: Network) -> list[Row]:
    """Return those of them that a gradient moves."""
    return [row for row in _own(network) if row.get("update_ratio") > 0 and row.has_gradient]


def _names(network: Network) -> tuple[str, ...]:
    return tuple(row.info.name for row in network.rows)


def _largest(values: Iterable[float]) -> float:
    """Return the largest of numbers that are known; NaN if none is."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)
