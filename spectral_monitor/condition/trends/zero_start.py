"""Layers that began at zero: until they have grown, other layers get hardly any gradient and cannot be compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from spectral_monitor.condition.findings import Finding
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.row import Row
from spectral_monitor.measurement import ZERO, Measurement
from spectral_monitor.messages import joined

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
NOT_BEHIND_GAINS = frozenset({"dead", "rates_too_small"})
"""Those of them that only wait for gains until these have left zero."""
MAX_NAMES = 2
"""Largest number of growing layers that a reason names."""


class ZeroStartGate:
    """Holds back findings while layers grow from zero.

    A readout that began at zero passes no gradient down at the first step and little at the next ones. The same holds
    for any other matrix, or gain of a residual branch, that began at zero. A shift holds back nothing: the layers
    around it get gradients while it is still zero.

    Attributes:
        reason: why layers are not compared at the latest measurement; empty if they are.
        from_zero: layers that began at zero.
        late_layers: layers that got no gradient while those were zero, if these are less than half. They move late.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.from_zero: set[str] = set()
        self.late_layers: set[str] = set()
        self._growing: dict[str, int] = {}  # layer -> number of measurements it has been growing for
        self._open: set[str] = set()  # gains that have had enough time to leave zero
        self._looked = 0  # number of measurements with a learning rate above 0

    @property
    def awaited(self) -> str:
        """The end of a sentence on the layers that others wait for; it names at most :data:`MAX_NAMES`."""
        verb = "has" if len(self._growing) == 1 else "have"
        return f"{joined(list(self._growing), MAX_NAMES)} {verb} grown from zero"

    def look(self, measurement: Measurement, network: Network) -> None:
        """Find the layers that begin at zero, and those that have grown, at the next measurement."""
        sizes = {row.name: row.get("weight_natural") for row in (*network.rows, *_gates(network))}
        new = {name for name, size in sizes.items() if not size or _began_at_zero(measurement, name)} - self.from_zero
        self.from_zero |= new
        if new and network.top_lr > 0:
            still = {row.name for row in network.moved_by_rate if row.name not in new and not row.has_gradient}
            self.late_layers |= still if 2 * len(still) < len(network.moved_by_rate) else set()
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
            is_shift = row is not None and _is_shift(measurement, network, row)
            if count < (STUCK if stuck else GRACE) and not grown and not is_shift:
                growing[name] = count + 1
        self._growing = growing
        self._open = {name for name, count in growing.items() if count > STUCK and name in network.vectors}
        verb = "is" if len(growing) == 1 else "are"
        self.reason = f"{joined(list(growing), MAX_NAMES)} began at zero and {verb} still growing" if growing else ""

    def waits(self, finding: Finding) -> bool:
        """Return whether a finding does not count yet.

        A gain that has left zero passes on some gradient, however small: a layer that still gets none is dead. By then
        the largest steps so far, those of layers that no gain held back included, show whether rates are too small.
        """
        growing = self._growing.keys() - self._open if finding.check in NOT_BEHIND_GAINS else self._growing
        return bool(growing) and (finding.check in COMPARING or finding.layer in self._growing)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain types."""
        late = {"late": sorted(self.late_layers)} if self.late_layers else {}
        return {"growing": dict(self._growing), "from_zero": sorted(self.from_zero), "looked": self._looked, **late}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._growing, self.from_zero = dict(state["growing"]), set(state["from_zero"])
        self.late_layers = set(state.get("late", ()))
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


def _is_shift(measurement: Measurement, network: Network, row: Row) -> bool:
    """Return whether a parameter only shifts features, so that it holds back no gradient.

    A factor that is exactly zero leaves the matrices that it multiplies without a gradient. So the gradients of the
    matrices in the smallest module around it are looked at in a step that began with zero. The gain and the shift of a
    norm are recognized by their place: they are the only parameters of their module, and the gain is not zero.
    """
    if row.dense:
        return False
    return _is_shift_of_norm(network, row) or _lets_gradients_through(measurement, network, row)


def _is_shift_of_norm(network: Network, row: Row) -> bool:
    module, entries = row.name.rpartition(".")[0], math.prod(row.info.shape)
    parameters = (*network.rows, *network.vectors.values())
    others = [other for other in _within(module, parameters) if other is not row]
    return (
        entries > 1
        and [other.info.shape for other in others] == [row.info.shape]
        and others[0].get("weight_natural") > GROWN
    )


def _lets_gradients_through(measurement: Measurement, network: Network, row: Row) -> bool:
    is_zero = "update_ratio" in measurement.values and measurement.why("update_ratio", row.name) == ZERO
    if not is_zero or "contribution" not in measurement.values:
        return False
    trained = [other for other in network.rows if other.dense and other.is_trained]
    trained = [other for other in trained if not math.isnan(other.get("contribution"))]
    module, around = row.name, list[Row]()
    while module and not around:
        module = module.rpartition(".")[0]
        around = _within(module, trained)
    return bool(around) and all(other.has_gradient for other in around)


def _within(module: str, rows: Iterable[Row]) -> list[Row]:
    """Return the layers of a module, which is the whole model if its name is empty."""
    return [row for row in rows if not module or row.name == module or row.name.startswith(f"{module}.")]


def _began_at_zero(measurement: Measurement, layer: str) -> bool:
    """Return whether the weights were zero before this step, or at the start."""
    keys = ("update_ratio", "drift_ratio")
    return any(key in measurement.values and measurement.why(key, layer) == ZERO for key in keys)
