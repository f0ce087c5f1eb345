"""The engine's state: the weights at the start, the probe batch, and counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from spectral_monitor.capture.replay.replay import RootCall
from spectral_monitor.engine.agreement.rank_report import agreed
from spectral_monitor.engine.features.linearization import start_parameters
from spectral_monitor.engine.features.watch import FeatureWatch
from spectral_monitor.engine.guards import FailureGuard, full_precision
from spectral_monitor.engine.overhead_budget import Budget
from spectral_monitor.engine.results.measurement import measurement_of
from spectral_monitor.engine.results.raw import Raw
from spectral_monitor.engine.results.reasons import StepContext
from spectral_monitor.engine.settings import Settings
from spectral_monitor.engine.state_dict import (
    VERSION,
    Revive,
    layer_list,
    pack_probe,
    pack_start,
    refusal,
    unpack_probe,
    unpack_start,
)
from spectral_monitor.engine.weights.matrix_batches import BatchMember, host_copies
from spectral_monitor.engine.weights.stage import start_norms
from spectral_monitor.layers import Anatomy, Layer
from spectral_monitor.linalg import Coroutine, run
from spectral_monitor.measurement import Measurement
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.sharding import ProcessGroup

START = "start"
"""Key among a step's quantities: its batch becomes the one that ``feature_drift`` is measured on."""

STEP_LOSS = "step loss"
"""Key among a step's quantities: the loss of its whole batch after the step, from which ``summary/edge`` follows."""

TURN = "turn"
"""Key of a step that is not due: measure it if an optimizer steps that did not step in the last due one."""

CLEARED = "cleared"
"""Key of the step after a measured one: observe whether gradients were cleared in between."""

COMPARED = frozenset(key for key, q in QUANTITIES.items() if "probe" in q.needs) - {"feature_drift"}
"""Quantities other than ``feature_drift`` that compare features with those of the start; they have their own count."""


def still_due(due: frozenset[str], pending: frozenset[str]) -> frozenset[str]:
    """Return the keys of a step, from those due at it and those pending from earlier steps."""
    regular = any(keys - {CLEARED} and TURN not in keys for keys in (due, pending))
    return (due | pending) - ({TURN} if regular else frozenset())


