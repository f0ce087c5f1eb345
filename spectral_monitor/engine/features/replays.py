"""Replays after the step: of the same batch, and now and then of the probe batch."""

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
from spectral_monitor.engine.features.replay_subset import DRAWS, NO, UNTESTED, UNTESTED_RANDOM, YES, ReplaySubset
from spectral_monitor.engine.features.step_inputs import Context, StepInputs
from spectral_monitor.engine.results.reasons import MOVED, StepContext
from spectral_monitor.engine.settings import Settings
from spectral_monitor.layers.naming import label
from spectral_monitor.messages import WarnOnce
from spectral_monitor.sharding import call_through, reshard
from spectral_monitor.state.snapshot import preserved

INLINED = "called inside a compiled function, where its features cannot be seen"
"""Why a layer has no features if the call that led to the step cannot be run again eagerly."""


@dataclass(frozen=True)
class Probe:
    """The first batch of the run."""

    replayable: Replayable  # its forward
    outputs: Outputs  # what the layers' outputs were
    is_subset: bool  # whether these are its first samples only
    packed: dict[str, Any] | None  # the forward in plain types; ``None`` if it cannot be packed
    pack_error: str = ""  # why it cannot


@dataclass(frozen=True)
class ReplayResult:
    """A forward that was run again."""

    replay: Replay | None = None  # ``None`` if it failed
    loss: Tensor | None = None  # of the same batch only


@dataclass(frozen=True)
class ReplayOutcome:
    """Forwards that were run; ``None`` if there was nothing to run."""

    same: ReplayResult | None = None  # of the same batch
    drift: ReplayResult | None = None  # of the probe batch
    is_first: bool = False  # whether the batch has just become the probe batch


