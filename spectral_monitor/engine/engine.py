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
from spectral_monitor.capture.replay.loss_faults import LossCheck
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
from spectral_monitor.engine.observation import observe, optimized_layers, settle_facts
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
    """Do nothing; unlike a lambda it can be pickled with an engine."""


class Engine(EngineState):
    """Watches one step with hooks, and computes a :class:`~spectral_monitor.measurement.Measurement`.

    Call ``start`` once. Around each step call ``arm``, then ``finish``, or ``disarm`` to give up. Between steps no hook
    is registered. An error inside costs the measurement, never the training step.

    Attributes:
        requested: the settings of the step that is watched, with the quantities that are measured in it.
        budget: decides which steps can be afforded, if there is one.
        multipliers: layer index -> the factor that a correction applies to its learning rate, to be shown.
        features, attention: watch features and attention blocks in the step.
        step_loss: runs the whole step again for its loss, if that is requested by itself.
        losses: is shown each loss of the step, before its backward pass.
        reuse: watches for gradients of a measured step that are not cleared before the next one.
        turns: waits for optimizers that did not step in the last due step, to measure their next turn, too.
        armed: whether a step is watched.
        idle: whether no optimizer stepped in the last watched step.

    Raises:
        ValueError: patterns, roles or blocks do not fit; feature quantities are requested with LBFGS.
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
        ``corrected``: whether learning rates depend on measurements; ``whole_steps``: whether the loop offers each
        training step to :attr:`features`; ``redirected``: whether training steps run inside a call of the model.
        """
        super().__init__()
        self.model, self._modes = model, TrainingModes(model)
        self._wrapper = wrapper or model
        self.settings = self.requested = settings
        self.processes = processes
        self.budget = budget_for(settings, processes is not None, corrected)
        self._warn = WarnOnce(silent=processes is not None and processes.rank > 0)
        own_warn = WarnOnce()  # for events of this process alone
        self._guard = FailureGuard(own_warn)
        reshard(self._wrapper)
        build = partial(ModelLayout.of, model, self._wrapper, optimizers, settings, processes, whole_steps)
        layout = (build() if processes is None else processes.all_or_none(build)).placed(processes)
        self.anatomy, self.layers, self.members = layout.anatomy, layout.layers, layout.members
        self.attention = AttentionWatch(layout, processes, self._guard)
        self._tracker = ParameterTracker(model, () if layout.flat else self.anatomy.layers)
        self._copies = partial(copies, flat=layout.flat, processes=processes)
        if settings.needs & FEATURES:
            check_supported(optimizers)
        self.optimizers = OptimizerCapture(optimizers, self._enter, self._before, self._ready, self._after)
        watched = self.optimizers.optimizers
        self.reuse = GradientReuse(watched, self._guard)
        root = None if processes is None else self._wrapper
        self._arrived = ArrivedGradients(watched, root, layout.flat, gradient_norms, self._guard)
        self.features = FeatureWatch(
            model, self._wrapper, layout, settings, processes, self._guard, self._warn, own_warn
        )
        self.features.capture.redirected = redirected
        self.turns = Turns()
        self._awaited: frozenset[int] = frozenset()  # layers whose optimizers are awaited in the watched step
        self._overwrites = False  # whether an optimizer has overwritten gradients
        returned = not (whole_steps or layout.compiled)
        rerun = self.features.replays.rerun
        self.step_loss = StepLoss(model, rerun, layout.sharded, returned, own_warn, self._guard)
        self.armed = self.idle = False
        self._reported: Settings | None = settings  # ``None`` if nothing of the watched step is reported
        self.multipliers: Mapping[int, float] = {}
        self.losses = LossCheck(reads_targets=processes is None)
        self.on_output: Callable[[Tensor], None] | None = None  # reads the graph of the model's output, if requested
        self._clear()

    def _clear(self) -> None:
        self._guard.begin()
        self.losses.begin()
        self._spacing: float | None = None  # steps to the next measured one, as rank 0 reports them
        out, facts = self._out, self._facts = RawScalars(), StepContext()
        self._stage = MatrixStage(
            self.members, self.requested, self._start, self.features.sample, self._copies, self.processes, facts, out
        )
        self._stage.contributions.overwrites = self._overwrites
        self.attention.clear(self.requested, out)
        self.features.clear(self.requested, facts, out)

    @property
    def calls(self) -> Sequence[RootCall]:
        """The calls of the model that were recorded in the step that is watched."""
        return self.features.capture.roots or self.step_loss.returned

    def arm(self, keys: Collection[str], before_forward: Callable[[], None] = _do_nothing) -> None:
        """Register the hooks that watch the next step.

        Args:
            keys: quantities to measure, some or all of the settings'. With :data:`START` the batch becomes the one that
                ``feature_drift`` is measured on. With :data:`STEP_LOSS` the whole batch runs once more for its loss.
                With :data:`TURN` the step is measured only if an awaited optimizer steps. With :data:`CLEARED` the
                engine observes whether gradients are cleared.
            before_forward: called before the forward, if that runs inside the optimizer's step.
        """
        quantities = set(keys) - {START, STEP_LOSS, TURN, CLEARED}
        self._awaited = self.turns.awaited if TURN in keys else frozenset()
        self._reported = self.settings.only(quantities) if quantities else None
        quantities |= {"feature_drift"} if START in keys else set()
        self.requested = self.settings.only(quantities or {"lr"})  # nothing is recorded for the learning rate
        self.disarm()
        self.armed, self.idle = True, False
        self._before_forward = before_forward
        self.step_loss.begin(STEP_LOSS in keys)
        with self._guard("setting up"):
            self._facts.replaced = self._tracker.moved(self._warn)
            self.features.arm()
            if not self.features.capture.hidden_layers:
                self.attention.arm(self.requested)
            if self.processes is None and ("contribution" in self.requested.keys or CLEARED in keys):
                self.reuse.arm(output_parameters(self.anatomy.layers))
            if "g" in self.requested.needs:
                self._arrived.arm()
            self.step_loss.arm()
            self.optimizers.arm()

    def disarm(self) -> None:
        """Remove every hook and drop all records; safe to call at any time."""
        self.armed = False
        self.step_loss.begin(False)
        self.optimizers.disarm()
        self.reuse.disarm()
        self._arrived.disarm()
        self._clear()

    def finish(self, step: int, step_inputs: StepInputs) -> Measurement | None:
        """Return the measurement of the watched step, and disarm.

        Args:
            step: optimizer steps taken, including this one.
            step_inputs: what the training loop knows of the step. If ``only_if_stepped``, :attr:`idle` says whether an
                optimizer has stepped.

        Returns:
            ``None`` if the step could not be measured; a warning says why.
        """
        measurement = None
        optional = step_inputs.only_if_stepped or bool(self._awaited)
        loss = None if step_inputs.loss is None else step_inputs.loss.detach()
        step_inputs = replace(step_inputs, loss=loss, only_if_stepped=optional)
        try:
            with self._guard("measuring"), full_precision():
                if self.armed and (self.processes is not None or not self._guard.failed):
                    measurement = self._measure(step, step_inputs)
            if measurement is not None:
                measurement.summary["overhead_ms"] = self._guard.spent * 1e3
            self.start_tried |= not (optional and self.idle)
            if self.budget is not None and self._reported and self.armed and not (optional and self.idle):
                self.budget.measured(step, self._guard.spent, self._spacing)
                if measurement is not None and self.budget.interval is not None:
                    measurement.summary["interval"] = float(self.budget.interval)
        finally:
            self.disarm()
        return measurement

    def _measure(self, step: int, step_inputs: StepInputs) -> Measurement | None:
        # Exchange the observations of all processes, and settle the facts of the step.
        forward = WatchedForward.empty(len(self.layers))
        with self._guard("evaluating the observations"):
            self._collect(forward, step_inputs)
        processes = self.processes
        observation = self._observation(forward, step_inputs)
        reports = run(census(observation, forward.layers, forward.output_hashes, processes), processes)
        if not self._agree(reports):
            return None
        if self.idle and any(report.optional for report in reports.steps):
            if self._awaited and reports.anywhere("stepped"):
                self.turns.missed()
            return None
        self.correct_roles(self.features.readouts.settle(reports))
        stage, out, facts = self._stage, self._out, self._facts
        facts.multipliers = self.multipliers
        settle_facts(facts, reports, step_inputs)
        facts.optimized, facts.modes = optimized_layers(self.layers, self.optimizers), self._modes.look()
        facts.loss_fault = self.losses.fault
        if self._awaited:
            self.turns.taken(facts.stepped)
        elif len(self.optimizers.optimizers) > 1 and self._reported is not None:
            self.turns.measured(facts.optimized, facts.stepped)
        if self.optimizers.compiled:
            self._warn(COMPILED_STEP)
        self.features.explain(reports)
        # Measure matrices and rows as they were in the step, then run the forward again.
        rows = self.features.begin_rows(reports)
        run(agreed(self._before_replay(rows, forward), processes), processes)
        if self.features.wanted:
            due, start = self._drift_due(), self._parameters
            run(self.features.changes(forward, rows, step_inputs, due, stage, start), processes)
            if self._guard.failed and processes is None:
                return None
        if self.step_loss.wanted:
            optimizers = len(self.optimizers.optimizers)
            run(self.step_loss.after(optimizers, step_inputs, reports, facts, processes, out), processes)
        if self._reported is None:
            return None
        if self.optimizers.repeated:
            self._warn(STEPPED_AGAIN)
        self.measured += 1
        self.drifts += "feature_drift" in self._reported.keys
        self.comparisons += bool(COMPARED & set(self._reported.keys))
        raw = out.fetch()
        self.attention.settle(raw, facts)
        measurement = self._assemble(step, self._reported, facts, raw)
        self._overwrites |= facts.rewritten
        self.features.settle(measurement)
        return measurement

    def _collect(self, forward: WatchedForward, step_inputs: StepInputs) -> None:
        """Fill in what hooks have recorded of the step's forward, and how it can be run again."""
        self._stage.rest()
        self.attention.rest()
        forward.loss_replayable = self.step_loss.can_run(step_inputs)
        self.features.look(forward, step_inputs)
        observe(forward, self.features, self._facts, self.processes)

    def _observation(self, forward: WatchedForward, step_inputs: StepInputs) -> StepObservation:
        """Return this process's report on the step, also after a failure."""
        stepped, awaited = self._facts.stepped, self._awaited
        loss, replayable = forward.backward_loss, forward.replayable
        return StepObservation(
            failed=self._guard.failed,
            stepped=bool(stepped & awaited if awaited else stepped),
            optional=step_inputs.only_if_stepped,
            moved=self.features.moved,
            closures=max(self.optimizers.closure_calls.values(), default=0),
            replay_kind=0 if replayable is None else 1 if isinstance(replayable, RootCall) else 2,
            loss=forward.loss is not None,
            measured=self.measured,
            drifts=self.drifts,
            probe=self.probe_taken,
            subset_state=forward.subset_state,
            samples=self.features.replays.subset.samples,
            spacing=0.0 if self.budget is None else self.budget.wait,
            backward_loss=math.nan if loss is None or self.processes is None else float(loss),
            loss_replayable=forward.loss_replayable,
        )

    def _agree(self, reports: RankReports) -> bool:
        """Take over the counters of all processes, and return whether the step is measured."""
        steps = reports.steps
        self._spacing = None if self.processes is None else steps[0].spacing
        if any(step.failed for step in steps):
            if not self._guard.failed:
                ranks = ", ".join(str(rank) for rank, step in enumerate(steps) if step.failed)
                self._warn(f"a step was not measured: it failed in process {ranks}, which says why")
            return False
        self.idle = not any(step.stepped for step in steps)
        self.measured = int(max(step.measured for step in steps))
        self.drifts = int(max(step.drifts for step in steps))
        if not all(step.probe for step in steps):
            self.features.replays.probe = None  # it is of use only where every process has it
        return True

    def _before_replay(self, rows: RowStage, forward: WatchedForward) -> Coroutine[None]:
        """Measure matrices, attention, and rows as they were in the step."""
        features = self.features.routine(rows, forward.outputs)
        if self.processes is None:
            yield from sequence([self.attention.routine(), features])
        else:
            sampled = rows.sample(self.features.capture.calls)
            yield from gather([sampled, self._stage.routine(), self.attention.routine(), features])

    def _enter(self, optimizer: Optimizer) -> None:
        with self._guard("keeping the batch"):
            self._before_forward()

    def _before(self, optimizer: Optimizer) -> None:
        with self._guard("copying the weights"), full_precision():
            self._stage.before(optimizer)
            self.attention.before(optimizer)
            self.features.before(optimizer)

    def _ready(self, optimizer: Optimizer) -> None:
        with self._guard("reading the gradients"):
            if (reused := self.reuse.stepping(optimizer)) is not None:
                if self._reported is None:
                    self.reuse.keep(optimizer, reused)
                self._out.put(NETWORK, f"{REUSED}.{self.reuse.steps}", reused)
            self._stage.ready(optimizer, self._arrived.of(optimizer))
            self.step_loss.stepping()
            self.features.ready(optimizer, partial(self.attention.watching, self.requested))
            self._stage.norms.samples = self.features.capture.looked_at
            if len(self.optimizers.optimizers) == 1:
                self.features.end_forward()
                self.features.end_backward()
                self.attention.ready()

    def _after(self, optimizer: Optimizer) -> None:
        with self._guard("measuring the update"), full_precision():
            if not self._guard.failed:
                self._stage.after(optimizer)
            self.reuse.stepped(optimizer)
            self.features.capture.settled |= self._facts.stepped
