"""One measured step from end to end; Lightning and plain loops only say when."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spectral_monitor.capture.hooks.arrived_gradients import ArrivedGradients
from spectral_monitor.capture.hooks.forward import FeatureCapture
from spectral_monitor.capture.hooks.gradient_reuse import GradientReuse
from spectral_monitor.capture.hooks.optimizer import OptimizerCapture
from spectral_monitor.capture.hooks.recording import nothing
from spectral_monitor.capture.hooks.returned_losses import ReturnedLosses
from spectral_monitor.capture.hooks.tensor_version import Marks, marks
from spectral_monitor.capture.replay.eager_pass import LossGradient
from spectral_monitor.capture.replay.feature_change import Outputs
from spectral_monitor.capture.replay.replay import RootCall
from spectral_monitor.capture.replay.replayable import Repeatable, Replayable
from spectral_monitor.capture.row_sampling import RowSampler
from spectral_monitor.condition.findings import COMPILED_STEP
from spectral_monitor.engine.agreement.all_or_none import agreed
from spectral_monitor.engine.agreement.output_layers import Readouts
from spectral_monitor.engine.agreement.rank_report import RankReports, StepObservation, census
from spectral_monitor.engine.agreement.row_hash import as_table, row_hashes
from spectral_monitor.engine.attention_watch import AttentionWatch
from spectral_monitor.engine.features.changes import ChangeStage
from spectral_monitor.engine.features.kernels import ALONE, BACKWARD, FullStage
from spectral_monitor.engine.features.outputs import OF_ROWS, measure_noise, measure_outputs
from spectral_monitor.engine.features.replay_subset import ELSEWHERE, NO, YES
from spectral_monitor.engine.features.replays import Context, ReplayOutcome, Replays, StepInputs, loss_begun
from spectral_monitor.engine.features.stage import RowStage, input_rows
from spectral_monitor.engine.features.step_loss import MicroBatch, StepLoss
from spectral_monitor.engine.model_layout import ModelLayout
from spectral_monitor.engine.observation import WatchedForward, held_by, observations, step_facts
from spectral_monitor.engine.overhead_budget import budget_for
from spectral_monitor.engine.parameter_tracker import ParameterTracker
from spectral_monitor.engine.preconditions import check_supported, full_precision, replaced
from spectral_monitor.engine.results.measurement import Measured, known_errors, relative_errors
from spectral_monitor.engine.results.noise import DIVIDED
from spectral_monitor.engine.results.noise import KEY as NOISE
from spectral_monitor.engine.results.raw import LOSS, NETWORK, REUSED, RawScalars
from spectral_monitor.engine.results.reasons import StepContext
from spectral_monitor.engine.settings import FEATURES, Settings
from spectral_monitor.engine.state import COMPARED, START, STEP_LOSS, EngineState
from spectral_monitor.engine.weights.gradients import gradient_norms
from spectral_monitor.engine.weights.norms import rows_worth
from spectral_monitor.engine.weights.stage import MatrixStage
from spectral_monitor.layers.attention import AttentionBlock
from spectral_monitor.linalg import Coroutine, gather, sequence
from spectral_monitor.measurement import Measurement
from spectral_monitor.messages import WarnOnce
from spectral_monitor.sharding import ProcessGroup, copies, reshard

LESS_MEMORY = " (low_memory=True, quantities='light' and replay_samples=2 each take less memory)"


def _do_nothing() -> None:
    """Stand for what a caller does not ask for; a copy of the engine can be pickled with it."""


class Engine(EngineState):
    """Arms hooks for one step, reads it, computes a :class:`~spectral_monitor.measurement.Measurement`.

    Use: ``start`` once; around a step ``arm``, then ``finish``, or ``disarm`` to give up. Between steps nothing is
    registered anywhere. Whatever goes wrong inside costs the measurement, never the training step.

    Attributes:
        asked: the settings of the step that is watched, with the quantities that are measured of it.
        budget: decides which steps can be afforded, if there is one.
        multipliers: layer index -> what a correction multiplies the learning rate with, to be shown.

    Raises:
        ValueError: patterns, roles or blocks that do not fit; feature quantities with LBFGS.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        settings: Settings,
        processes: ProcessGroup | None = None,
        wrapper: nn.Module | None = None,
        corrected: bool = False,
        whole_steps: bool = False,
    ) -> None:
        """``processes``: those that train together; ``wrapper``: FSDP's, which is called in the model's place;
        ``corrected``: whether learning rates depend on what is measured; ``whole_steps``: whether :meth:`offer` is
        called at each step.
        """
        super().__init__()
        self.model = model
        self._wrapper = wrapper or model
        self.settings = self.asked = settings
        self.processes = processes
        self.budget = budget_for(settings, processes is not None, corrected)
        self._warn = WarnOnce(silent=processes is not None and processes.rank > 0)
        self._own_warn = WarnOnce()  # of what happened in this process alone
        reshard(self._wrapper)
        found = partial(ModelLayout.of, model, self._wrapper, optimizers, settings, processes, whole_steps)
        layout = (found() if processes is None else processes.all_or_none(found)).placed(processes)
        self.anatomy, self.layers, self.members = layout.anatomy, layout.layers, layout.members
        self._attention = AttentionWatch(layout.hidden, layout.attention, self.members, processes, self._harmless)
        self._readouts = Readouts(self.anatomy)
        self._tracker = None if layout.flat else ParameterTracker(model, self.anatomy.layers)
        self._replaced: set[int] = set()
        self._flat = layout.flat
        self._copies = partial(copies, flat=layout.flat, processes=processes)
        if settings.needs & FEATURES:
            check_supported(optimizers)
        self.optimizers = OptimizerCapture(optimizers, self._enter, self._before, self._ready, self._after)
        self._reuse = GradientReuse()
        self._arrived = ArrivedGradients(gradient_norms)
        self._returned = None if whole_steps or layout.compiled else ReturnedLosses()
        wanted = range(len(self.layers)) if settings.needs & FEATURES else ()
        room = settings.max_rows and -(-settings.max_rows // (len(set(processes.batches)) if processes else 1))
        # Where the weights of a forward lie is no one's but FSDP's affair.
        watched = [p for p in model.parameters() if id(p) not in layout.flat]
        self.features = FeatureCapture(
            model, self.layers, wanted, room, watched, self._harmless, layout.entries, not layout.sharded
        )
        self._overwrites = False  # whether an optimizer was seen to overwrite gradients
        self._alone = processes is None and self._wrapper is model
        self._replays = Replays(model, self._wrapper, self.features, settings, layout.compiled)
        self._step_loss = StepLoss(model, self._replays.run_again, layout.sharded, self._own_warn)
        self._picker = RowSampler(settings.max_rows)
        self.armed = False
        self.idle = False
        self._reported: Settings | None = settings  # None: nothing of the step that is watched
        self.multipliers: Mapping[int, float] = {}
        self._context: Context = nullcontext
        self._in_force: Mapping[int, float] = {}  # in the step that is watched
        self._clear()

    @property
    def attention_blocks(self) -> Sequence[AttentionBlock]:
        """The attention blocks of the model."""
        return self._attention.blocks

    def _clear(self) -> None:
        self._failed = False
        self._spent = 0.0
        self._held_at: dict[int, Marks] = {}
        self._moved = False
        self._apart: float | None = None
        self._out = RawScalars()
        self._rows: RowStage | None = None
        self._stage = MatrixStage(
            self.members, self.asked, self._start, self._inputs, self._copies, self.processes, self._out
        )
        self._stage.overwrites = self._overwrites
        self._attention.clear(self.asked, self._out)

    @property
    def calls(self) -> Sequence[RootCall]:
        """The calls of the model that were recorded in the step that is watched."""
        return self.features.roots or (() if self._returned is None else self._returned.calls)

    @property
    def watches_features(self) -> bool:
        """True if the step's quantities need hooks on modules."""
        return bool(self.asked.needs & FEATURES)

    @property
    def watches_loss(self) -> bool:
        """True if the loss after the step is asked for by itself: what led to it is run again as a whole."""
        return self._step_loss.wanted

    def arm(self, keys: Collection[str], before_forward: Callable[[], None] = _do_nothing) -> None:
        """Register the hooks that watch the coming step.

        Args:
            keys: quantities that are measured of it, some or all of the settings'; with :data:`START` the batch becomes
                the one ``feature_drift`` is measured on, and where there is nothing else that is all; with
                :data:`STEP_LOSS` the whole batch runs once more for its loss.
            before_forward: called before the forward, if that runs inside the optimizer's step.
        """
        wanted = set(keys) - {START, STEP_LOSS}
        self._reported = self.settings.only(wanted) if wanted else None
        self.asked = self.settings.only(wanted | {"feature_drift"} if START in keys else wanted)
        self._in_force = self.multipliers
        self.disarm()
        self.armed = True
        self.idle = False
        self._before_forward = before_forward
        self._step_loss.begin(STEP_LOSS in keys)
        self._replays.needs = self.asked.needs
        self._replays.looked, self._replays.unseen, self._replays.whole = False, "", None
        with self._harmless("setting up"):
            self._replaced = self._stage.replaced = replaced(self._tracker, self.anatomy.layers, self._warn)
            if self.watches_features:
                self.features.look_for(self.asked.keys if self._alone else {NOISE} & set(self.asked.keys))
                self.features.watch_gradients = bool(BACKWARD & set(self.asked.keys))
                self.features.watch_weights = "gradient_change" in self.asked.keys and self._alone
                self.features.watch_losses = "dh" in self.asked.needs or self.features.watch_gradients
                foresight = nothing if ALONE & set(self.asked.keys) else self._replays.slices.foresee
                ranked = bool({"backward_stable_rank", "backward_rms"} & set(self.asked.keys))
                self.features.foresee(foresight, ranked, apart=self.processes is not None)
                self.features.traced = not self._readouts.complete
                self._readouts.begin()
                self.features.arm()
            if not self.features.hidden_layers:
                self._attention.arm(self.asked)
            if self.processes is None and "contribution" in self.asked.keys:
                self._reuse.arm(self.optimizers.optimizers, self._harmless)
            if "g" in self.asked.needs:
                several = None if self.processes is None else self._wrapper
                self._arrived.arm(self.optimizers.optimizers, several, self._flat, self._harmless)
            if self._returned is not None and self.watches_loss:
                self._returned.arm(self.model, self._harmless)
            self.optimizers.arm()

    def disarm(self) -> None:
        """Remove every hook and forget what was recorded; safe to call at any time."""
        self.armed = False
        self._step_loss.begin(False)
        self.optimizers.disarm()
        self._reuse.disarm()
        self._arrived.disarm()
        if self._returned is not None:
            self._returned.disarm()
        self.features.disarm()
        self._clear()

    def finish(
        self,
        step: int,
        *,
        training_step: Replayable | None = None,
        loss: Tensor | None = None,
        accumulated: int = 1,
        loss_scale: float = 1.0,
        loss_parts: int = 1,
        context: Context = nullcontext,
        only_if_stepped: bool = False,
    ) -> Measurement | None:
        """Return what is measured of the step that was watched, and disarm.

        Args:
            step: optimizer steps taken, this one included.
            training_step: runs the forward of the whole training step again, for models called in several parts.
            loss: what the backward pass started from, to tell whether the loss a model returns is that one.
            accumulated: what the model's loss was divided by to become that.
            loss_scale: what it was multiplied by before the backward pass, to keep half precision from underflow.
            loss_parts: of how many losses, of processes and micro-batches, that of the step is the sum; 1 if it is
                their mean.
            context: precision the replayed forward runs under, besides the autocast that was recorded.
            only_if_stepped: measure nothing if no optimizer has stepped; :attr:`idle` then says so.

        Returns:
            ``None`` if the step could not be measured; a warning has said why.
        """
        measurement = None
        loss = None if loss is None else loss.detach()
        given = StepInputs(training_step, loss, accumulated, loss_scale, loss_parts, context, only_if_stepped)
        try:
            with self._harmless("measuring"), full_precision():
                if self.armed and (self.processes is not None or not self._failed):
                    measurement = self._measure(step, given)
            if measurement is not None:
                measurement.summary["overhead_ms"] = self._spent * 1e3
            self.start_tried |= not (only_if_stepped and self.idle)
            if (
                self.budget is not None
                and self._reported is not None
                and self.armed
                and not (only_if_stepped and self.idle)
            ):
                self.budget.measured(step, self._spent, self._apart)
                if measurement is not None and self.budget.interval is not None:
                    measurement.summary["interval"] = float(self.budget.interval)
        finally:
            self.disarm()
        return measurement

    def _measure(self, step: int, given: StepInputs) -> Measurement | None:
        # What this process saw, and from that of all processes what is known of the step.
        forward = WatchedForward.of(len(self.layers))
        with self._harmless("looking at what was seen"):
            self._look(forward, given)
        seen = self._run(census(self._observed(forward), forward.layers, forward.prints, self.processes))
        if not self._agree(seen) or (self.idle and given.only_if_stepped):
            return None
        self.correct_roles(self._readouts.settle(seen))
        stage, out = self._stage, self._out
        facts = step_facts(seen, stage, given)
        facts.multipliers, facts.replaced = self._in_force, self._replaced
        facts.unseen, facts.shared = self._replays.unseen, self.features.shared
        facts.held = held_by(self.layers, self.optimizers)
        if self.optimizers.compiled:
            self._warn(COMPILED_STEP)
        facts.sampled = bool(self.features.looked_at)
        facts.halved = self.features.halved and self.features.looked is None and self.asked.replay_samples is not None
        if seen.batch_count < len(seen.batches):
            facts.why_not[NOISE, NETWORK] = DIVIDED
        stage.unused = facts.unused
        # Matrices and rows as the step saw them, then the forward again.
        rows = self._rows = RowStage(self.members, self.asked, seen, self.processes, self._picker, out)
        agreed(self._before_replay(rows, forward.outputs, facts), self.processes)
        part: float = NO
        if self.watches_features:
            part = self._changes(forward, seen, rows, facts, given)
            if self._failed and self.processes is None:
                return None
        if self._step_loss.wanted:
            changed = len(self.optimizers.optimizers)
            self._run(self._step_loss.after(changed, given, seen, facts, self.processes, out))
        if self._reported is None:
            return None
        self.measured += 1
        self.drifts += "feature_drift" in self._reported.keys
        self.comparisons += bool(COMPARED & set(self._reported.keys))
        measured = Measured(step, self.layers, tuple(layer.info for layer in self.layers), self._reported, facts)
        raw = out.fetch()
        self._attention.settle(raw, facts)
        measurement = self._put_together(measured, raw)
        self._overwrites |= facts.rewritten
        if part == YES:
            changes = relative_errors(measurement.values, measurement.errors, "feature_change")
            self._replays.slices.widen(changes, known_errors(measurement.errors, "bfa_cos"))
        return measurement

    def _look(self, forward: WatchedForward, given: StepInputs) -> None:
        """Fill in what hooks have recorded of the step's forward, and how it can be run again."""
        self._stage.rest()
        self._attention.rest()
        forward.whole = self._step_loss.can_run(given)
        if self.watches_features:
            forward.outputs = self.features.outputs()
            forward.again, forward.loss, forward.no_replay = self._replays.choose(given, self._moved, self._warn)
            forward.begun = loss_begun(given, forward.loss)
            forward.part = self._replays.look(forward.again, self._warn)
        noise, apart = self._replays.slices.noise, self.processes is not None
        forward.layers = observations(len(self.layers), self.features, self._stage, forward.outputs, noise, apart)
        if self.features.traced:
            for i, said in self._readouts.see(self.features, self._stage.unused).items():
                forward.layers[i].place = said
        if self.processes is not None:
            forward.prints = as_table(row_hashes(forward.outputs), len(self.layers), self.processes.device)

    def _observed(self, forward: WatchedForward) -> StepObservation:
        """Return what this process has to say of the step, after a failure too."""
        begun, again = forward.begun, forward.again
        return StepObservation(
            failed=self._failed,
            stepped=bool(self._stage.stepped),
            moved=self._moved,
            closures=max(self.optimizers.closure_calls.values(), default=0),
            again=0 if again is None else 1 if isinstance(again, RootCall) else 2,
            loss=forward.loss is not None,
            measured=self.measured,
            drifts=self.drifts,
            probe=self.probe_taken,
            part=forward.part,
            samples=self._replays.slices.samples,
            apart=0.0 if self.budget is None else self.budget.wait,
            begun=math.nan if begun is None or self.processes is None else float(begun),
            whole=forward.whole,
        )

    def _agree(self, seen: RankReports) -> bool:
        """Take over what all processes have in common, and return whether the step is measured."""
        self._apart = None if self.processes is None else seen.steps[0].apart
        self.idle = not any(some.stepped for some in seen.steps)
        if any(some.failed for some in seen.steps):
            if not self._failed:
                who = ", ".join(str(rank) for rank, some in enumerate(seen.steps) if some.failed)
                self._warn(f"a step was not measured: it failed in process {who}, which says why")
            return False
        self.measured = int(max(some.measured for some in seen.steps))
        self.drifts = int(max(some.drifts for some in seen.steps))
        if not all(some.probe for some in seen.steps):
            self._replays.probe = None  # what one has lost is no use to the others
        return True

    def _changes(
        self, forward: WatchedForward, seen: RankReports, rows: RowStage, facts: StepContext, given: StepInputs
    ) -> float:
        """Run the forward again, measure what the step changed of the features, and return whether few samples did."""
        again, no_replay, outputs, out = forward.again, forward.no_replay, forward.outputs, self._out
        if self.processes is not None:
            out.note(NETWORK, LOSS, seen.begun)
        elif forward.begun is not None:
            out.put(NETWORK, LOSS, forward.begun)
        full = FullStage(self.model, self.features, self.asked, self._alone, facts, out, self._warn, self._stage.old)
        full.checks()
        part = min(int(some.part) for some in seen.steps)
        if not self._replays.slices.agree([int(some.samples) for some in seen.steps]):
            part = NO
        replay = full.replay(outputs, self._replays.slices.portion if part == YES else None)
        self.features.drop_inputs()
        if len({some.again for some in seen.steps}) > 1:
            again, no_replay = None, "the forward cannot be run again: the processes called the model differently"
        facts.no_replay = no_replay
        with self._harmless("running the forward again"):
            self._replays.run(self._drift_due(self.asked.keys), again, part, replay, facts, given.context, self._warn)
        if self._failed and self.processes is None:
            return part
        done, self._replays.done = self._replays.done, ReplayOutcome()
        known = all(some.loss for some in seen.steps)
        stage_after = ChangeStage(rows, self.processes, full)
        self._run(stage_after.measure(done, facts, forward.loss if known else None))
        if stage_after.off and not self._replays.slices.off:
            self._replays.slices.give_up()
            if not self._replays.slices.automatic:
                self._warn(f"replay_samples is of no use: {ELSEWHERE}; the whole batch is run again")
        if stage_after.probe_lost:
            self._replays.probe = None
        with self._harmless("running the forward again with a graph"):
            full.graphs(again, given, outputs, self._stage.rates)
            full.linearized(self._replays.probe, self._parameters, given.context)
        return part

    def _before_replay(self, rows: RowStage, outputs: Outputs, facts: StepContext) -> Coroutine[None]:
        """Matrices, and rows as the step saw them."""
        calls, keys = self.features.calls, frozenset(self.asked.keys)
        seen = [rows.forward(calls)] if self.watches_features else []
        if NOISE in keys:
            seen.append(measure_noise(calls, len(self.layers), self.processes, self._out))
        if OF_ROWS & keys:
            seen.append(measure_outputs(rows, keys, calls, outputs, facts))
        if self.processes is None:
            yield from sequence([self._attention.routine(), *seen])
        else:
            yield from gather([rows.sample(calls), self._stage.routine(), self._attention.routine(), *seen])

    def _inputs(self, i: int) -> Tensor | None:
        """Input rows that alignments are measured on."""
        if self.processes is not None:
            return None if self._rows is None else self._rows.samples.get(i)
        rows = input_rows(self.features.calls.get(i, ()))
        if rows is None:
            return None
        index = self._picker.choose(len(rows), rows_worth(self.layers[i].layout), rows.device)
        return rows if index is None else rows[index]

    def offer(
        self, training_step: Replayable, gradient: float, context: Context, earlier: Sequence[MicroBatch] = ()
    ) -> None:
        """Take a training step whose backward pass begins now, to be run again where its parts cannot be seen.

        Args:
            training_step: to be run again.
            gradient: of the loss it returned, that the backward pass begins with.
            context: to be entered around it.
            earlier: as for :meth:`offer_loss`.
        """
        self._replays.whole, self._context = (training_step, LossGradient(gradient)), context
        self.offer_loss(training_step, context, earlier)

    def offer_loss(self, again: Repeatable, context: Context = nullcontext, earlier: Sequence[MicroBatch] = ()) -> None:
        """Take what led to the loss of the step, to be run again where :attr:`watches_loss`.

        Args:
            again: runs its forward again.
            context: to be entered around that.
            earlier: micro-batches before this one, where gradients are accumulated.
        """
        self._step_loss.offer(again, context, earlier)

    @contextmanager
    def _looking_aside(self) -> Iterator[None]:
        with self._context(), self._attention.watching(self.asked):
            yield

    def _enter(self, optimizer: Optimizer) -> None:
        with self._harmless("remembering the batch"):
            self._before_forward()

    def _before(self, optimizer: Optimizer) -> None:
        with self._harmless("copying the weights"), full_precision():
            self._stage.before(optimizer)
            self._attention.before(optimizer)
            if self.watches_features:
                parameters = (p for group in optimizer.param_groups for p in group["params"])
                self._held_at[id(optimizer)] = marks(parameters)

    def _ready(self, optimizer: Optimizer) -> None:
        with self._harmless("looking at the gradients"):
            if (reused := self._reuse.stepping(optimizer)) is not None:
                self._out.put(NETWORK, f"{REUSED}.{self._reuse.steps}", reused)
            self._stage.ready(optimizer, self._arrived.of(optimizer))
            if self._returned is not None:
                self._returned.close()
                self._step_loss.offer_returned(self._returned.calls)
            self._step_loss.stepping()
            if self.watches_features and not self._replays.looked:
                self._replays.look_aside(self._own_warn, self._looking_aside)
                self._stage.norms.samples = self.features.looked_at
            if self.features.traced:
                self._readouts.stepped(optimizer, self.features.backward_pass)
            self.features.drop_unfinished()
            if self.features.weights:
                then, now = self._held_at[id(optimizer)], self.features.weights
                self._moved |= any(now.get(p, mark) != mark for p, mark in then.items())
            if len(self.optimizers.optimizers) == 1:
                self.features.forward_open = self.features.backward_open = False
                self._attention.ready()

    def _after(self, optimizer: Optimizer) -> None:
        with self._harmless("measuring the update"), full_precision():
            if not self._failed:
                self._stage.after(optimizer)
            self._reuse.stepped(optimizer)
            self.features.settled |= self._stage.stepped

    @contextmanager
    def _harmless(self, what: str) -> Iterator[None]:
        """Count the time inside, and turn any error into one warning and a step that is not measured."""
        begin, spent = time.perf_counter(), self._spent
        try:
            yield
        except Exception as error:
            first, self._failed = not self._failed, True
            if first:  # the others follow from it
                advice = LESS_MEMORY if isinstance(error, torch.OutOfMemoryError) else ""
                said = f"a step was not measured: {what} failed with {type(error).__name__}: {error}"
                self._own_warn(said + advice, error)
        finally:
            self._spent = spent + time.perf_counter() - begin  # what ran inside has counted itself too
