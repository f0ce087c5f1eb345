"""Everything about features in a measured step: its own passes, their rows, and replays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spectral_monitor.capture.hooks.forward import FeatureCapture
from spectral_monitor.capture.hooks.recording import no_foresight
from spectral_monitor.capture.hooks.registration import Harmless
from spectral_monitor.capture.replay.eager_pass import LossGradient
from spectral_monitor.capture.replay.feature_change import Outputs
from spectral_monitor.capture.replay.replay import Replayable
from spectral_monitor.capture.row_sampling import RowLimit, WeightVersions, chosen_rows, weight_versions
from spectral_monitor.capture.unwrap import parameters_of
from spectral_monitor.engine.agreement.output_layers import Readouts
from spectral_monitor.engine.agreement.rank_report import LayerObservation, RankReports
from spectral_monitor.engine.features.changes import ChangeStage
from spectral_monitor.engine.features.full_tier import ALONE, SINGLE_PROCESS, FullStage
from spectral_monitor.engine.features.kernels import BACKWARD, GraphPasses
from spectral_monitor.engine.features.outputs import OF_ROWS, measure_noise, measure_outputs
from spectral_monitor.engine.features.replay_subset import ELSEWHERE, NO, YES
from spectral_monitor.engine.features.replays import ReplayOutcome, Replays
from spectral_monitor.engine.features.stage import RowStage, input_rows
from spectral_monitor.engine.features.step_inputs import Context, StepInputs
from spectral_monitor.engine.model_layout import ModelLayout
from spectral_monitor.engine.results.measurement import known_errors, relative_errors
from spectral_monitor.engine.results.noise import DIVIDED
from spectral_monitor.engine.results.noise import KEY as NOISE
from spectral_monitor.engine.results.raw import LOSS, NETWORK, RawScalars
from spectral_monitor.engine.results.reasons import MOVED, StepContext
from spectral_monitor.engine.settings import FEATURES, Settings
from spectral_monitor.engine.weights.matrix_batches import BatchMember
from spectral_monitor.engine.weights.norms import rows_worth
from spectral_monitor.engine.weights.stage import MatrixStage
from spectral_monitor.linalg import Coroutine, gather, sequence
from spectral_monitor.measurement import Measurement
from spectral_monitor.messages import WarnOnce
from spectral_monitor.sharding import ProcessGroup


@dataclass
class WatchedForward:
    """The forward of the step as one process has seen it, when the step is over."""

    layers: list[LayerObservation]  # the report on each layer
    output_hashes: Tensor  # (layers, 2) hashes of its outputs' rows
    outputs: Outputs = field(default_factory=dict)  # layer index -> its outputs in the step
    replayable: Replayable | None = None  # how the forward can be run again; ``None`` if it cannot
    no_replay: str = ""  # why it cannot
    loss: Tensor | None = None  # its loss; ``None`` if it is not known
    backward_loss: Tensor | None = None  # the loss that the backward pass began with; ``None`` if it is not known
    subset_state: float = NO  # whether the first samples are enough where it is run again
    loss_replayable: bool = False  # whether all that led to the loss can be run again

    @classmethod
    def empty(cls, layers: int) -> WatchedForward:
        """Return a forward of which nothing was seen."""
        return cls([LayerObservation() for _ in range(layers)], torch.zeros(layers, 2, device="cpu"))


class FeatureWatch:
    """Watches features during measured steps; where only weights are asked for, it does nothing.

    Attributes:
        capture: records the calls of layers.
        replays: runs forwards again.
        readouts: finds out from calls which layers are readouts.
        moved: whether weights were changed between the forward and the optimizer's step.
    """

    def __init__(
        self,
        model: nn.Module,
        wrapper: nn.Module,
        layout: ModelLayout,
        settings: Settings,
        processes: ProcessGroup | None,
        harmless: Harmless,
        warn: WarnOnce,
        warn_here: WarnOnce,
    ) -> None:
        """``wrapper``: FSDP's, which is called in the model's place to gather its weights; the model if there is none;
        ``warn_here``: warns of what happened in this process alone.
        """
        self._model = model
        self._members: Sequence[BatchMember] = layout.members
        self._processes = processes
        self._alone = processes is None and wrapper is model
        self._harmless, self._warn = harmless, warn
        layers = dict(enumerate(layout.layers)) if settings.needs & FEATURES else {}
        limit = RowLimit(settings.max_rows, len(set(processes.batches)) if processes else 1)
        # FSDP moves the storage of flat parameters itself.
        watched = [p for p in model.parameters() if id(p) not in layout.flat]
        self.capture = FeatureCapture(model, layers, limit, watched, harmless, layout.entries, not layout.sharded)
        self.replays = Replays(model, wrapper, self.capture, settings, layout.compiled, warn, warn_here)
        self.readouts = Readouts(layout.anatomy)
        self._context: Context = nullcontext

    def clear(self, requested: Settings, facts: StepContext, out: RawScalars) -> None:
        """Drop what was seen, and begin a step with the ``requested`` settings; reasons go into ``facts``."""
        self.capture.disarm()
        self.replays.begin(requested.needs, facts)
        self._requested, self._keys, self._facts, self._out = requested, frozenset(requested.keys), facts, out
        self._weight_versions: dict[int, WeightVersions] = {}  # by optimizer
        self.moved = False
        self._rows: RowStage | None = None
        self._subset_state: float = NO

    @property
    def wanted(self) -> bool:
        """True if the step's quantities need hooks on modules."""
        return bool(self._requested.needs & FEATURES)

    def arm(self) -> None:
        """Register the hooks, if any are needed."""
        if not self.wanted:
            return
        capture, keys = self.capture, self._keys
        capture.look_for(keys if self._alone else {NOISE} & keys)
        capture.watch_gradients = bool(BACKWARD & keys)
        capture.watch_weights = "gradient_change" in keys and self._alone
        capture.watch_losses = "dh" in self._requested.needs or capture.watch_gradients
        foresight = no_foresight if ALONE & keys else self.replays.subset.foresee
        ranked = bool({"backward_stable_rank", "backward_rms"} & keys)
        capture.foresee(foresight, ranked)
        capture.traced = not self.readouts.complete
        self.readouts.begin()
        capture.arm()

    def offer(self, training_step: Replayable, gradient: float, context: Context) -> None:
        """Take a training step whose backward pass begins now, to be run again where its parts cannot be seen.

        ``gradient``: of its loss, with which the backward pass begins.
        """
        self.replays.training_step, self._context = (training_step, LossGradient(gradient)), context

    def begin_forward(self) -> None:
        """Forget earlier calls: the forward that leads to the step begins now, its backward pass later."""
        self.capture.begin()
        self.capture.backward_open = False

    def end_forward(self) -> None:
        """Leave out later calls: the forward is done."""
        self.capture.forward_open = False

    def begin_backward(self) -> None:
        """Take later gradients as those of the step; the forward is done."""
        self.capture.forward_open, self.capture.backward_open = False, True

    def end_backward(self) -> None:
        """Leave out later gradients."""
        self.capture.backward_open = False

    def before(self, optimizer: Optimizer) -> None:
        """Note the versions of the weights that an optimizer is about to change."""
        if self.wanted:
            self._weight_versions[id(optimizer)] = weight_versions(parameters_of(optimizer))

    def ready(self, optimizer: Optimizer, around: Context) -> None:
        """Look at what was recorded, now that an optimizer's gradients are complete; ``around`` is entered around a
        pass beside the step.
        """
        capture = self.capture
        if self.wanted and not self.replays.looked_aside:
            self.replays.look_aside(lambda: self._aside(around()))
        if capture.traced:
            self.readouts.stepped(optimizer, capture.backward_pass)
        capture.drop_unfinished()
        if capture.weights:
            versions = self._weight_versions[id(optimizer)]
            self.moved |= any(capture.weights.get(p, version) != version for p, version in versions.items())

    @contextmanager
    def _aside(self, around: AbstractContextManager[object]) -> Iterator[None]:
        with self._context(), around:
            yield

    def look(self, forward: WatchedForward, step_inputs: StepInputs) -> None:
        """Fill in what was recorded of the step's forward, and how it can be run again."""
        if self.wanted:
            forward.outputs = self.capture.outputs()
            forward.replayable, forward.loss, forward.no_replay = self.replays.choose(step_inputs, self.moved)
            forward.backward_loss = step_inputs.backward_loss(forward.loss)
            forward.subset_state = self.replays.look(forward.replayable)

    def explain(self, reports: RankReports) -> None:
        """Note among the facts which features were not seen, or of some samples only."""
        capture, facts = self.capture, self._facts
        facts.unobserved = self.replays.unobserved or (MOVED if any(step.moved for step in reports.steps) else "")
        facts.shared = capture.shared
        facts.sampled = bool(capture.looked_at)
        facts.halved = capture.halved and capture.looked is None and self._requested.replay_samples is not None
        if reports.batch_count < len(reports.batches):
            facts.why_not[NOISE, NETWORK] = DIVIDED

    def begin_rows(self, reports: RankReports) -> RowStage:
        """Begin to measure rows, now that all processes know the others' reports."""
        self._rows = RowStage(self._members, self._requested, reports, self._processes, self._out)
        return self._rows

    def routine(self, rows: RowStage, outputs: Outputs) -> Coroutine[None]:
        """Measure rows as the step saw them."""
        calls, keys = self.capture.calls, self._keys
        routines = [rows.forward(calls)] if self.wanted else []
        if NOISE in keys:
            routines.append(measure_noise(calls, len(self._members), self._processes, self._out))
        if OF_ROWS & keys:
            routines.append(measure_outputs(rows, keys, calls, outputs, self._facts))
        yield from (sequence if self._processes is None else gather)(routines)

    def sample(self, i: int) -> Tensor | None:
        """Return the input rows that a layer's alignments are measured on."""
        if self._processes is not None:
            return None if self._rows is None else self._rows.samples.get(i)
        rows = input_rows(self.capture.calls.get(i, ()))
        if rows is None:
            return None
        max_rows = None if self._requested.max_rows is None else rows_worth(self._members[i].layer.layout)
        index = chosen_rows(len(rows), max_rows, rows.device)
        return rows if index is None else rows[index]

    def changes(
        self,
        forward: WatchedForward,
        rows: RowStage,
        step_inputs: StepInputs,
        due: bool,
        stage: MatrixStage,
        start: Mapping[str, Tensor],
    ) -> Coroutine[None]:
        """Run the forward again and measure how the step changed the features.

        Args:
            due: whether the probe batch is run again too.
            stage: has the weights before the step, and their learning rates.
            start: parameter name -> its value at the start of the run, where a quantity needs it.
        """
        steps = rows.reports.steps
        if self._processes is not None:
            self._out.note(NETWORK, LOSS, rows.reports.backward_loss)
        elif forward.backward_loss is not None:
            self._out.put(NETWORK, LOSS, forward.backward_loss)
        facts, host, keys = self._facts, self._requested.low_memory, ALONE & self._keys
        if not self._alone:
            facts.why_not |= {(key, NETWORK): SINGLE_PROCESS for key in keys}
            keys = frozenset()
        full = FullStage(self._model, self.capture, keys, host, facts, self._out, stage.old)
        full.checks()
        subset = self.replays.subset
        same_size = subset.agree([int(step.samples) for step in steps])
        self._subset_state = subset_state = min(int(step.subset_state) for step in steps) if same_size else NO
        replay = full.replay(forward.outputs, subset.portion if subset_state == YES else None)
        self.capture.drop_inputs()
        replayable, facts.no_replay = forward.replayable, forward.no_replay
        if len({step.replay_kind for step in steps}) > 1:
            replayable = None
            facts.no_replay = "the forward cannot be run again: the processes called the model differently"
        with self._harmless("running the forward again"):
            self.replays.run(due, replayable, subset_state, replay, step_inputs.context)
        outcome, self.replays.outcome = self.replays.outcome, ReplayOutcome()
        before = forward.loss if all(step.loss for step in steps) else None
        changes = ChangeStage(rows, full)
        yield from changes.measure(outcome, subset.disabled, facts, before)
        if changes.all_samples and not subset.disabled:
            subset.give_up()
            self.replays.warn_useless(ELSEWHERE)
        if changes.probe_lost:
            self.replays.probe = None
        with self._harmless("running the forward again with a graph"):
            graphs = GraphPasses(
                self._model, self.capture, keys, host, facts, self._out, self._warn, step_inputs, stage.rates
            )
            graphs.measure(replayable, forward.outputs)
            full.linearized(self.replays.probe, start, step_inputs.context)

    def settle(self, measurement: Measurement) -> None:
        """Run more samples from the next step on, if the numbers of these were too uncertain."""
        if self._subset_state == YES:
            changes = relative_errors(measurement.values, measurement.errors, "feature_change")
            self.replays.subset.widen(changes, known_errors(measurement.errors, "bfa_cos"))
