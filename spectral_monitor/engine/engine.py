"""One measured step from end to end; Lightning and plain loops only say when."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer

from spectral_monitor.capture.hooks.arrived_gradients import ArrivedGradients
from spectral_monitor.capture.hooks.gradient_reuse import GradientReuse
from spectral_monitor.capture.hooks.optimizer import STEPPED_AGAIN, OptimizerCapture
from spectral_monitor.capture.replay.replay import RootCall
from spectral_monitor.condition.findings import COMPILED_STEP
from spectral_monitor.engine.agreement.output_layers import output_parameters
from spectral_monitor.engine.agreement.rank_report import RankReports, StepObservation, agreed, census
from spectral_monitor.engine.attention.watch import AttentionWatch
from spectral_monitor.engine.features.stage import RowStage
from spectral_monitor.engine.features.step_inputs import StepInputs
from spectral_monitor.engine.features.step_loss import StepLoss
from spectral_monitor.engine.features.watch import FeatureWatch, WatchedForward
from spectral_monitor.engine.guards import FailureGuard, ParameterTracker, check_supported, full_precision
from spectral_monitor.engine.model_layout import ModelLayout
from spectral_monitor.engine.observation import held_by, observe, settle_facts
from spectral_monitor.engine.overhead_budget import budget_for
from spectral_monitor.engine.results.raw import NETWORK, REUSED, RawScalars
from spectral_monitor.engine.results.reasons import StepContext
from spectral_monitor.engine.schedule import Turns
from spectral_monitor.engine.settings import FEATURES, Settings
from spectral_monitor.engine.state import CLEARED, COMPARED, START, STEP_LOSS, TURN, EngineState
from spectral_monitor.engine.weights.gradients import gradient_norms
from spectral_monitor.engine.weights.stage import MatrixStage
from spectral_monitor.layers.training_mode import TrainingModes
from spectral_monitor.linalg import Coroutine, gather, run, sequence
from spectral_monitor.measurement import Measurement
from spectral_monitor.messages import WarnOnce
from spectral_monitor.sharding import ProcessGroup, copies, reshard


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
        features, attention: watch features and attention blocks in that step.
        step_loss: runs the whole step again for its loss, where that is asked for by itself.
        turns: waits for optimizers that did not step in the last due step, to measure their next turn too.
        armed: whether a step is watched.
        idle: whether no optimizer has stepped in the step that was watched last.

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
        redirected: bool = False,
    ) -> None:
        """``processes``: those that train together; ``wrapper``: FSDP's, which is called in the model's place;
        ``corrected``: whether learning rates depend on what is measured; ``whole_steps``: whether the loop offers
        each training step to :attr:`features`; ``redirected``: whether training steps run inside a call of the model.
        """
        super().__init__()
        self.model, self._modes = model, TrainingModes(model)
        self._wrapper = wrapper or model
        self.settings = self.asked = settings
        self.processes = processes
        self.budget = budget_for(settings, processes is not None, corrected)
        self._warn = WarnOnce(silent=processes is not None and processes.rank > 0)
        own_warn = WarnOnce()  # of what happened in this process alone
        self._guard = FailureGuard(own_warn)
        reshard(self._wrapper)
        found = partial(ModelLayout.of, model, self._wrapper, optimizers, settings, processes, whole_steps)
        layout = (found() if processes is None else processes.all_or_none(found)).placed(processes)
        self.anatomy, self.layers, self.members = layout.anatomy, layout.layers, layout.members
        self.attention = AttentionWatch(layout, processes, self._guard)
        self._tracker = ParameterTracker(model, () if layout.flat else self.anatomy.layers)
        self._copies = partial(copies, flat=layout.flat, processes=processes)
        if settings.needs & FEATURES:
            check_supported(optimizers)
        self.optimizers = OptimizerCapture(optimizers, self._enter, self._before, self._ready, self._after)
        held = self.optimizers.optimizers
        self._reuse = GradientReuse(held, self._guard)
        several = None if processes is None else self._wrapper
        self._arrived = ArrivedGradients(held, several, layout.flat, gradient_norms, self._guard)
        self.features = FeatureWatch(
            model, self._wrapper, layout, settings, processes, self._guard, self._warn, own_warn
        )
        self.features.capture.redirected = redirected
        self.turns = Turns()
        self._awaited: frozenset[int] = frozenset()  # in the step that is watched
        self._overwrites = False  # whether an optimizer was seen to overwrite gradients
        returned = not (whole_steps or layout.compiled)
        again = self.features.replays.rerun
        self.step_loss = StepLoss(model, again, layout.sharded, returned, own_warn, self._guard)
        self.armed = self.idle = False
        self._reported: Settings | None = settings  # None: nothing of the step that is watched
        self.multipliers: Mapping[int, float] = {}
        self.on_graph: Callable[[Tensor], None] | None = None  # reads the graph of outputs or a loss, if it is wanted
        self._clear()

    def _clear(self) -> None:
        self._guard.begin()
        self._apart: float | None = None
        out, facts = self._out, self._facts = RawScalars(), StepContext()
        self._stage = MatrixStage(
            self.members, self.asked, self._start, self.features.sample, self._copies, self.processes, facts, out
        )
        self._stage.contributions.overwrites = self._overwrites
        self.attention.clear(self.asked, out)
        self.features.clear(self.asked, facts, out)

    @property
    def calls(self) -> Sequence[RootCall]:
        """The calls of the model that were recorded in the step that is watched."""
        return self.features.capture.roots or self.step_loss.returned

    @property
    def awaits_clearing(self) -> bool:
        """Return whether the coming step is to be watched for gradients of a measured one that are not cleared."""
        return self._reuse.is_open

    def arm(self, keys: Collection[str], before_forward: Callable[[], None] = _do_nothing) -> None:
        """Register the hooks that watch the coming step.

        Args:
            keys: quantities that are measured of it, some or all of the settings'; with :data:`START` the batch becomes
                the one ``feature_drift`` is measured on, and where there is nothing else that is all; with
                :data:`STEP_LOSS` the whole batch runs once more for its loss; with :data:`TURN` nothing is measured
                unless an optimizer steps that is awaited; with :data:`CLEARED` it is seen whether gradients were
                cleared.
            before_forward: called before the forward, if that runs inside the optimizer's step.
        """
        wanted = set(keys) - {START, STEP_LOSS, TURN, CLEARED}
        self._awaited = self.turns.awaited if TURN in keys else frozenset()
        self._reported = self.settings.only(wanted) if wanted else None
        wanted |= {"feature_drift"} if START in keys else set()
        self.asked = self.settings.only(wanted or {"lr"})  # which nothing is recorded for
        self.disarm()
        self.armed, self.idle = True, False
        self._before_forward = before_forward
        self.step_loss.begin(STEP_LOSS in keys)
        with self._guard("setting up"):
            self._facts.replaced = self._tracker.moved(self._warn)
            self.features.arm()
            if not self.features.capture.hidden_layers:
                self.attention.arm(self.asked)
            if self.processes is None and ("contribution" in self.asked.keys or CLEARED in keys):
                self._reuse.arm(output_parameters(self.anatomy.layers))
            if "g" in self.asked.needs:
                self._arrived.arm()
            self.step_loss.arm()
            self.optimizers.arm()

    def disarm(self) -> None:
        """Remove every hook and forget what was recorded; safe to call at any time."""
        self.armed = False
        self.step_loss.begin(False)
        self.optimizers.disarm()
        self._reuse.disarm()
        self._arrived.disarm()
        self._clear()

    def finish(self, step: int, given: StepInputs) -> Measurement | None:
        """Return what is measured of the step that was watched, and disarm.

        Args:
            step: optimizer steps taken, this one included.
            given: what the training loop knows of it. If ``only_if_stepped``, :attr:`idle` says whether one has.

        Returns:
            ``None`` if the step could not be measured; a warning has said why.
        """
        measurement = None
        optional = given.only_if_stepped or bool(self._awaited)
        given = replace(given, loss=None if given.loss is None else given.loss.detach(), only_if_stepped=optional)
        try:
            with self._guard("measuring"), full_precision():
                if self.armed and (self.processes is not None or not self._guard.failed):
                    measurement = self._measure(step, given)
            if measurement is not None:
                measurement.summary["overhead_ms"] = self._guard.spent * 1e3
            self.start_tried |= not (optional and self.idle)
            if self.budget is not None and self._reported and self.armed and not (optional and self.idle):
                self.budget.measured(step, self._guard.spent, self._apart)
                if measurement is not None and self.budget.interval is not None:
                    measurement.summary["interval"] = float(self.budget.interval)
        finally:
            self.disarm()
        return measurement

    def _measure(self, step: int, given: StepInputs) -> Measurement | None:
        # What this process saw, and from that of all processes what is known of the step.
        forward = WatchedForward.empty(len(self.layers))
        with self._guard("looking at what was seen"):
            self._look(forward, given)
        processes = self.processes
        seen = run(census(self._observed(forward, given), forward.layers, forward.output_hashes, processes), processes)
        if not self._agree(seen):
            return None
        if self.idle and any(some.optional for some in seen.steps):
            if self._awaited and seen.anywhere("stepped"):
                self.turns.missed()
            return None
        self.correct_roles(self.features.readouts.settle(seen))
        stage, out, facts = self._stage, self._out, self._facts
        facts.multipliers = self.multipliers
        settle_facts(facts, seen, given)
        facts.held, facts.modes = held_by(self.layers, self.optimizers), self._modes.look()
        if self._awaited:
            self.turns.taken(facts.stepped)
        elif len(self.optimizers.optimizers) > 1 and self._reported is not None:
            self.turns.measured(facts.held, facts.stepped)
        if self.optimizers.compiled:
            self._warn(COMPILED_STEP)
        self.features.explain(seen)
        # Matrices and rows as the step saw them, then the forward again.
        rows = self.features.begin_rows(seen)
        run(agreed(self._before_replay(rows, forward), processes), processes)
        if self.features.wanted:
            due, start = self._drift_due(), self._parameters
            run(self.features.changes(forward, rows, given, due, stage, start), processes)
            if self._guard.failed and processes is None:
                return None
        if self.step_loss.wanted:
            changed = len(self.optimizers.optimizers)
            run(self.step_loss.after(changed, given, seen, facts, processes, out), processes)
        if self._reported is None:
            return None
        if self.optimizers.repeated:
            self._warn(STEPPED_AGAIN)
        self.measured += 1
        self.drifts += "feature_drift" in self._reported.keys
        self.comparisons += bool(COMPARED & set(self._reported.keys))
        raw = out.fetch()
        self.attention.settle(raw, facts)
        measurement = self._put_together(step, self._reported, facts, raw)
        self._overwrites |= facts.rewritten
        self.features.settle(measurement)
        return measurement

    def _look(self, forward: WatchedForward, given: StepInputs) -> None:
        """Fill in what hooks have recorded of the step's forward, and how it can be run again."""
        self._stage.rest()
        self.attention.rest()
        forward.loss_replayable = self.step_loss.can_run(given)
        self.features.look(forward, given)
        observe(forward, self.features, self._facts, self.processes)

    def _observed(self, forward: WatchedForward, given: StepInputs) -> StepObservation:
        """Return what this process has to say of the step, after a failure too."""
        stepped, awaited = self._facts.stepped, self._awaited
        begun, again = forward.backward_loss, forward.replayable
        return StepObservation(
            failed=self._guard.failed,
            stepped=bool(stepped & awaited if awaited else stepped),
            optional=given.only_if_stepped,
            moved=self.features.moved,
            closures=max(self.optimizers.closure_calls.values(), default=0),
            replay_kind=0 if again is None else 1 if isinstance(again, RootCall) else 2,
            loss=forward.loss is not None,
            measured=self.measured,
            drifts=self.drifts,
            probe=self.probe_taken,
            subset_state=forward.subset_state,
            samples=self.features.replays.subset.samples,
            spacing=0.0 if self.budget is None else self.budget.wait,
            backward_loss=math.nan if begun is None or self.processes is None else float(begun),
            loss_replayable=forward.loss_replayable,
        )

    def _agree(self, seen: RankReports) -> bool:
        """Take over what all processes have in common, and return whether the step is measured."""
        self._apart = None if self.processes is None else seen.steps[0].spacing
        if any(some.failed for some in seen.steps):
            if not self._guard.failed:
                who = ", ".join(str(rank) for rank, some in enumerate(seen.steps) if some.failed)
                self._warn(f"a step was not measured: it failed in process {who}, which says why")
            return False
        self.idle = not any(some.stepped for some in seen.steps)
        self.measured = int(max(some.measured for some in seen.steps))
        self.drifts = int(max(some.drifts for some in seen.steps))
        if not all(some.probe for some in seen.steps):
            self.features.replays.probe = None  # what one has lost is no use to the others
        return True

    def _before_replay(self, rows: RowStage, forward: WatchedForward) -> Coroutine[None]:
        """Matrices, attention, and rows as the step saw them."""
        features = self.features.routine(rows, forward.outputs)
        if self.processes is None:
            yield from sequence([self.attention.routine(), features])
        else:
            sampled = rows.sample(self.features.capture.calls)
            yield from gather([sampled, self._stage.routine(), self.attention.routine(), features])

    def _enter(self, optimizer: Optimizer) -> None:
        with self._guard("remembering the batch"):
            self._before_forward()

    def _before(self, optimizer: Optimizer) -> None:
        with self._guard("copying the weights"), full_precision():
            self._stage.before(optimizer)
            self.attention.before(optimizer)
            self.features.before(optimizer)

    def _ready(self, optimizer: Optimizer) -> None:
        with self._guard("looking at the gradients"):
            if (reused := self._reuse.stepping(optimizer)) is not None:
                if self._reported is None:
                    self._reuse.keep(optimizer, reused)
                self._out.put(NETWORK, f"{REUSED}.{self._reuse.steps}", reused)
            self._stage.ready(optimizer, self._arrived.of(optimizer))
            self.step_loss.stepping()
            self.features.ready(optimizer, partial(self.attention.watching, self.asked))
            self._stage.norms.samples = self.features.capture.looked_at
            if len(self.optimizers.optimizers) == 1:
                self.features.end_forward()
                self.features.end_backward()
                self.attention.ready()

    def _after(self, optimizer: Optimizer) -> None:
        with self._guard("measuring the update"), full_precision():
            if not self._guard.failed:
                self._stage.after(optimizer)
            self._reuse.stepped(optimizer)
            self.features.capture.settled |= self._facts.stepped
