"""The supervisor: it decides what is measured, judges measurements and corrects learning rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

from spectral_monitor.capture.replay.loss_graph import Depth, depth_of, embedding_scales, is_over_classes
from spectral_monitor.condition import NETWORK, Judge, Remedy, SpectralCondition, Verdict
from spectral_monitor.condition.bands import bands
from spectral_monitor.condition.causes.explanation import SIZE_OR_RATES
from spectral_monitor.condition.optimizers.forgotten import Forgotten
from spectral_monitor.condition.optimizers.hyperparameters import Hyperparameters, hyperparameters
from spectral_monitor.condition.optimizers.plans import Plan
from spectral_monitor.condition.optimizers.recipe import describe
from spectral_monitor.condition.trends.movement import GRADIENTS_NOT_FINITE
from spectral_monitor.correction import Corrector, LRCorrection
from spectral_monitor.engine import CLEARED, START, STEP_LOSS, TURN, Engine
from spectral_monitor.engine.results.loss import UPHILL
from spectral_monitor.layers import compiled_modules
from spectral_monitor.layers.inspect_model import LEFT_OUT
from spectral_monitor.measurement import SUMMARY, Measurement
from spectral_monitor.messages import WarnOnce
from spectral_monitor.monitoring.correction_report import CorrectionReport, adapt, limits_reached
from spectral_monitor.monitoring.settings import Mode
from spectral_monitor.monitoring.unoptimized import other_parameters, skipped_for_nan, unregistered
from spectral_monitor.parametrization.init import looks_drawn, rescale, starting_norm
from spectral_monitor.reporting.content.headline import announcement

BEGINNING = frozenset({"weight_natural", "drift_ratio"})
"""Quantities that show which layers began at zero; if requested, they are measured at the first measured step."""

EARLY = 8
"""Each of the first steps that a correction measures is later than the last by one part in this many."""


class Supervisor:
    """Judges every measurement of an engine and, with a correction, corrects the optimizers' learning rates.

    Attributes:
        settings: layer -> its optimizer's settings at the latest measurement.
        began: root verdicts that began at the latest measurement.
    """

    def __init__(
        self, mode: Mode, condition: SpectralCondition, correction: LRCorrection | None, engine: Engine
    ) -> None:
        self._silent = mode == "observe"
        self._engine = engine
        self._warn = WarnOnce(silent=engine.processes is not None and engine.processes.rank > 0)
        self._plans: dict[nn.Parameter, Plan] = {}
        tied = {layer.info.name: layer.tied_to for layer in engine.anatomy.layers if layer.tied_to}
        self._profile_lacks = "" if condition.profile is None else condition.profile.lacks
        condition.check((layer.info for layer in engine.anatomy.layers), self._hyperparameters())
        self._judge = Judge(condition, tied)
        self.settings: dict[str, Hyperparameters] = {}
        self._forgotten = Forgotten(other_parameters(engine))
        self.began: tuple[Verdict, ...] = ()
        self._flagged: set[str] = set()
        self._graphs_read: set[bool] = set()  # for each graph, whether it was of a loss
        engine.losses.on_loss = self._read_graph
        self._latest_keys: frozenset[str] = frozenset()
        # A profile or the theory has a reference for every layer.
        self._has_expected_sizes = correction is not None and condition.reference == "balance"
        self._corrector: Corrector | None = None
        self._report: CorrectionReport | None = None
        if correction is not None:
            names = {item.name for item in engine.anatomy.unmeasured if not item.reason.startswith(LEFT_OUT)}
            unmeasured = [p for name, p in engine.model.named_parameters() if name in names]
            self._corrector = Corrector(
                correction, engine.anatomy.layers, engine.optimizers.optimizers, engine.attention.blocks, unmeasured
            )
            self._report = CorrectionReport(self._corrector)
            if correction.of_peak:
                engine.on_output = self._read_graph
                if engine.processes is None and not compiled_modules(engine.model):  # processes have different data
                    engine.step_loss.watching = self._corrector.wanted.data.watching
            engine.multipliers = self._corrector.by_layer()

    @property
    def recipe(self) -> str:
        """The recipe that the optimizers' settings follow, in a sentence; empty if they follow no known one."""
        return describe((layer.info for layer in self._engine.anatomy.layers), self._hyperparameters())

    @property
    def decision(self) -> str:
        """The meaning of learning rates under a correction, in a sentence; empty if it is unchanged."""
        return "" if self._corrector is None else self._corrector.decision

    @property
    def _expected(self) -> dict[str, float]:
        return self._corrector.expected if self._corrector is not None and self._has_expected_sizes else {}

    def plan(self, parameters: Sequence[nn.Parameter], plan: Plan) -> None:
        """Take the plan of the learning rate of a parameter group."""
        self._plans.update(dict.fromkeys(parameters, plan))
        if self._corrector is not None:
            self._corrector.plan(parameters, plan.highest)

    def _hyperparameters(self) -> dict[str, Hyperparameters]:
        return hyperparameters(self._engine.anatomy.layers, self._engine.optimizers.optimizers, self._plans)

    @property
    def multipliers(self) -> dict[str, float]:
        """Layer -> multiplier of its learning rate; empty without a correction."""
        return {} if self._corrector is None else self._corrector.multipliers

    def param_groups_code(self) -> str:
        """Return code that makes the optimizers with corrected learning rates; empty without a correction."""
        return "" if self._corrector is None else self._corrector.code(self._engine.model.named_parameters())

    def due(self, step: int, tell: Callable[[str], None] | None = None) -> frozenset[str]:
        """Return the quantities that are due at a step that begins now; usually none.

        ``tell`` receives a line when a budget makes intervals longer or shorter; by default it is a warning.
        """
        if self._corrector is not None:
            self._corrector.see_groups()
        keys, budget = self._wanted(step), self._engine.budget
        if step == self._first_measured_step:
            keys |= BEGINNING & set(self._engine.settings.keys)
        if budget is not None:
            budget.begin(step)
            keys = budget.granted(step, keys)
            if budget.news:
                (tell or self._warn)(budget.news)
        if self._report is not None:
            self._report.measures_loss = STEP_LOSS in keys
        if keys:
            self._latest_keys = keys - {STEP_LOSS}
        elif self._engine.turns.awaited and (budget is None or budget.affords(step)):  # no step in the last due one
            keys = self._latest_keys | {TURN}
        if keys and self._corrector is not None:
            self._engine.multipliers = self._corrector.by_layer()  # at the learning rates of this step
        if self._engine.reuse.is_open:
            keys |= {CLEARED}
        # Later steps would mistake weights that training has changed for the start.
        return keys | {START} if self._engine.start_due else keys

    @cached_property
    def _first_measured_step(self) -> int:
        """The first measured step of a correction or a schedule."""
        starts = {step for group in self._engine.settings.schedule.groups for step in (*group.first[:1], group.every)}
        return min(filter(self._wanted, {1, *starts}))

    def _wanted(self, step: int) -> frozenset[str]:
        """Return the scheduled quantities, and those that a correction needs at its own steps.

        A correction's steps are those at which its target quantity is due, and the first ones, which show it most.
        """
        timetable = self._engine.settings.schedule
        keys = timetable.due(step)
        if self._corrector is not None:
            needed = self._corrector.correction.quantities
            schedule, scheduled_keys = timetable.with_key(needed[0])
            if step in _first_steps(schedule.every):
                keys |= scheduled_keys
            if needed[0] in keys:
                keys |= frozenset(needed) | ({STEP_LOSS} if self._corrector.wants_loss(step) else frozenset())
        return keys

    def arm(self) -> None:
        """Correct every step from now on."""
        if self._corrector is not None:
            self._corrector.arm()

    def disarm(self) -> None:
        """Stop correcting; safe to call at any time."""
        if self._corrector is not None:
            self._corrector.disarm()

    def rescale(self) -> bool:
        """Rescale the measured weights if the correction says so; return whether it does."""
        size = False if self._corrector is None else self._corrector.correction.spectral_init
        layers = self._engine.anatomy.layers
        if size == "auto":
            size = looks_drawn(layers)
        if size:
            rescale(layers, starting_norm(self._engine.model, layers) if size is True else float(size))
        return bool(size)

    def judge(self, measurement: Measurement, warn: Callable[[str], None]) -> Measurement:
        """Return the measurement with its verdicts.

        No error here, or in :meth:`correct`, stops training.

        ``warn`` receives a sentence on each layer that begins to violate the condition.
        """
        self.began = ()
        try:
            measurement = self._judged(measurement)
        except Exception as error:
            self._warn(f"a measurement was not judged ({type(error).__name__}: {error})", error)
            return measurement
        self.began = self._judge.began
        if not self._silent:  # outside of the try block: users who turn warnings into errors want these errors
            if self._profile_lacks:
                warn(self._profile_lacks)
                self._profile_lacks = ""
            for verdict in self.began:
                warn(announcement(verdict, measurement))
        return measurement

    def _read_graph(self, output: Tensor) -> None:
        """Read unregistered parameters from the graph of the first loss, and what a correction of peak rates needs from
        this step on from that and from the graph of the first outputs: depth, recurrent layers, embedding scales.
        """
        is_loss = output.dim() == 0
        if output.grad_fn is None or is_loss in self._graphs_read:
            return
        is_first = not self._graphs_read
        self._graphs_read.add(is_loss)
        if is_loss:
            self._engine.losses.on_loss = self._engine.on_output = None
            if self._engine.processes is None:  # FSDP computes with parameters of its own
                self._forgotten.watch(unregistered(output, self._engine.model))
        if self._corrector is None or not self._corrector.correction.of_peak:
            return
        self._corrector.wanted.see_graph(output)
        depth, previous = depth_of(output), self._corrector.wanted.depth
        # Rules on chains and sums were found to hold for losses over classes only, those of post-norm for all.
        if not is_over_classes(output):  # an output tells nothing of the loss, which a resumed run may know
            depth = (Depth() if is_loss else previous)._replace(post_norms=depth.post_norms)
        if depth != previous:
            self._corrector.wanted.depth = depth
            self._engine.multipliers = self._corrector.by_layer()
        if is_first:  # the graph of a loss that is reported late has lost its constants
            self._corrector.wanted.scales = embedding_scales(output)

    def correct(self, measurement: Measurement, tell: Callable[[str], None] = lambda text: None) -> None:
        """Correct learning rates by a measurement; ``tell`` receives a line on each notable correction."""
        if self._corrector is None or self._report is None:
            return
        try:
            uphill = measurement.why("edge", SUMMARY) == UPHILL
            changes = self._corrector.update(measurement, self.settings, uphill)
            self._engine.multipliers = self._corrector.by_layer()
            if missed := self._corrector.unreached:
                self._warn(missed)
            matrices = {info.name for info in measurement.layers if info.is_matrix}
            changes = [change for change in changes if change.layer in matrices]
            for line in self._report.lines(measurement, changes):
                tell(line)
        except Exception as error:
            self._warn(f"learning rates were not corrected ({type(error).__name__}: {error})", error)
            return
        if limited := [change for change in changes if change.limited]:
            self._warn(f"step {measurement.step}: {limits_reached(limited, measurement)}")

    def _judged(self, measurement: Measurement) -> Measurement:
        verdicts = self._verdicts(measurement)
        flagged = {name for verdict in verdicts for name in verdict.layers}
        self._flagged |= flagged
        return replace(
            measurement,
            summary={**measurement.summary, "violations": float(sum(verdict.is_root for verdict in verdicts))},
            verdicts=verdicts,
            flags={layer: float(layer in flagged) for layer in sorted(self._flagged)},
            bands=self._bands(measurement),
            states=self._judge.states,
        )

    def _verdicts(self, measurement: Measurement) -> tuple[Verdict, ...]:
        """Return the verdicts on a measurement.

        Where a correction changes the size of updates, they are compared as
        :func:`~spectral_monitor.monitoring.correction_report.adapt` returns them.
        """
        expected, key = self._expected, "update_natural"
        self.settings = settings = self._hyperparameters()
        adapted = measurement
        if self._corrector is not None:
            of_peak = self._corrector.correction.of_peak
            adapted = adapt(measurement, expected, self._corrector.on_trial, of_peak)
            if of_peak:
                factors = self.multipliers
                settings = {name: own.with_limited_decay(factors.get(name, 1.0)) for name, own in settings.items()}
        if skipped_for_nan(measurement, self._engine.model):
            adapted = replace(adapted, summary={**adapted.summary, GRADIENTS_NOT_FINITE: 1.0})
        forgotten = self._forgotten.names(self._engine.optimizers.optimizers)
        verdicts = self._judge.judge(adapted, settings, forgotten)
        return tuple(
            replace(verdict, value=verdict.value * share, band=(verdict.band[0] * share, verdict.band[1] * share))
            if (share := expected.get(verdict.layer, 1.0)) != 1.0 and verdict.quantity == key
            else verdict
            for verdict in map(self._in_reach, verdicts)
        )

    def _in_reach(self, verdict: Verdict) -> Verdict:
        """Return a verdict with advice that suits the correction, which may set the size of every step itself."""
        if self._corrector is None:
            return verdict
        if not self._corrector.correction.of_peak:
            return replace(verdict, sentence=verdict.sentence.replace(SIZE_OR_RATES, "every learning rate"))
        sentence = verdict.sentence.replace(SIZE_OR_RATES, "the correction's size")
        sentence = sentence.replace("every learning rate by", "the correction's size by")
        scales_all = verdict.layer == NETWORK and verdict.remedy is not None and verdict.remedy.action == "scale_lr"
        return replace(verdict, sentence=sentence, remedy=Remedy("check") if scales_all else verdict.remedy)

    def _bands(self, measurement: Measurement) -> dict[str, torch.Tensor]:
        """Return the bands of all layers, scaled for layers that a correction enlarges on purpose."""
        names = [info.name for info in measurement.layers]
        layer_bands, key = bands(self._judge.findings, names), "update_natural"
        if key in layer_bands and (expected := self._expected):
            factors = torch.tensor([[expected.get(name, 1.0)] for name in names], device="cpu")
            layer_bands[key] = layer_bands[key] * factors
        return layer_bands

    def state_dict(self) -> dict[str, Any]:
        """Return the state to go on from, in plain types."""
        judge = self._judge.state_dict()
        if len(self._engine.settings.schedule.groups) == 1:  # each measurement is complete
            judge["known"] = {}
        state: dict[str, Any] = {"judge": judge, "flagged": sorted(self._flagged)}
        if self._corrector is not None:
            state["corrector"] = self._corrector.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`.

        Raises:
            ValueError: the state does not fit this model or these settings.
        """
        self._judge.load_state_dict(state["judge"])
        self._flagged = set(state["flagged"])
        if self._corrector is not None and self._report is not None and "corrector" in state:
            self._corrector.load_state_dict(state["corrector"])
            self._report.resume()
            self._engine.multipliers = self._corrector.by_layer()


@cache
def _first_steps(every: int) -> frozenset[int]:
    """Return the first steps that a correction measures: each an eighth later, until their distance is ``every``.

    At the same learning rate updates change faster early in a run.
    """
    steps, step = set(), 1
    while step < EARLY * every:
        steps.add(step)
        step += max(1, step // EARLY)
    return frozenset(steps)
