"""Everything about features in a measured step: its own passes, rows of them, and forwards that are run again."""

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
from spectral_monitor.capture.row_sampling import WeightVersions, chosen_rows, weight_versions
from spectral_monitor.capture.unwrap import parameters_of
from spectral_monitor.engine.agreement.output_layers import Readouts
from spectral_monitor.engine.agreement.rank_report import LayerObservation, RankReports
from spectral_monitor.engine.features.changes import ChangeStage
from spectral_monitor.engine.features.full_tier import ALONE, SEVERAL, FullStage
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
    prints: Tensor  # hashes of its outputs' rows
    outputs: Outputs = field(default_factory=dict)  # layer index -> its outputs in the step
    again: Replayable | None = None  # how the forward can be run again; ``None`` if it cannot
    no_replay: str = ""  # why it cannot
    loss: Tensor | None = None  # that it had; ``None`` if it is not known
    begun: Tensor | None = None  # the loss that the backward pass began with; ``None`` if it is not known
    part: float = NO  # whether the first samples will do where it is run again
    whole: bool = False  # whether all that led to the loss can be run again

    @classmethod
    def of(cls, layers: int) -> WatchedForward:
        """Return that of a forward of which nothing was seen."""
        return cls([LayerObservation() for _ in range(layers)], torch.zeros(layers, 2, device="cpu"))


