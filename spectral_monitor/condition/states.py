"""The state of every matrix at a measurement: off, healthy, or not judged, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from spectral_monitor.condition.network import Network
from spectral_monitor.condition.row import Row
from spectral_monitor.condition.settings import SpectralCondition
from spectral_monitor.condition.trends.movement import why_still
from spectral_monitor.condition.trends.zero_start import ZeroStartGate
from spectral_monitor.condition.verdict import Verdict
from spectral_monitor.measurement import HEALTHY, NOT_JUDGED, OFF, LayerState, Measurement

STANDS_OUT = "its size stands out, but no known cause explains it"
"""The reason why a layer is neither off nor healthy: most such layers train well."""


class JudgedMeasurement(NamedTuple):
    """A measurement and what the judge found out about it."""

    measurement: Measurement
    network: Network  # the network as the judge read it
    condition: SpectralCondition  # the limits of layers
    gate: ZeroStartGate  # knows which layers grow from zero
    compared: Set[str]  # layers whose size was compared
    unexplained: Set[str]  # layers that stand out for no known cause
    tied: Mapping[str, str]  # layer -> the layer that counts its parameters


def layer_states(judged: JudgedMeasurement, verdicts: Sequence[Verdict]) -> dict[str, LayerState]:
    """Return the state of each matrix at a judged measurement."""
    off: dict[str, str] = {}
    for verdict in verdicts:
        for name in verdict.layers:
            off.setdefault(name, f"follows from {verdict.root}" if verdict.root else verdict.cause)
    reason_for_all = why_still(judged.network)
    states = {}
    for info in judged.measurement.layers:
        if not info.is_matrix:
            continue
        row = judged.network.row(info.name) or _tied_row(judged, info.name)
        name = info.name if row is None else row.name
        if name in off:
            states[info.name] = LayerState(OFF, off[name])
        elif reason := reason_for_all or _why_not_judged(judged, row):
            states[info.name] = LayerState(NOT_JUDGED, reason)
        else:
            states[info.name] = LayerState(HEALTHY)
    return states


def _tied_row(judged: JudgedMeasurement, name: str) -> Row | None:
    """Return the layer that a tied one is judged as."""
    owner = judged.tied.get(name, name)
    names = [owner, *(tied for tied, other in judged.tied.items() if other == owner)]
    return next(filter(None, map(judged.network.row, names)), None)


def _why_not_judged(judged: JudgedMeasurement, row: Row | None) -> str:
    """Return why a layer is not judged at this measurement; empty if it is."""
    if row is None:
        return "tied to another layer"
    if row.settings.frozen:
        return "frozen"
    if judged.gate.reason and row.dense:
        return f"waits until {judged.gate.awaited}"
    theory = judged.condition.reference == "theory"
    needed = ("weight_natural",) if theory else ("update_natural", "update_ratio", "update_fro")
    if all(math.isnan(row.get(key)) for key in needed):
        keys = (key for key in ("update_natural", "update_ratio") if key in judged.measurement.values)
        return next((judged.measurement.why(key, row.name) for key in keys), "") or "its update was not measured"
    if row.name in judged.unexplained:
        return STANDS_OUT
    if row.settings.sizes_own_steps:
        return f"{row.settings.optimizer} chooses the size of its steps itself"
    return "" if row.name in judged.compared else "no other layer to compare it with"
