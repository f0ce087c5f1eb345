"""One measured step from end to end; Lightning and plain loops only say when."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spectral_monitor.anatomy import compiled_modules, dissect, without_compiled
from spectral_monitor.anatomy.names import label
from spectral_monitor.capture.features import FeatureCapture, Marks, marks
from spectral_monitor.capture.optimizer import OptimizerCapture
from spectral_monitor.capture.replay import RootCall
from spectral_monitor.engine.activations import gradients, input_rows, inputs, measure_forward
from spectral_monitor.engine.assemble import sound, summarize
from spectral_monitor.engine.guards import full_precision, refuse
from spectral_monitor.engine.matrices import MatrixStage, start_norms
from spectral_monitor.engine.replays import Again, Context, Replays
from spectral_monitor.engine.rows import StepFacts, layer_row
from spectral_monitor.engine.scalars import NETWORK, Raw, Scalars
from spectral_monitor.engine.settings import Settings
from spectral_monitor.engine.state import (
    VERSION,
    Revive,
    layer_list,
    pack_probe,
    pack_start,
    refusal,
    unpack_probe,
    unpack_start,
)
from spectral_monitor.measurement import Measurement
from spectral_monitor.warnings import Warner

FORWARD = frozenset({"h", "b", "dh", "probe"})
"""Needs that take hooks on modules."""


class Engine:
    """Arms hooks for one step, reads it, computes a :class:`~spectral_monitor.measurement.Measurement`.

    Use: ``start`` once; around a step ``arm``, then ``finish``, or ``disarm`` to give up. Between steps nothing is
    registered anywhere. Whatever goes wrong inside costs the measurement, never the training step.

    Raises:
        ValueError: patterns, roles or blocks that do not fit; feature quantities with LBFGS.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], settings: Settings) -> None:
        self.model = model
        self.settings = settings
        patterns = {key: getattr(settings, key) for key in ("include", "exclude", "roles", "blocks")}
        self.anatomy = dissect(model, **patterns)
        compiled = ""
        if settings.needs & FORWARD:
            refuse(optimizers)
            modules = compiled_modules(model)
            self.anatomy = without_compiled(self.anatomy, modules.values())
            compiled = ", ".join(label(name, module) for name, module in modules.items())
        self.layers = self.anatomy.layers
        self.optimizers = OptimizerCapture(optimizers, self._enter, self._before, self._ready, self._after)
        wanted = range(len(self.layers)) if settings.needs & FORWARD else ()
        self.features = FeatureCapture(model, self.layers, wanted, settings.max_rows, self._harmless)
        self._replays = Replays(model, self.features, settings.needs, settings.drift_every, compiled)
        self.armed = False
        self.measured = 0
        self.skipped_updates = 0
        self.start_step = 0
        self._start: dict[int, Tensor] = {}
        self._start_norms: Raw = {}
        self._reasons: dict[str, str] = {}
        self._warn = Warner()
        self._clear()

    def _clear(self) -> None:
        self._failed = False
        self._spent = 0.0
        self._held_at: dict[int, Marks] = {}
        self._moved = False
        self._out = Scalars()
        self._stage = MatrixStage(self.layers, self.settings, self._start, self._inputs, self._out)

    def start(self, step: int = 0) -> None:
        """Remember the weights, after ``step`` steps, as those drift is counted from, in host memory."""
        self.start_step = step
        if "W0" in self.settings.needs:
            with self._harmless("remembering the start"), full_precision():
                self._start = {i: layer.weight().to("cpu", copy=True) for i, layer in enumerate(self.layers)}
                self._start_norms = start_norms(self.layers, self._start, self.settings.tol)

    def state(self) -> dict[str, Any]:
        """What it takes to go on from here, but for :meth:`tensors`: numbers, strings, lists."""
        probe = self._replays.probe
        return {
            "version": VERSION,
            "layers": layer_list(self.layers),
            "measured": self.measured,
            "skipped_updates": self.skipped_updates,
            "start_step": self.start_step,
            "lasting": self.features.lasting,
            "no_probe": "" if probe is None else probe.why_not,
        }

    def tensors(self) -> dict[str, Any]:
        """The weights drift is counted from and the probe batch: plain types and CPU tensors, shared, not copied.

        Until the probe is taken they stay the same, and from then on.
        """
        return {
            "version": VERSION,
            "start": pack_start(self._start, self.layers),
            "probe": pack_probe(self._replays.probe, self.layers),
        }

    @property
    def probe_taken(self) -> bool:
        """Whether there is a batch that ``feature_drift`` is measured on."""
        return self._replays.probe is not None

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
            What starts anew, and why, one sentence each.

        Raises:
            ValueError: if the state is of another model or format; nothing has been changed then.
        """
        reason = refusal(state, self.layers)
        if reason:
            raise ValueError(reason)
        measured, skipped = int(state["measured"]), int(state["skipped_updates"])
        start_step, lasting, no_probe = int(state["start_step"]), list(state["lasting"]), str(state["no_probe"])
        anew: list[str] = []
        start: dict[int, Tensor] | None = None
        if tensors is not None and "W0" in self.settings.needs:
            try:
                start = unpack_start(tensors["start"], self.layers)
            except ValueError as error:
                anew.append(f"drift is counted from here ({error})")
        if tensors is not None and "probe" in self.settings.needs:
            try:
                if tensors["probe"] is not None:
                    make = revive or self.revive
                    self._replays.probe = unpack_probe(tensors["probe"], self.layers, make)
            except Exception as error:
                no_probe = f"{type(error).__name__}: {error}"
            if no_probe:
                anew.append(f"feature_drift is counted from here (the probe batch could not be kept: {no_probe})")
        self.measured, self.skipped_updates = measured, skipped
        self.features.lasting = lasting
        if start is None:
            self.start(step)
        else:
            self.start_step = start_step
            with self._harmless("remembering the start"):
                self._start = start
                self._start_norms = start_norms(self.layers, start, self.settings.tol)
        return anew

    def revive(self, packed: dict[str, Any]) -> RootCall:
        """A module call of its plain form.

        Raises:
            ValueError: it was something else.
        """
        if packed["kind"] != "call":
            raise ValueError(f"a {packed['kind']} cannot be run here")
        return RootCall.unpack(packed, self.model)

    def arm(self, before_forward: Callable[[], None] = lambda: None) -> None:
        """Register the hooks that watch the coming step.

        Args:
            before_forward: called before the forward, if that runs inside the optimizer's step.
        """
        self.disarm()
        self.armed = True
        self._before_forward = before_forward
        with self._harmless("setting up"):
            self.features.arm()
            self.optimizers.arm()

    @property
    def stepped(self) -> bool:
        """Whether any optimizer has stepped since the hooks were registered."""
        return bool(self._stage.stepped)

    def disarm(self) -> None:
        """Remove every hook and forget what was recorded; safe to call at any time."""
        self.armed = False
        self.optimizers.disarm()
        self.features.disarm()
        self._clear()

    def finish(
        self,
        step: int,
        *,
        training_step: Again | None = None,
        loss: Tensor | None = None,
        accumulated: int = 1,
        loss_scale: float = 1.0,
        context: Context = nullcontext,
    ) -> Measurement | None:
        """Measure the step that was watched, and disarm.

        Args:
            step: optimizer steps taken, this one included.
            training_step: runs the forward of the whole training step again, for models called in several parts.
            loss: what the backward pass started from, to tell whether the loss a model returns is that one.
            accumulated: what the model's loss was divided by to become that.
            loss_scale: what it was multiplied by before the backward pass, to keep half precision from underflow.
            context: precision the replayed forward runs under, besides the autocast that was recorded.

        Returns:
            ``None`` if the step could not be measured; a warning has said why.
        """
        measurement = None
        try:
            with self._harmless("measuring"), full_precision():
                if self.armed and not self._failed:
                    measurement = self._measure(step, training_step, loss, accumulated, loss_scale, context)
            if measurement is not None:
                measurement.summary["overhead_ms"] = self._spent * 1e3
        finally:
            self.disarm()
        return measurement

    def _measure(
        self,
        step: int,
        training_step: Again | None,
        loss: Tensor | None,
        accumulated: int,
        loss_scale: float,
        context: Context,
    ) -> Measurement:
        calls, stage, out = self.features.calls, self._stage, self._out
        stage.rest()
        facts = StepFacts(stage.lr, stage.stepped, stage.unused, stage.divided)
        facts.accumulated, facts.loss_scale, facts.moved = accumulated, loss_scale, self._moved
        facts.closures = max(self.optimizers.closure_calls.values(), default=0)
        facts.called = set(calls)
        facts.fed = {i for i, recorded in calls.items() if all(h_in is not None for h_in in inputs(recorded))}
        facts.graded = {i for i, recorded in calls.items() if all(b is not None for b in gradients(recorded))}
        facts.eps = {i: max(call.eps for call in recorded) for i, recorded in calls.items()}
        losses = None
        if self.settings.needs & FORWARD:
            self._check_readout()
            outputs = self.features.outputs()
            facts.lasted = set(outputs)
            measure_forward(calls, outputs, self.settings, out)
            self.features.drop_inputs()
            losses = self._replays.run(self.measured, outputs, facts, out, training_step, loss, context, self._warn)
        if losses is not None:
            out.put(NETWORK, "loss_change", losses[1].double() - losses[0].double())
        raw = out.fetch()
        for i, norms in self._start_norms.items():
            raw.setdefault(i, {}).update(norms)
        network = raw.get(NETWORK, {})
        facts.rewritten = any(any(value) for name, value in network.items() if name.startswith("g.changed"))

        rows, reasons = [], {}
        for i, layer in enumerate(self.layers):
            row, missing = layer_row(i, layer, self.settings.keys, raw, facts)
            rows.append(row)
            reasons.update({f"{key}/{layer.info.name}": reason for key, reason in missing.items()})
        if reasons != self._reasons:  # mostly they stay the same, and then one copy serves the whole history
            self._reasons = reasons
        values = {key: torch.tensor([row[key] for row in rows], dtype=torch.float32) for key in self.settings.keys}
        summary = summarize(values, self.layers, raw)
        if facts.rewritten or facts.closures > 1:
            summary["loss_change_predicted"] = math.nan
        if "dh" in self.settings.needs:
            summary["loss_change"] = network["loss_change"][0] if losses is not None else math.nan
        self.skipped_updates += not (stage.stepped - stage.unused) or not all(map(sound, raw.values()))
        summary["skipped_updates"] = float(self.skipped_updates)
        self.measured += 1
        return Measurement(step, self.anatomy.infos, values, summary, reasons=self._reasons)

    def _inputs(self, i: int) -> Tensor | None:
        return input_rows(self.features.calls.get(i, ()))

    def _enter(self, optimizer: Optimizer) -> None:
        with self._harmless("remembering the batch"):
            self._before_forward()

    def _before(self, optimizer: Optimizer) -> None:
        with self._harmless("copying the weights"), full_precision():
            self._stage.before(optimizer)
            if self.features.layers:
                parameters = (p for group in optimizer.param_groups for p in group["params"])
                self._held_at[id(optimizer)] = marks(parameters)

    def _ready(self, optimizer: Optimizer) -> None:
        with self._harmless("looking at the gradients"):
            self._stage.ready(optimizer)
            self.features.drop_unfinished()
            if self.features.weights:
                then, now = self._held_at[id(optimizer)], self.features.weights
                self._moved |= any(now.get(p, mark) != mark for p, mark in then.items())
            if len(self.optimizers.optimizers) == 1:
                self.features.forward_open = self.features.backward_open = False

    def _after(self, optimizer: Optimizer) -> None:
        with self._harmless("measuring the update"), full_precision():
            if not self._failed:
                self._stage.after(optimizer)
            self.features.settled |= self._stage.stepped

    def _check_readout(self) -> None:
        """Say so if the readout, a guess by place, was not the last operator that ran."""
        if len(self.optimizers.optimizers) > 1:
            return  # several networks, which have no last operator in common
        order = [i for i in self.features.order if self.layers[i].info.role in ("operator", "readout")]
        guessed = [i for i in order if "by its place" in self.layers[i].note]
        if guessed and order[-1] not in guessed:
            last, taken = self.layers[order[-1]].info.name, self.layers[guessed[-1]].info.name
            self._warn(f"{taken!r} is taken for the readout, but {last!r} ran last; say roles={{{last!r}: 'readout'}}")

    @contextmanager
    def _harmless(self, what: str) -> Iterator[None]:
        """Count the time inside, and turn any error into one warning and a step that is not measured."""
        begin, spent = time.perf_counter(), self._spent
        try:
            yield
        except Exception as error:
            first, self._failed = not self._failed, True
            if first:  # the others follow from it
                self._warn(f"a step was not measured: {what} failed with {type(error).__name__}: {error}", error)
        finally:
            self._spent = spent + time.perf_counter() - begin  # what ran inside has counted itself too
