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
"""Stands among a step's quantities for the batch that ``feature_drift`` is measured on."""

STEP_LOSS = "step loss"
"""Stands there for the loss of the step's whole batch after the step, of which ``summary/edge`` is made."""

TURN = "turn"
"""Stands there at a step that is not due. It is measured if an optimizer steps that did not in the last due one."""

CLEARED = "cleared"
"""Stands there at a step after a measured one: whether gradients were cleared in between is seen at two steps in a row.
"""

COMPARED = frozenset(key for key, q in QUANTITIES.items() if "probe" in q.needs) - {"feature_drift"}
"""Quantities that compare features with those of the start, and are due by a count of their own."""


def still_due(due: frozenset[str], pending: frozenset[str]) -> frozenset[str]:
    """Return what is measured of a step, given what is due at it, and what is pending from steps before."""
    regular = any(keys - {CLEARED} and TURN not in keys for keys in (due, pending))
    return (due | pending) - ({TURN} if regular else frozenset())


class EngineState:
    """The part of an :class:`~spectral_monitor.engine.Engine` that outlives a step, and in plain types the process.

    Attributes:
        measured: steps measured so far.
        drifts: those of them that ``feature_drift`` was asked of.
        comparisons: those of them that other comparisons with the start's features were asked of.
        skipped_updates: of them, those with NaN, inf or no update.
        start_step: optimizer steps taken when the weights were remembered that drift is counted from.
        start_tried: whether a step was watched whose batch was to become the probe batch.
    """

    model: nn.Module
    settings: Settings
    asked: Settings
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
        self._parameters: dict[str, Tensor] = {}  # at the start, where the linearization is asked for
        self._start_norms: Raw = {}
        self._reasons: dict[tuple[str, ...], dict[str, str]] = {}

    def start(self, step: int = 0) -> None:
        """Remember the weights, after ``step`` steps, as those drift is counted from, in host memory."""
        self.start_step = step
        if self._linearized:
            with self._guard("remembering the start"):
                self._parameters = start_parameters(self.model)
        if "W0" in self.settings.needs:
            with self._guard("remembering the start"), full_precision(), torch.no_grad():
                run(agreed(self._begin(), self.processes), self.processes)

    def _drift_due(self) -> bool:
        """Return whether the probe batch is run again: at every n-th step that is asked for one of the two kinds."""
        keys = self.asked.keys
        counts = [self.drifts] if "feature_drift" in keys else []
        counts += [self.comparisons] if COMPARED & set(keys) and self.processes is None else []
        return any(count % self.settings.drift_every == 0 for count in counts)

    @property
    def _linearized(self) -> bool:
        return bool({"J0", "w0"} & self.settings.needs) and self.processes is None

    def _begin(self, start: dict[int, list[Tensor]] | None = None) -> Coroutine[None]:
        """Take some weights, or those of now, for those of the start, and measure their norms."""
        if start is None:
            start = {i: host_copies(m.now()) for i, m in enumerate(self.members) if m.layer.sources}
        self._start = start  # drift can be measured even if what follows fails
        norms = yield from start_norms(self.members, start, self.settings, self.processes)
        self._start_norms = norms.fetch()

    def _put_together(self, step: int, asked: Settings, facts: StepContext, raw: Raw) -> Measurement:
        for i, norms in self._start_norms.items():
            raw.setdefault(i, {}).update(norms)
        measurement = measurement_of(step, self.layers, asked, facts, raw, self._reasons, self.skipped_updates)
        self.skipped_updates = int(measurement.summary["skipped_updates"])
        return measurement

    def correct_roles(self, changed: Mapping[int, Layer]) -> None:
        """Put layers whose role has changed in the place of what they were."""
        if changed:
            self.layers = tuple(changed.get(i, layer) for i, layer in enumerate(self.layers))
            self.anatomy = replace(self.anatomy, layers=self.layers[: len(self.anatomy.layers)])
        for i, layer in changed.items():
            self.members[i] = replace(self.members[i], layer=layer)
            if i in self.features.capture.layers:
                self.features.capture.layers[i] = layer

    def state(self) -> dict[str, Any]:
        """Return the state without :meth:`tensors`: numbers, strings, lists."""
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

        Until the probe is taken they stay the same, and from then on.
        """
        return {
            "version": VERSION,
            "start": pack_start(self._start, self.members),
            "parameters": self._parameters,
            "probe": pack_probe(self.features.replays.probe, self.layers),
        }

    @property
    def start_due(self) -> bool:
        """True if the next step is to be watched, measured or not, as the start of ``feature_drift``."""
        return "probe" in self.settings.needs and not (self.start_tried or self.probe_taken)

    @property
    def probe_taken(self) -> bool:
        """True if there is a batch on which ``feature_drift`` is measured."""
        return self.features.replays.probe is not None

    def restore(
        self, state: dict[str, Any], tensors: dict[str, Any] | None, step: int, revive: Revive | None = None
    ) -> list[str]:
        """Go on where another engine was, instead of :meth:`start`.

        Args:
            state: what its :meth:`state` was.
            tensors: what its :meth:`tensors` were; ``None`` if they are lost.
            step: where a start is, if there has to be one.
            revive: makes the probe's forward of its plain form, where it may be more than a call of a module.

        Returns:
            What starts again, and why, one sentence each.

        Raises:
            ValueError: if the state is of another model or format; nothing has been changed then.
        """
        if reason := self.said_anywhere(refusal(state, self.anatomy.layers)):
            raise ValueError(reason)
        measured, drifts, skipped = int(state["measured"]), int(state["drifts"]), int(state["skipped_updates"])
        start_step, lasting, no_probe = int(state["start_step"]), list(state["lasting"]), str(state["no_probe"])
        anew: list[str] = []
        start: dict[int, list[Tensor]] | None = None
        if tensors is not None and "W0" in self.settings.needs:
            start, no_start = self._saved_start(tensors)
            anew += [f"drift is counted from here ({no_start})"] if no_start else []
        if tensors is not None and "probe" in self.settings.needs:
            no_probe = self._take_probe(tensors, no_probe, revive or self.revive)
            said = f"feature_drift is counted from here (the probe batch could not be kept: {no_probe})"
            anew += [said] if no_probe else []
        self.measured, self.drifts, self.skipped_updates = measured, drifts, skipped
        self.comparisons = int(state.get("comparisons", 0))
        if self.budget is not None and state["budget"] is not None:
            self.budget.load_state_dict(state["budget"], self.settings.keys)
        known = [*state["layers"], *state.get("nodes", ())]
        if known == layer_list(self.layers):  # layers have the numbers they had
            self.features.replays.subset.load_state_dict(state.get("slices"))
        self.features.capture.lasting = lasting
        if "roles" in state:
            self.correct_roles(self.features.readouts.load_state_dict(state["roles"]))
        kept = {} if tensors is None else dict(tensors.get("parameters", {}))
        if start is None:
            self.start(step)
        else:
            self.start_step = start_step
            with self._guard("remembering the start"), full_precision(), torch.no_grad():
                run(self._begin(start), self.processes)
        if self._linearized and self.probe_taken:
            self._parameters = kept  # those of now do not belong to the batch
        elif self._linearized:
            self._parameters = start_parameters(self.model)
        return anew

    def _saved_start(self, tensors: dict[str, Any]) -> tuple[dict[int, list[Tensor]] | None, str]:
        """Return the weights of the start; or ``None``, and why some process does not have all of its own."""
        start, error = None, ""
        try:
            start = unpack_start(tensors["start"], self.members)
        except ValueError as raised:
            error = str(raised)
        error = self.said_anywhere(error)
        return (None if error else start), error

    def _take_probe(self, tensors: dict[str, Any], no_probe: str, revive: Revive) -> str:
        """Take the probe batch that was saved, unless there is none; return why some process has none, if it should."""
        no_probe = no_probe or str(tensors.get("no_probe", ""))
        try:
            if tensors["probe"] is not None:
                self.features.replays.probe = unpack_probe(tensors["probe"], self.layers, revive)
        except Exception as error:
            no_probe = f"{type(error).__name__}: {error}"
        no_probe = self.said_anywhere(no_probe)
        if no_probe:
            self.features.replays.probe = None
        return no_probe

    def said_anywhere(self, reason: str) -> str:
        """Return a reason that some process has, empty if none has; all processes must call it at once."""
        said = [reason] if self.processes is None else self.processes.gather(reason)
        return next((text for text in said if text), "")

    def covered_by(self, tensors: dict[str, Any]) -> bool:
        """Return whether tensors hold the start of all that this process measures."""
        try:
            return "W0" not in self.settings.needs or bool(unpack_start(tensors["start"], self.members))
        except ValueError:
            return False

    def copied(self) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
        """Yield the names and parameters of the layers that every process holds whole."""
        for member in self.members:
            if member.layer.sources and member.holding.extent.spread == 1:
                yield member.layer.info.name, member.layer.sources

    def part_of(self, several: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Return, of what several processes saved, what this one goes on from, and its tensors.

        That is its own, if that will do; else the first one, with the tensors of all put together.
        """
        rank, count = (0, 1) if self.processes is None else (self.processes.rank, self.processes.size)
        mine = several[rank if len(several) == count else 0]
        if len(several) == 1 or (len(several) == count and self.covered_by(mine["tensors"])):
            return mine, mine["tensors"]
        return mine, self.merged([one["tensors"] for one in several])

    def merged(self, several: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the :meth:`tensors` of several processes as those of one; a probe batch stays with its process."""
        start: dict[str, list[Any]] = {}
        for tensors in several:
            for name, pieces in tensors["start"].items():
                start.setdefault(name, []).extend(pieces)
        lost = any(tensors["probe"] is not None for tensors in several)
        why = f"it was that of {len(several)} processes, trained in another way" if lost else ""
        return {"version": VERSION, "start": start, "probe": None, "no_probe": why}

    def revive(self, packed: dict[str, Any]) -> RootCall:
        """Return a module call from its plain form.

        Raises:
            ValueError: it was something else.
        """
        if packed["kind"] != "call":
            raise ValueError(f"a {packed['kind']} cannot be run here")
        return RootCall.unpack(packed, self.model)
