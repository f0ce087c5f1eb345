"""Forwards after the step: once more on the same batch, and now and then on the probe batch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from spectral_monitor.capture.hooks.forward import FeatureCapture
from spectral_monitor.capture.hooks.recording import Watcher
from spectral_monitor.capture.replay.batch_slicing import batch_size
from spectral_monitor.capture.replay.eager_pass import LossGradient
from spectral_monitor.capture.replay.feature_change import Outputs, Replay, first_outputs
from spectral_monitor.capture.replay.graph_replay import sees_all_modules, unseen
from spectral_monitor.capture.replay.replay import Repeatable, Replayable, RootCall, why_not
from spectral_monitor.capture.replay.sample_independence import (
    ExchangeCheck,
    IndependenceCheck,
    SampleCheck,
    SeparateRun,
)
from spectral_monitor.engine.features.replay_subset import DRAWN, DRAWS, NO, UNSEEN, YES, ReplaySubset
from spectral_monitor.engine.features.step_inputs import Context, StepInputs
from spectral_monitor.engine.results.reasons import MOVED, StepContext
from spectral_monitor.engine.settings import Settings
from spectral_monitor.layers.naming import label
from spectral_monitor.messages import WarnOnce
from spectral_monitor.sharding import call_through, reshard
from spectral_monitor.state.snapshot import preserved

INLINED = "called inside a function that is compiled, where its features cannot be seen"
"""Why a layer has none where the call that led to the step cannot be run again eagerly."""


@dataclass(frozen=True)
class Probe:
    """The first batch of the run: how to run it again, and what the layers' outputs were.

    ``part``: whether these are its first samples only. ``packed`` is the first of these in plain types; ``None`` if
    that cannot be, for ``why_not``.
    """

    again: Replayable
    outputs: Outputs
    part: bool
    packed: dict[str, Any] | None
    why_not: str = ""


@dataclass(frozen=True)
class ReplayResult:
    """A forward that was run again; no replay if it failed. The loss is kept of the same batch only."""

    replay: Replay | None = None
    loss: Tensor | None = None


@dataclass(frozen=True)
class ReplayOutcome:
    """Forwards that were run: on the same batch, on the probe batch; ``None`` if there was nothing to run.

    ``first``: whether the batch has just become the probe batch.
    """

    same: ReplayResult | None = None
    drift: ReplayResult | None = None
    first: bool = False


class Replays:
    """Runs forwards again without a trace; what is ``compiled``, beside the step or not at all.

    Attributes:
        needs: what must be captured of the step.
        slices: of which samples forwards are run.
        probe: the batch ``feature_drift`` is measured on, once there is one.
        done: what the last run came to.
        looked: whether there was a pass beside the step that is watched.
        whole: the training step that is watched, and where its backward pass began, where that is known.
        unseen: why the pass beside the step saw nothing, if there was to be one.
    """

    def __init__(
        self,
        model: nn.Module,
        wrapper: nn.Module,
        features: FeatureCapture,
        settings: Settings,
        compiled: str,
        warn: WarnOnce,
        warn_here: WarnOnce,
    ) -> None:
        """``wrapper``: what is called in the model's place, to have its weights whole; the model if there is none;
        ``warn_here``: tells what happened in this process alone.
        """
        self._model = model
        self._wrapper = wrapper
        self._features = features
        self._warn, self._warn_here = warn, warn_here
        self._drift_every = settings.drift_every
        self._compiled = compiled
        self._host = settings.low_memory
        self.slices = ReplaySubset(settings.replay_samples, model)
        self.probe: Probe | None = None
        self.done = ReplayOutcome()
        self.begin(settings.needs, StepContext())

    def begin(self, needs: frozenset[str], facts: StepContext) -> None:
        """Begin a step of which ``needs`` must be captured; ``facts`` are told why something was not run again."""
        self.needs, self._facts = needs, facts
        self.looked, self.unseen = False, ""
        self.whole: tuple[Replayable, LossGradient] | None = None

    def look_aside(self, around: Context) -> None:
        """Record features of the step that were not seen in a pass of their own, before the optimizer steps.

        ``around``: who else wants to see it.
        """
        hidden, inlined = self._features.hidden_layers, self._features.inlined
        self.looked, noticed = True, sees_all_modules()
        if inlined and (self.whole is None or not self._features.refined):
            self.unseen = INLINED
            self._warn_here(f"the model is {INLINED}; if it is torch.compile(model), give that instead of the model")
            return
        if noticed or not (hidden or (self._features.halved and not self.slices.off)):
            self.unseen = noticed if hidden else ""
            return
        try:
            with preserved(self._model, host=self._host), unseen(self._model, ()):
                why = self._features.look_aside(around, self.whole)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            if hidden:
                self._warn_here(f"{self._beyond(why)}; no features are measured", error)
        if hidden and why:  # otherwise there is what was seen
            self.unseen = self._beyond(why)

    def _beyond(self, why: str) -> str:
        return f"{self._compiled or 'what calls the model'} is compiled, and could not be run eagerly: {why}"

    def choose(self, given: StepInputs, moved: bool) -> tuple[Replayable | None, Tensor | None, str]:
        """Return how the forward can be run again, the loss it had, and why it cannot."""
        roots, looked = self._features.roots, self._features.looked
        again: Replayable
        if self._features.hidden_layers and len(roots) > 1 and (looked is None or isinstance(looked, RootCall)):
            self.unseen = self._beyond(f"the model is called in {len(roots)} separate parts")
        if moved or self.unseen:
            return None, None, MOVED if moved else self.unseen
        if self._compiled and not self._features.hidden_layers:
            # A replay would have to run eagerly, where roundings and dropout are others than in the compiled forward.
            return None, None, f"the forward cannot be run again: {self._compiled} is compiled"
        if looked is not None or len(roots) == 1:
            again = roots[0] if looked is None else looked
            before = given.trained_on(again)
        elif given.training_step is not None and roots:
            again, before = given.training_step, given.trained_on(given.training_step)
        else:
            parts = "was not called" if not roots else f"is called in {len(roots)} separate parts"
            return None, None, f"the forward cannot be run again: the model {parts}"
        why = why_not(again)
        if why:
            reason = f"the forward of {self._name(again)} cannot be run again: {why}"
            if self.needs & {"dh", "probe"}:
                self._warn(f"{reason}; what needs the features after the step is left out", again.uncopied)
            return None, None, reason
        return again, before, ""

    def look(self, again: Replayable | None) -> int:
        """Return whether the first samples of a forward are enough when it is run again; see :mod:`.replay_subset`."""
        if not self.needs & {"dh", "probe"}:
            return NO
        stand, never = self.slices.look(again, self._features.calls, again is not None and self._draws_alike(again))
        if never and not self.slices.automatic:
            self._warn(f"replay_samples is of no use: {never}; the whole batch is run again")
        return stand

    def _draws_alike(self, again: Replayable) -> bool:
        """Return whether a forward draws random numbers, but the same ones before the step and after it: it was run
        beside the step, with its loss, and is run again for the same samples.
        """
        return again is self._features.looked and self._features.began_at_loss and again.drew

    def run(self, due: bool, again: Replayable | None, part: int, replay: Replay, context: Context) -> None:
        """Run what is due, into :attr:`done`; ``again`` is ``None`` if the forward cannot be run, and facts say why.

        ``replay`` has the outputs that those of the same batch are compared with, of its first samples if those will do
        (``part``). ``due``: whether the probe batch is.

        What ``done`` has does not depend on what goes wrong here: other processes do the same.
        """
        first = due and self.probe is None
        wanted = again is not None and ("dh" in self.needs or first)
        failed = ReplayResult()
        self.done = ReplayOutcome(failed if wanted else None, failed if due and (wanted or not first) else None, first)
        facts = self._facts
        if not due:
            facts.no_drift = f"measured at every {self._drift_every}th measured step"
        probe = self.probe
        if again is not None and wanted:
            same = self._same_batch(again, part, replay, context)
            self.done = replace(self.done, same=same, drift=same if first else self.done.drift)
        if first:
            facts.no_drift = facts.no_replay
        elif due and probe is not None:
            self.done = replace(self.done, drift=self._probe_batch(probe, replay.keys, context))

    def _same_batch(self, again: Replayable, part: int, replay: Replay, context: Context) -> ReplayResult:
        check = self._check_samples(again, part, context) if part in (DRAWN, UNSEEN) else None
        may_draw = self._draws_alike(again)  # asked before it is run again
        what, portion = f"the forward of {self._name(again)}", self.slices.portion
        try:
            run = again.part(slice(portion.samples)) if part == YES and portion is not None else again
            watchers = [replay, check] if isinstance(check, IndependenceCheck) else [replay]
            loss = self.run_again(run, context, *watchers)
            if part == YES:
                _check_part(run, replay, may_draw)
        except Exception as error:
            self._facts.no_replay = f"{what} could not be run again ({type(error).__name__}: {error})"
            further = ""
            if part == YES:
                self.slices.give_up()
                further = "; from the next measured step on the whole batch is run again"
            self._warn(f"{self._facts.no_replay}; what needs the features after the step is left out{further}", error)
            return ReplayResult()
        if check is not None:
            why = self.slices.settle(check)
            if why and not self.slices.automatic:
                self._warn(f"replay_samples is of no use: {why}; the whole batch is run again")
        if self.probe is None and "probe" in self.needs:
            outputs, portion = replay.outputs, self.slices.portion
            if part == UNSEEN and portion is not None:
                run, outputs = again.part(slice(portion.samples)), first_outputs(outputs, portion)
            kept: Outputs = {
                i: [replace(call, h=call.h.to("cpu", copy=True), b=None) for call in calls]
                for i, calls in outputs.items()
            }
            self.probe = Probe(run, kept, run is not again, *self._pack(run))
        return ReplayResult(replay, None if part == YES else loss)

    def _check_samples(self, again: Replayable, part: int, context: Context) -> SampleCheck:
        """Return what the first and the last samples give by themselves, for comparison with what they give among the
        others; where random numbers are drawn, what they give beside others.

        As many forwards are run as there are in every other process, whatever goes wrong.
        """
        portion = self.slices.portion
        assert portion is not None
        ends = (slice(portion.samples), slice(-portion.samples, None))
        runs, wrong = [], ""
        for which in ExchangeCheck.choices(portion) if part == DRAWN else ends:
            runs.append(SeparateRun())
            count = portion.samples if isinstance(which, slice) else len(which)
            try:
                some = again.part(which)
                self.run_again(some, context, runs[-1])
                wrong = wrong or (DRAWS if some.drew and part == UNSEEN else "")
            except Exception as error:
                wrong = wrong or f"the forward of {count} samples fails ({type(error).__name__}: {error})"
        if part == UNSEEN:
            return IndependenceCheck(runs[0], runs[1], portion, wrong)
        rows = {(i, n): call.outputs for i, calls in self._features.calls.items() for n, call in enumerate(calls)}
        return ExchangeCheck(runs, portion, rows, wrong)

    def _probe_batch(self, probe: Probe, keys: Collection[str], context: Context) -> ReplayResult:
        replay = Replay(probe.outputs, keys, samples=batch_size(probe.again.arguments) if probe.part else None)
        try:
            self.run_again(probe.again, context, replay)
            if probe.part:
                _check_part(probe.again, replay)
        except Exception as error:
            self._facts.no_drift = f"the probe batch could not be run again ({type(error).__name__}: {error})"
            self._warn(self._facts.no_drift, error)
            return ReplayResult()
        return ReplayResult(replay)

    def _name(self, again: Replayable) -> str:
        """Return the module's name as the user knows it."""
        if not isinstance(again, RootCall):
            return "training_step"
        return label(again.name_in(self._model), again.module)

    def _pack(self, again: Replayable) -> tuple[dict[str, Any] | None, str]:
        try:
            with preserved(self._model, host=self._host), torch.no_grad():
                again.rewind()
                return again.pack(self._model), ""
        except Exception as error:
            return None, str(error)

    def run_again(self, again: Repeatable, context: Context, *watchers: Watcher, graph: bool = False) -> Tensor | None:
        """Run a forward before some watchers, without a trace; the loss, if it has one. ``graph``: with one."""
        with preserved(self._model, host=self._host), torch.set_grad_enabled(graph):
            again.rewind()
            try:
                with context(), self._features.replaying(*watchers):
                    loss = call_through(self._wrapper, self._model, again)
            finally:
                reshard(self._wrapper)
        return None if loss is None else loss.detach()


def _check_part(part: Replayable, replay: Replay, may_draw: bool = False) -> None:
    """Check that what was seen of forwards of the first samples still holds.

    Raises:
        RuntimeError: it does not.
    """
    if part.drew and not may_draw:
        raise RuntimeError(DRAWS)
    if not replay.same_calls():
        raise RuntimeError("for the first samples alone, layers are called differently")