class FeatureWatch:
    """Watches features during measured steps; where only weights are asked for, it does nothing.

    Attributes:
        capture: records the calls of layers.
        replays: runs forwards again.
        readouts: tells which layers are readouts by what is called.
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
        """``wrapper``: what is called in the model's place, to have its weights whole; the model if there is none;
        ``warn_here``: tells what happened in this process alone.
        """
        self._model = model
        self._members: Sequence[BatchMember] = layout.members
        self._processes = processes
        self._alone = processes is None and wrapper is model
        self._harmless, self._warn = harmless, warn
        layers = dict(enumerate(layout.layers)) if settings.needs & FEATURES else {}
        room = settings.max_rows and -(-settings.max_rows // (len(set(processes.batches)) if processes else 1))
        # Where the weights of a forward lie is no one's but FSDP's affair.
        watched = [p for p in model.parameters() if id(p) not in layout.flat]
        self.capture = FeatureCapture(model, layers, room, watched, harmless, layout.entries, not layout.sharded)
        self.replays = Replays(model, wrapper, self.capture, settings, layout.compiled, warn, warn_here)
        self.readouts = Readouts(layout.anatomy)
        self._context: Context = nullcontext

    def clear(self, asked: Settings, facts: StepContext, out: RawScalars) -> None:
        """Drop what was seen, and begin a step of which ``asked`` is measured; ``facts`` are told what is missing."""
        self.capture.disarm()
        self.replays.begin(asked.needs, facts)
        self._asked, self._keys, self._facts, self._out = asked, frozenset(asked.keys), facts, out
        self._held_at: dict[int, WeightVersions] = {}
        self.moved = False
        self._rows: RowStage | None = None
        self._part: float = NO

    @property
    def wanted(self) -> bool:
        """True if the step's quantities need hooks on modules."""
        return bool(self._asked.needs & FEATURES)

    def arm(self) -> None:
        """Register the hooks, if any are needed."""
        if not self.wanted:
            return
        capture, keys = self.capture, self._keys
        capture.look_for(keys if self._alone else {NOISE} & keys)
        capture.watch_gradients = bool(BACKWARD & keys)
        capture.watch_weights = "gradient_change" in keys and self._alone
        capture.watch_losses = "dh" in self._asked.needs or capture.watch_gradients
        foresight = no_foresight if ALONE & keys else self.replays.slices.foresee
        ranked = bool({"backward_stable_rank", "backward_rms"} & keys)
        capture.foresee(foresight, ranked, distributed=self._processes is not None)
        capture.traced = not self.readouts.complete
        self.readouts.begin()
        capture.arm()

    def offer(self, training_step: Replayable, gradient: float, context: Context) -> None:
        """Take a training step whose backward pass begins now, to be run again where its parts cannot be seen.

        Args:
            training_step: to be run again.
            gradient: of the loss it returned, that the backward pass begins with.
            context: to be entered around it.
        """
        self.replays.whole, self._context = (training_step, LossGradient(gradient)), context

    def begin_forward(self) -> None:
        """Forget calls made so far: the forward that leads to the step begins now, its backward pass later."""
        self.capture.begin()
        self.capture.backward_open = False

    def end_forward(self) -> None:
        """Leave out later calls: the forward is done."""
        self.capture.forward_open = False

    def begin_backward(self) -> None:
        """Take gradients from here on as those of the step; the forward is done."""
        self.capture.forward_open, self.capture.backward_open = False, True

    def end_backward(self) -> None:
        """Leave out later gradients."""
        self.capture.backward_open = False

    def before(self, optimizer: Optimizer) -> None:
        """Mark the weights that an optimizer is about to change."""
        if self.wanted:
            self._held_at[id(optimizer)] = weight_versions(parameters_of(optimizer))

    def ready(self, optimizer: Optimizer, around: Context) -> None:
        """Look at what was recorded when an optimizer's gradients are there; ``around`` is entered for a pass beside
        the step.
        """
        capture = self.capture
        if self.wanted and not self.replays.looked:
            self.replays.look_aside(lambda: self._aside(around()))
        if capture.traced:
            self.readouts.stepped(optimizer, capture.backward_pass)
        capture.drop_unfinished()
        if capture.weights:
            then, now = self._held_at[id(optimizer)], capture.weights
            self.moved |= any(now.get(p, mark) != mark for p, mark in then.items())

    @contextmanager
    def _aside(self, around: AbstractContextManager[object]) -> Iterator[None]:
        with self._context(), around:
            yield

    def look(self, forward: WatchedForward, given: StepInputs) -> None:
        """Fill in what was recorded of the step's forward, and how it can be run again."""
        if self.wanted:
            forward.outputs = self.capture.outputs()
            forward.again, forward.loss, forward.no_replay = self.replays.choose(given, self.moved)
            forward.begun = given.begun(forward.loss)
            forward.part = self.replays.look(forward.again)

    def explain(self, seen: RankReports) -> None:
        """Put what is known of features that were not seen, or of some samples only."""
        capture, facts = self.capture, self._facts
        facts.unseen = self.replays.unseen or (MOVED if any(some.moved for some in seen.steps) else "")
        facts.shared = capture.shared
        facts.sampled = bool(capture.looked_at)
        facts.halved = capture.halved and capture.looked is None and self._asked.replay_samples is not None
        if seen.batch_count < len(seen.batches):
            facts.why_not[NOISE, NETWORK] = DIVIDED

    def begin_rows(self, seen: RankReports) -> RowStage:
        """Begin to measure rows, now that all processes know of each other's."""
        self._rows = RowStage(self._members, self._asked, seen, self._processes, self._out)
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
        room = None if self._asked.max_rows is None else rows_worth(self._members[i].layer.layout)
        index = chosen_rows(len(rows), room, rows.device)
        return rows if index is None else rows[index]

    def changes(
        self,
        forward: WatchedForward,
        rows: RowStage,
        given: StepInputs,
        due: bool,
        stage: MatrixStage,
        start: Mapping[str, Tensor],
    ) -> Coroutine[None]:
        """Run the forward again and measure what the step changed of the features.

        Args:
            forward, rows: those of the step.
            given: what the training loop knows of the step.
            due: whether the probe batch is run again too.
            stage: has the weights before the step, and their learning rates.
            start: parameter name -> its value at the start of the run, where that is asked for.
        """
        seen = rows.census
        if self._processes is not None:
            self._out.note(NETWORK, LOSS, seen.begun)
        elif forward.begun is not None:
            self._out.put(NETWORK, LOSS, forward.begun)
        facts, host, asked = self._facts, self._asked.low_memory, ALONE & self._keys
        if not self._alone:
            facts.why_not |= {(key, NETWORK): SEVERAL for key in asked}
            asked = frozenset()
        full = FullStage(self._model, self.capture, asked, host, facts, self._out, stage.old)
        full.checks()
        slices = self.replays.slices
        alike = slices.agree([int(some.samples) for some in seen.steps])
        self._part = part = min(int(some.part) for some in seen.steps) if alike else NO
        replay = full.replay(forward.outputs, slices.portion if part == YES else None)
        self.capture.drop_inputs()
        again, facts.no_replay = forward.again, forward.no_replay
        if len({some.again for some in seen.steps}) > 1:
            again = None
            facts.no_replay = "the forward cannot be run again: the processes called the model differently"
        with self._harmless("running the forward again"):
            self.replays.run(due, again, part, replay, given.context)
        done, self.replays.done = self.replays.done, ReplayOutcome()
        known = all(some.loss for some in seen.steps)
        after = ChangeStage(rows, full)
        yield from after.measure(done, slices.off, facts, forward.loss if known else None)
        if after.off and not slices.off:
            slices.give_up()
            if not slices.automatic:
                self._warn(f"replay_samples is of no use: {ELSEWHERE}; the whole batch is run again")
        if after.probe_lost:
            self.replays.probe = None
        with self._harmless("running the forward again with a graph"):
            graphs = GraphPasses(
                self._model, self.capture, asked, host, facts, self._out, self._warn, given, stage.rates
            )
            graphs.measure(again, forward.outputs)
            full.linearized(self.replays.probe, start, given.context)

    def settle(self, measurement: Measurement) -> None:
        """Run more samples again from now on, if few were too uncertain."""
        if self._part == YES:
            changes = relative_errors(measurement.values, measurement.errors, "feature_change")
            self.replays.slices.widen(changes, known_errors(measurement.errors, "bfa_cos"))