class EngineState:
    """The part of an :class:`~spectral_monitor.engine.Engine` that outlives a step, and can be saved in plain types.

    Attributes:
        measured: number of measured steps.
        drifts: number of those with ``feature_drift``.
        comparisons: number of those with other comparisons with the features of the start.
        skipped_updates: number of those with NaN, inf or no update.
        start_step: optimizer steps before the weights were copied that drift is counted from.
        start_tried: whether a step was watched whose batch was to become the probe batch.
    """

    model: nn.Module
    settings: Settings
    requested: Settings
    processes: ProcessGroup | None
    anatomy: Anatomy
    layers: tuple[Layer, ...]
    members: list[BatchMember]
    features: FeatureWatch
    budget: Budget | None
    _guard: FailureGuard

    def __init__(self) -> None:
        self.measured = 0
        self.drifts = 0
        self.comparisons = 0
        self.skipped_updates = 0
        self.start_step = 0
        self.start_tried = False
        self._start: dict[int, list[Tensor]] = {}
        self._parameters: dict[str, Tensor] = {}  # at the start, if the linearization is measured
        self._start_norms: Raw = {}
        self._reasons: dict[tuple[str, ...], dict[str, str]] = {}

    def start(self, step: int = 0) -> None:
        """Copy the weights that drift is counted from, after ``step`` steps, to host memory."""
        self.start_step = step
        if self._linearized:
            with self._guard("keeping the initial state"):
                self._parameters = start_parameters(self.model)
        if "W0" in self.settings.needs:
            with self._guard("keeping the initial state"), full_precision(), torch.no_grad():
                run(agreed(self._set_start(), self.processes), self.processes)

    def _drift_due(self) -> bool:
        """Return whether the probe batch is run again: at every n-th step with ``feature_drift`` or comparisons."""
        keys = self.requested.keys
        counts = [self.drifts] if "feature_drift" in keys else []
        counts += [self.comparisons] if COMPARED & set(keys) and self.processes is None else []
        return any(count % self.settings.drift_every == 0 for count in counts)

    @property
    def _linearized(self) -> bool:
        return bool({"J0", "w0"} & self.settings.needs) and self.processes is None

    def _set_start(self, start: dict[int, list[Tensor]] | None = None) -> Coroutine[None]:
        """Take ``start``, or the current weights, as those of the start, and measure their norms."""
        if start is None:
            start = {i: host_copies(m.current()) for i, m in enumerate(self.members) if m.layer.sources}
        self._start = start  # before the norms, so that drift can be measured even if they fail
        norms = yield from start_norms(self.members, start, self.settings, self.processes)
        self._start_norms = norms.fetch()

    def _assemble(self, step: int, requested: Settings, facts: StepContext, raw: Raw) -> Measurement:
        for i, norms in self._start_norms.items():
            raw.setdefault(i, {}).update(norms)
        measurement = measurement_of(step, self.layers, requested, facts, raw, self._reasons, self.skipped_updates)
        self.skipped_updates = int(measurement.summary["skipped_updates"])
        return measurement

    def correct_roles(self, changed: Mapping[int, Layer]) -> None:
        """Replace layers by those whose role has changed."""
        if changed:
            self.layers = tuple(changed.get(i, layer) for i, layer in enumerate(self.layers))
            self.anatomy = replace(self.anatomy, layers=self.layers[: len(self.anatomy.layers)])
        for i, layer in changed.items():
            self.members[i] = replace(self.members[i], layer=layer)
            if i in self.features.capture.layers:
                self.features.capture.layers[i] = layer

    def state(self) -> dict[str, Any]:
        """Return the state except for :meth:`tensors`: numbers, strings, lists."""
        probe = self.features.replays.probe
        return {
            "version": VERSION,
            "layers": layer_list(self.anatomy.layers),
            "nodes": layer_list(self.anatomy.nodes),
            "measured": self.measured,
            "drifts": self.drifts,
            "comparisons": self.comparisons,
            "skipped_updates": self.skipped_updates,
            "start_step": self.start_step,
            "lasting": self.features.capture.lasting,
            "no_probe": "" if probe is None else probe.pack_error,
            "budget": None if self.budget is None else self.budget.state_dict(),
            "slices": self.features.replays.subset.state_dict(),
            "roles": self.features.readouts.state_dict(),
        }

    def tensors(self) -> dict[str, Any]:
        """Return the starting weights and the probe batch: plain types and CPU tensors, shared, not copied.

        They change only when the probe batch is taken.
        """
        return {
            "version": VERSION,
            "start": pack_start(self._start, self.members),
            "parameters": self._parameters,
            "probe": pack_probe(self.features.replays.probe, self.layers),
        }

    @property
    def start_due(self) -> bool:
        """True if the next step must be watched, due or not, for the probe batch of ``feature_drift``."""
        return "probe" in self.settings.needs and not (self.start_tried or self.probe_taken)

    @property
    def probe_taken(self) -> bool:
        """True if there is a batch on which ``feature_drift`` is measured."""
        return self.features.replays.probe is not None

    def restore(
        self, state: dict[str, Any], tensors: dict[str, Any] | None, step: int, revive: Revive | None = None
    ) -> list[str]:
        """Continue from the state of another engine, instead of :meth:`start`.

        Args:
            state: its :meth:`state`.
            tensors: its :meth:`tensors`; ``None`` if they are lost.
            step: optimizer steps taken, if drift has to be counted from here.
            revive: makes the probe's forward from its plain form, if it may be more than a call of a module.

        Returns:
            A sentence for each quantity that starts again, with the reason.

        Raises:
            ValueError: the state is of another model or format; nothing has been changed.
        """
        if reason := self.first_reason(refusal(state, self.anatomy.layers)):
            raise ValueError(reason)
        measured, drifts, skipped = int(state["measured"]), int(state["drifts"]), int(state["skipped_updates"])
        start_step, lasting, no_probe = int(state["start_step"]), list(state["lasting"]), str(state["no_probe"])
        restarts: list[str] = []
        start: dict[int, list[Tensor]] | None = None
        if tensors is not None and "W0" in self.settings.needs:
            start, no_start = self._saved_start(tensors)
            restarts += [f"drift is counted from here ({no_start})"] if no_start else []
        if tensors is not None and "probe" in self.settings.needs:
            no_probe = self._take_probe(tensors, no_probe, revive or self.revive)
            message = f"feature_drift is counted from here (the probe batch could not be kept: {no_probe})"
            restarts += [message] if no_probe else []
        self.measured, self.drifts, self.skipped_updates = measured, drifts, skipped
        self.comparisons = int(state.get("comparisons", 0))
        if self.budget is not None and state["budget"] is not None:
            self.budget.load_state_dict(state["budget"], self.settings.keys)
        if [*state["layers"], *state.get("nodes", ())] == layer_list(self.layers):  # the same indices of layers
            self.features.replays.subset.load_state_dict(state.get("slices"))
        self.features.capture.lasting = lasting
        if "roles" in state:
            self.correct_roles(self.features.readouts.load_state_dict(state["roles"]))
        parameters = {} if tensors is None else dict(tensors.get("parameters", {}))
        if start is None:
            self.start(step)
        else:
            self.start_step = start_step
            with self._guard("keeping the initial state"), full_precision(), torch.no_grad():
                run(self._set_start(start), self.processes)
        if self._linearized and self.probe_taken:
            self._parameters = parameters  # the current ones do not belong to the probe batch
        elif self._linearized:
            self._parameters = start_parameters(self.model)
        return restarts

    def _saved_start(self, tensors: dict[str, Any]) -> tuple[dict[int, list[Tensor]] | None, str]:
        """Return the weights of the start, or ``None`` and the reason if they are incomplete in any process."""
        start, error = None, ""
        try:
            start = unpack_start(tensors["start"], self.members)
        except ValueError as raised:
            error = str(raised)
        error = self.first_reason(error)
        return (None if error else start), error

    def _take_probe(self, tensors: dict[str, Any], no_probe: str, revive: Revive) -> str:
        """Take the saved probe batch, if there is one; return why it is missing in a process, if it should not be."""
        no_probe = no_probe or str(tensors.get("no_probe", ""))
        try:
            if tensors["probe"] is not None:
                self.features.replays.probe = unpack_probe(tensors["probe"], self.layers, revive)
        except Exception as error:
            no_probe = f"{type(error).__name__}: {error}"
        no_probe = self.first_reason(no_probe)
        if no_probe:
            self.features.replays.probe = None
        return no_probe

    def first_reason(self, reason: str) -> str:
        """Return the first process's reason that is not empty; all processes must call it together."""
        reasons = [reason] if self.processes is None else self.processes.gather(reason)
        return next(filter(None, reasons), "")

    def covered_by(self, tensors: dict[str, Any]) -> bool:
        """Return whether tensors hold the starting weights of everything that this process measures."""
        try:
            return "W0" not in self.settings.needs or bool(unpack_start(tensors["start"], self.members))
        except ValueError:
            return False

    def replicated(self) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
        """Yield the names and parameters of the layers that every process holds in full."""
        for member in self.members:
            if member.layer.sources and member.holding.extent.spread == 1:
                yield member.layer.info.name, member.layer.sources

    def part_of(self, states: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Return the state and the tensors that this process continues from, of those that several processes saved.

        The state is its own, or the first one if the number of processes has changed. The tensors are those of the
        state if they cover the weights of this process, else the merged ones of all.
        """
        rank, count = (0, 1) if self.processes is None else (self.processes.rank, self.processes.size)
        state = states[rank if len(states) == count else 0]
        if len(states) == 1 or (len(states) == count and self.covered_by(state["tensors"])):
            return state, state["tensors"]
        return state, self.merged([saved["tensors"] for saved in states])

    def merged(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the :meth:`tensors` of several processes as those of one; probe batches are dropped."""
        start: dict[str, list[Any]] = {}
        for tensors in parts:
            for name, pieces in tensors["start"].items():
                start.setdefault(name, []).extend(pieces)
        lost = any(tensors["probe"] is not None for tensors in parts)
        reason = f"it was saved by {len(parts)} processes that were trained in another way" if lost else ""
        return {"version": VERSION, "start": start, "probe": None, "no_probe": reason}

    def revive(self, packed: dict[str, Any]) -> RootCall:
        """Return a call of the model from its plain form; raise ValueError for that of anything else."""
        if packed["kind"] != "call":
            raise ValueError(f"a {packed['kind']} cannot be run here")
        return RootCall.unpack(packed, self.model)
