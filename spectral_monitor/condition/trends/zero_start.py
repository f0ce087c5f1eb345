"""Layers that began at zero: until they have grown, other layers get hardly any gradient and cannot be compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spectral_monitor.condition.findings import Finding
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.row import Row
from spectral_monitor.measurement import ZERO, Measurement

GRACE = 12
"""Measurements that growth from zero may take; it must not hide a fault for long."""
STUCK = 4
"""The same for a matrix that stays at zero: if several follow each other, each moves a step later."""
GROWN = 0.25
"""A matrix has grown once a step changes it by less than this part of its size; a gain, which is usually 1, once it is
larger than this.
"""
COMPARING = frozenset({"reference", "weights", "dead", "rates_too_small", "eps", "nothing_trains"})
"""Checks that mean nothing while a matrix next to zero holds gradients back."""


class ZeroStartGate:
    """Holds back findings while layers grow from zero.

    A readout that began at zero passes no gradient down at the first step and little at the next ones. The same holds
    for any other matrix, or gain of a residual branch, that began at zero.

    Attributes:
        reason: why layers are not compared at the latest measurement; empty if they are.
        from_zero: layers that began at zero.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.from_zero: set[str] = set()
        self._growing: dict[str, int] = {}  # layer -> number of measurements it has been growing for
        self._open: set[str] = set()  # gains that have had enough time to leave zero
        self._looked = 0  # number of measurements with a learning rate above 0

    @property
    def growing(self) -> tuple[str, ...]:
        """The layers that others wait for."""
        return tuple(self._growing)

    def look(self, measurement: Measurement, network: Network) -> None:
        """Find the layers that begin at zero, and those that have grown, at the next measurement."""
        sizes = {row.name: row.get("weight_natural") for row in (*network.rows, *_gates(network))}
        new = {name for name, size in sizes.items() if not size or _began_at_zero(measurement, name)} - self.from_zero
        self.from_zero |= new
        if self._looked < GRACE:
            self._growing |= dict.fromkeys(sorted(new), 0)  # in the same order in every process
        if network.top_lr == 0:  # before a warm-up
            return
        self._looked += 1
        growing = {}
        for name, count in self._growing.items():
            row = network.parameter(name)
            grown = row is not None and _has_grown(row)
            stuck = row is None or not max(row.get("update_natural"), row.get("weight_natural")) > 0
            if count < (STUCK if stuck else GRACE) and not grown:
                growing[name] = count + 1
        self._growing = growing
        self._open = {name for name, count in growing.items() if count > STUCK and name in network.vectors}
        self.reason = f"{', '.join(growing)} began at zero and is still growing" if growing else ""

    def waits(self, finding: Finding) -> bool:
        """Return whether a finding does not count yet.

        A gain that has left zero passes on some gradient, however small: a layer that still gets none is dead.
        """
        growing = self._growing.keys() - self._open if finding.check == "dead" else self._growing
        return bool(growing) and (finding.check in COMPARING or finding.layer in self._growing)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain types."""
        return {"growing": dict(self._growing), "from_zero": sorted(self.from_zero), "looked": self._looked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._growing, self.from_zero = dict(state["growing"]), set(state["from_zero"])
        self._looked = int(state["looked"])


def _has_grown(row: Row) -> bool:
    if row.info.role == "vector":
        return row.get("weight_natural") > GROWN
    return row.get("update_ratio") < GROWN


def _gates(network: Network) -> list[Row]:
    """Return the gains that may hold back the gradients of matrices, if some matrix gets none.

    SkipInit, ReZero and residual branches that end with a norm have such gains.
    """
    if not any(row.get("contribution") == 0 and row.lr > 0 for row in network.peers):
        return []
    return [row for name, row in network.vectors.items() if not name.endswith("bias")]


def _began_at_zero(measurement: Measurement, layer: str) -> bool:
    """Return whether the weights were zero before this step, or at the start."""
    keys = ("update_ratio", "drift_ratio")
    return any(key in measurement.values and measurement.why(key, layer) == ZERO for key in keys)