class Replays:
    """Runs forwards again without a trace; compiled ones in a pass beside the step, or not at all.

    Attributes:
        needs: what must be captured of the step.
        subset: decides which samples are run.
        probe: the batch ``feature_drift`` is measured on, once there is one.
        outcome: what the last run gave.
        looked_aside: whether there was a pass beside the step.
        training_step: the training step, and the gradient that its backward pass began with, where that is known.
        unobserved: why the pass beside the step, if there was to be one, saw nothing.
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
        """``wrapper``: FSDP's, which is called in the model's place to gather its weights; the model if there is none;
        ``compiled``: name of what is compiled, empty if nothing is; ``warn_here``: warns of what happened in this
        process alone.
        """
        self._model = model
        self._wrapper = wrapper
        self._features = features
        self._warn, self._warn_here = warn, warn_here
        self._drift_every = settings.drift_every
        self._compiled = compiled
        self._host = settings.low_memory
        self.subset = ReplaySubset(settings.replay_samples, model)
        self.probe: Probe | None = None
        self.outcome = ReplayOutcome()
        self.begin(settings.needs, StepContext())

    def begin(self, needs: frozenset[str], facts: StepContext) -> None:
        """Begin a step of which ``needs`` must be captured; why something is not run again goes into ``facts``."""
        self.needs, self._facts = needs, facts
        self.looked_aside, self.unobserved = False, ""
        self.training_step: tuple[Replayable, LossGradient] | None = None

    def look_aside(self, around: Context) -> None:
        """Record features that were not seen in the step in a pass of their own, before the optimizer steps.

        ``around``: entered around the pass, by others who watch it.
        """
        hidden = self._features.hidden_layers
        self.looked_aside, obstacle = True, sees_all_modules()
        if self._features.inlined and (self.training_step is None or not self._features.refined):
            self.unobserved = INLINED
            self._warn_here(
                f"the model is {INLINED}; if you train torch.compile(model), pass that instead of the model"
            )
            return
        if obstacle or not (hidden or (self._features.halved and not self.subset.disabled)):
            self.unobserved = obstacle if hidden else ""
            return
        try:
            with preserved(self._model, host=self._host), unseen(self._model, ()):
                reason = self._features.look_aside(around, self.training_step)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if hidden:
                self._warn_here(f"{self._not_eager(reason)}; no features are measured", error)
        if hidden and reason:  # otherwise the step's own passes were seen
            self.unobserved = self._not_eager(reason)

    def _not_eager(self, reason: str) -> str:
        compiled = self._compiled or "the function that calls the model"
        return f"{compiled} is compiled, and could not be run eagerly: {reason}"

    def choose(self, step_inputs: StepInputs, moved: bool) -> tuple[Replayable | None, Tensor | None, str]:
        """Return how the forward can be run again and the loss it had, or why it cannot."""
        roots, looked = self._features.roots, self._features.looked
        replayable: Replayable
        if self._features.hidden_layers and len(roots) > 1 and (looked is None or isinstance(looked, RootCall)):
            self.unobserved = self._not_eager(f"the model is called in {len(roots)} separate parts")
        if moved or self.unobserved:
            return None, None, MOVED if moved else self.unobserved
        if self._compiled and not self._features.hidden_layers:
            # A replay would have to run eagerly, where roundings and dropout are others than in the compiled forward.
            return None, None, f"the forward cannot be run again: {self._compiled} is compiled"
        if looked is not None or len(roots) == 1:
            replayable = roots[0] if looked is None else looked
        elif step_inputs.training_step is not None and roots:
            replayable = step_inputs.training_step
        else:
            parts = "was not called" if not roots else f"is called in {len(roots)} separate parts"
            return None, None, f"the forward cannot be run again: the model {parts}"
        loss, obstacle = step_inputs.training_loss(replayable), why_not(replayable)
        if obstacle:
            reason = f"the forward of {self._name(replayable)} cannot be run again: {obstacle}"
            if self.needs & {"dh", "probe"}:
                self._warn(
                    f"{reason}; quantities that need the features after the step are not measured", replayable.uncopied
                )
            return None, None, reason
        return replayable, loss, ""

    def look(self, replayable: Replayable | None) -> int:
        """Return whether the first samples of a forward are enough when it is run again; see :mod:`.replay_subset`."""
        if not self.needs & {"dh", "probe"}:
            return NO
        draws = replayable is not None and self._draws_same_numbers(replayable)
        subset_state, reason = self.subset.look(replayable, self._features.calls, draws)
        self.warn_useless(reason)
        return subset_state

    def warn_useless(self, reason: str) -> None:
        """Warn that ``replay_samples`` is of no use, if there is a reason and the user has set it."""
        if reason and not self.subset.automatic:
            self._warn(f"replay_samples has no effect: {reason}; the whole batch is run again")

    def _draws_same_numbers(self, replayable: Replayable) -> bool:
        """Return whether a forward draws random numbers, but the same ones before the step and after it: it was run
        beside the step, with its loss, and is run again for the same samples.
        """
        return replayable is self._features.looked and self._features.began_at_loss and replayable.drew

    def run(
        self, due: bool, replayable: Replayable | None, subset_state: int, replay: Replay, context: Context
    ) -> None:
        """Run what is due, into :attr:`outcome`.

        Which forwards it holds does not depend on what fails in this process, for other processes do the same.

        Args:
            due: whether the probe batch is run.
            replayable: the step's forward; ``None`` if it cannot be run again, for a reason among the facts.
            replay: the outputs to compare with, of the first samples if those are enough.
            context: the precision to run under.
        """
        first = due and self.probe is None
        wanted = replayable is not None and ("dh" in self.needs or first)
        failed = ReplayResult()
        same, drift = failed if wanted else None, failed if due and (wanted or not first) else None
        self.outcome = ReplayOutcome(same, drift, first)
        if not due:
            self._facts.no_drift = f"measured at every {self._drift_every}th measured step"
        probe = self.probe
        if replayable is not None and wanted:
            same = self._same_batch(replayable, subset_state, replay, context)
            self.outcome = ReplayOutcome(same, same if first else drift, first)
        if first:
            self._facts.no_drift = self._facts.no_replay
        elif due and probe is not None:
            self.outcome = replace(self.outcome, drift=self._probe_batch(probe, replay.keys, context))

    def _same_batch(self, replayable: Replayable, subset_state: int, replay: Replay, context: Context) -> ReplayResult:
        untested = subset_state in (UNTESTED_RANDOM, UNTESTED)
        check = self._check_samples(replayable, subset_state, context) if untested else None
        may_draw = self._draws_same_numbers(replayable)  # before the next run overwrites ``drew``
        portion = self.subset.portion
        try:
            forward = replayable
            if subset_state == YES and portion is not None:
                forward = replayable.part(slice(portion.samples))
            watchers = [replay, check] if isinstance(check, IndependenceCheck) else [replay]
            loss = self.rerun(forward, context, *watchers)
            if subset_state == YES:
                _check_part(forward, replay, may_draw)
        except Exception as error:
            reason = f"could not be run again ({type(error).__name__}: {error})"
            self._facts.no_replay = f"the forward of {self._name(replayable)} {reason}"
            consequence = "quantities that need the features after the step are not measured"
            if subset_state == YES:
                self.subset.give_up()
                consequence += "; from the next measured step on, the whole batch is run again"
            self._warn(f"{self._facts.no_replay}; {consequence}", error)
            return ReplayResult()
        if check is not None:
            self.warn_useless(self.subset.settle(check))
        if self.probe is None and "probe" in self.needs:
            outputs, portion = replay.outputs, self.subset.portion
            if subset_state == UNTESTED and portion is not None:
                forward, outputs = replayable.part(slice(portion.samples)), first_outputs(outputs, portion)
            kept: Outputs = {
                i: [replace(call, h=call.h.to("cpu", copy=True), b=None) for call in calls]
                for i, calls in outputs.items()
            }
            self.probe = Probe(forward, kept, forward is not replayable, *self._pack(forward))
        return ReplayResult(replay, None if subset_state == YES else loss)

    def _check_samples(self, replayable: Replayable, subset_state: int, context: Context) -> SampleCheck:
        """Run the first and the last samples by themselves, to be compared with the whole batch; or, if the forward
        draws random numbers, beside other samples.

        Every process runs as many forwards as the others, even if one fails.
        """
        portion = self.subset.portion
        assert portion is not None
        ends = (slice(portion.samples), slice(-portion.samples, None))
        runs, failure = [], ""
        for samples in ExchangeCheck.choices(portion) if subset_state == UNTESTED_RANDOM else ends:
            runs.append(SeparateRun())
            count = portion.samples if isinstance(samples, slice) else len(samples)
            try:
                part = replayable.part(samples)
                self.rerun(part, context, runs[-1])
                failure = failure or (DRAWS if part.drew and subset_state == UNTESTED else "")
            except Exception as error:
                failure = failure or f"the forward of {count} samples fails ({type(error).__name__}: {error})"
        if subset_state == UNTESTED:
            return IndependenceCheck(runs[0], runs[1], portion, failure)
        rows = {(i, n): call.outputs for i, calls in self._features.calls.items() for n, call in enumerate(calls)}
        return ExchangeCheck(runs, portion, rows, failure)

    def _probe_batch(self, probe: Probe, keys: Collection[str], context: Context) -> ReplayResult:
        forward = probe.replayable
        replay = Replay(probe.outputs, keys, samples=batch_size(forward.arguments) if probe.is_subset else None)
        try:
            self.rerun(forward, context, replay)
            if probe.is_subset:
                _check_part(forward, replay)
        except Exception as error:
            self._facts.no_drift = f"the probe batch could not be run again ({type(error).__name__}: {error})"
            self._warn(self._facts.no_drift, error)
            return ReplayResult()
        return ReplayResult(replay)

    def _name(self, replayable: Replayable) -> str:
        """Return the module's name as the user knows it."""
        if not isinstance(replayable, RootCall):
            return "training_step"
        return label(replayable.name_in(self._model), replayable.module)

    def _pack(self, replayable: Replayable) -> tuple[dict[str, Any] | None, str]:
        try:
            with preserved(self._model, host=self._host), torch.no_grad():
                replayable.rewind()
                return replayable.pack(self._model), ""
        except Exception as error:
            return None, str(error)

    def rerun(self, repeatable: Repeatable, context: Context, *watchers: Watcher, graph: bool = False) -> Tensor | None:
        """Run a forward without a trace, with or without its graph; return the loss, if it has one."""
        with preserved(self._model, host=self._host), torch.set_grad_enabled(graph):
            repeatable.rewind()
            try:
                with context(), self._features.replaying(*watchers):
                    loss = call_through(self._wrapper, self._model, repeatable)
            finally:
                reshard(self._wrapper)
        return None if loss is None else loss.detach()


def _check_part(part: Replayable, replay: Replay, may_draw: bool = False) -> None:
    """Check that the first samples alone still give what they give among the others.

    Raises:
        RuntimeError: they do not.
    """
    if part.drew and not may_draw:
        raise RuntimeError(DRAWS)
    if not replay.same_calls():
        raise RuntimeError("for the first samples alone, other layers are called")
