"""When layers cannot be compared yet: the learning rate warms up, or a layer that began at zero is still growing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from spectral_monitor.condition.checks import Finding
from spectral_monitor.condition.network import Network
from spectral_monitor.measurement import Measurement

GRACE = 15
"""Measurements that a warm-up may take, twice that to grow from zero; a fault must not hide behind it for long."""
RISEN, GROWN = 1.001, 1.05
"""From one measurement to the next: a learning rate that is rising, weights that are growing."""


COMPARING = frozenset({"reference", "weights", "dead"})
"""Checks that mean nothing while some matrix is next to zero, and passes next to no gradient on."""


class StartUp:
    """What is not to be judged yet.

    A readout that began at zero passes no gradient down at the first step and little at the next ones, so all layers
    wait for it; the same goes for any other matrix that began at zero.

    Attributes:
        why: the reason that layers are not compared at the latest measurement; empty if they are.
        from_zero: names of the layers that began at zero.
    """

    def __init__(self) -> None:
        self.why = ""
        self.from_zero: set[str] = set()
        self._rates = self._sizes = 0  # measurements that have learning rates, sizes of weights
        self._top_lr = math.nan
        self._rising = False
        self._growing: dict[str, float] = {}

    def look(self, measurement: Measurement, network: Network) -> None:
        """See the next measurement; what it does not have stays as it was seen last."""
        sizes = {row.info.name: row.get("weight_natural") for row in network.rows}
        new = {name for name, size in sizes.items() if size == 0 or _began_at_zero(measurement, name)} - self.from_zero
        self.from_zero |= new
        if self._sizes < GRACE:
            self._growing |= dict.fromkeys(new, 0.0)
        if network.top_lr == 0:  # before a warm-up
            self.why = "all learning rates are 0"
            return
        if "lr" in measurement.values:
            self._rates += 1
            self._rising = network.top_lr > RISEN * self._top_lr and self._rates <= GRACE
            self._top_lr = network.top_lr
        if "weight_natural" in measurement.values or (self._growing and all(map(math.isnan, sizes.values()))):
            self._grow(sizes)
        self.why = ""
        if self._growing:
            self.why = f"{', '.join(self._growing)} began at zero and is still growing"
        elif self._rising:
            self.why = "the learning rate is warming up"

    def _grow(self, sizes: Mapping[str, float]) -> None:
        self._sizes += 1
        kept = {}
        for name, before in self._growing.items():
            size = sizes[name]
            # Still zero: what follows it began at zero too, and passed no gradient on.
            if not size or size > GROWN * before:
                kept[name] = size
            elif math.isnan(size):  # not measured yet
                kept[name] = before
        self._growing = kept
        if self._sizes > GRACE:
            late = self._sizes > 2 * GRACE
            self._growing = {name: size for name, size in self._growing.items() if size > 0 and not late}

    def waits(self, finding: Finding) -> bool:
        """Whether a finding of this measurement does not count yet."""
        if self._growing:
            return finding.check in COMPARING or finding.layer in self._growing
        return bool(self.why) and finding.check == "reference" and not finding.suspected

    def state_dict(self) -> dict[str, Any]:
        """Plain types."""
        counts = {"rates": self._rates, "sizes": self._sizes}
        growth = {"growing": dict(self._growing), "from_zero": sorted(self.from_zero)}
        return {**counts, "rising": self._rising, "top_lr": self._top_lr, **growth}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._rates, self._sizes = int(state["rates"]), int(state["sizes"])
        self._rising, self._top_lr = bool(state["rising"]), float(state["top_lr"])
        self._growing, self.from_zero = dict(state["growing"]), set(state["from_zero"])


def _began_at_zero(measurement: Measurement, layer: str) -> bool:
    """Whether the weights were zero before this step, which is the first one that says so, or at the start."""
    if "update_ratio" in measurement.values and "zero" in measurement.why("update_ratio", layer):
        return True
    return "drift_ratio" in measurement.values and "zero" in measurement.why("drift_ratio", layer)
