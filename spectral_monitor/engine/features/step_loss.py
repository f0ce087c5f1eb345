"""The loss of the whole batch after the step, which shows a correction whether its steps are too long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spectral_monitor.capture.hooks.registration import Harmless
from spectral_monitor.capture.hooks.returned_losses import ReturnedLosses
from spectral_monitor.capture.replay.eager_pass import undecorated
from spectral_monitor.capture.replay.replay import Repeatable, RootCall, why_not
from spectral_monitor.engine.agreement.rank_report import RankReports, mean_of_batches
from spectral_monitor.engine.features.step_inputs import Context, StepInputs
from spectral_monitor.engine.results.loss import why_unknown
from spectral_monitor.engine.results.raw import LOSS_CHANGE, NETWORK, RawScalars
from spectral_monitor.engine.results.reasons import StepContext
from spectral_monitor.layers.compiled import compiled_modules
from spectral_monitor.linalg import Coroutine
from spectral_monitor.messages import WarnOnce
from spectral_monitor.sharding import ProcessGroup
from spectral_monitor.state.rng import AutocastState

NOT_WHOLE = (
    "the loss after the step is not known, because the model does not return it; in a loop of your own, "
    "probe.report_loss(loss, again=...) takes a function that computes it"
)
IN_PARTS = (
    "weights are sharded over processes, and a model that is compiled or in half precision would also have to be run "
    "before the step"
)
"""Why a step's loss cannot be had although it can be run again."""
NOT_REPEATABLE = (
    "run again, the loss is {repeated:.4g}, not {original:.4g} as in the step; a function given to report_loss must "
    "compute the same loss again from its own micro-batch (lambda x=x, y=y: ...), and random numbers drawn before its "
    "forward, such as those that choose the batch, must be drawn before the step begins"
)
TOLERANCE, EAGER_TOLERANCE = 1e-3, 0.5
"""Relative differences that a loss may have when it is computed again: in the same way, and eagerly and in full
precision instead, where other random numbers are drawn than in compiled code.
"""
UNNOTICED = "steps that are too long are not noticed"
ELSEWHERE = "the loss after the step is not known in another process"


class MicroBatch(NamedTuple):
    """One of several micro-batches whose gradients are added up."""

    forward: Repeatable
    loss: Tensor  # that its backward pass began with


class StepLoss:
    """Runs the forward of a step again on the whole batch when the optimizer has stepped.

    A forward that is compiled or in half precision returns a rounded loss, and the change of the loss is small. So it
    runs eagerly and in full precision, before the step and after it. The first time every forward also runs before the
    step, to see whether it gives the same loss again.

    If no forward is offered, the calls of the model that return a loss are run again.

    Attributes:
        wanted: whether the loss after the step that is watched is asked for.
        watching: entered around each forward that is run again.
    """

    def __init__(
        self,
        model: nn.Module,
        rerun: Callable[..., Tensor | None],
        sharded: bool,
        returned: bool,
        warn: WarnOnce,
        harmless: Harmless,
    ) -> None:
        """``rerun``: runs a forward again without a trace and returns its loss, see :meth:`.replays.Replays.rerun`;
        ``sharded``: whether processes share weights; ``returned``: whether calls of the model are watched;
        ``harmless``: entered around what hooks do.
        """
        self._model, self._rerun, self._sharded, self._warn = model, rerun, sharded, warn
        self._graph = self._checked = False
        self.watching: Context = nullcontext
        self._lasting_obstacle = ""  # in every step
        self._calls = ReturnedLosses(model, harmless) if returned else None
        self._compiled = bool(compiled_modules(model))
        self.begin(False)

    def begin(self, wanted: bool) -> None:
        """Forget the last step; ``wanted``: whether the loss after the coming one is asked for."""
        self.wanted = wanted
        if self._calls is not None:
            self._calls.disarm()
        self._forwards: list[Repeatable] = []  # of the micro-batches
        self._earlier_losses: list[Tensor] = []  # of the micro-batches before the last one
        self._returned: Sequence[RootCall] = ()  # the forwards, if they are calls that returned their losses
        self._context: Context = nullcontext
        self._before: Tensor | None = None  # the loss of the forwards run again before the step
        self._rounded = False
        self._obstacle = self._lasting_obstacle  # why the loss after the step is not known

    def arm(self) -> None:
        """Register the hooks that watch which calls of the model return a loss, if they are needed."""
        if self._calls is not None and self.wanted:
            self._calls.arm()

    @property
    def returned(self) -> Sequence[RootCall]:
        """The calls of the model that returned a loss in the step that is watched."""
        return () if self._calls is None else self._calls.calls

    def offer(self, forward: Repeatable, context: Context = nullcontext, earlier: Sequence[MicroBatch] = ()) -> None:
        """Take the forwards that led to the loss of the step that is watched.

        Args:
            forward: of the last micro-batch.
            earlier: micro-batches before the last one whose gradients are part of the step.
        """
        if self.wanted:
            self._forwards, self._context = [*(batch.forward for batch in earlier), forward], context
            self._earlier_losses = [batch.loss for batch in earlier]
            self._obstacle = self._lasting_obstacle or next(filter(None, map(why_not, self._forwards)), "")

    def stepping(self) -> None:
        """Run the forwards before the optimizer steps, if the loss they returned is not precise enough, or if it is not
        known yet whether they give it again.
        """
        if self._calls is not None:
            self._calls.close()
            calls = self.returned
            if self.wanted and calls and not self._forwards:
                earlier = [MicroBatch(call, loss) for call in calls[:-1] if (loss := call.loss) is not None]
                self.offer(calls[-1], earlier=earlier)
                self._returned = calls
        if not self._forwards or self._before is not None or self._obstacle:
            return
        with self._context():
            halves = AutocastState.now(self._model).halves or any(call.halves for call in self._returned)
            self._rounded = self._compiled or halves or bool(undecorated(self._model))
        if self._rounded and self._sharded:
            self._obstacle = IN_PARTS
        elif self._rounded:
            self._forwards = [forward.precise() for forward in self._forwards]
        if not self._obstacle and (self._rounded or not (self._checked or self._sharded)):
            self._before = self._total()

    @torch.no_grad()
    def after(
        self,
        optimizers: int,
        step_inputs: StepInputs,
        reports: RankReports,
        facts: StepContext,
        processes: ProcessGroup | None,
        out: RawScalars,
    ) -> Coroutine[None]:
        """Put the change of the loss, the mean over the batches of all processes, or the reason why it is not known.

        Args:
            optimizers: how many made a step.
            facts: of the step; the reason goes there, and the precision of the loss.
            out: the change goes there.
        """
        replayable = all(step.loss_replayable for step in reports.steps)
        self._obstacle = (
            self._obstacle or why_unknown(optimizers, facts, replayable) or ("" if replayable else NOT_WHOLE)
        )
        change = None if self._obstacle else self._change(step_inputs)
        change = None if change is None else change * facts.loss_parts
        change, _ = yield from mean_of_batches(change, (), reports, processes)
        reason = self._obstacle or (NOT_WHOLE if processes is None else ELSEWHERE)
        facts.no_loss = reason if change is None else ""
        dtypes = {p.dtype for p in self._model.parameters() if p.is_floating_point()}
        facts.loss_eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
        if change is not None:
            out.put(NETWORK, LOSS_CHANGE, change)

    @contextmanager
    def _around(self) -> Iterator[None]:
        with self._context(), self.watching():
            yield

    def _run(self, forward: Repeatable) -> Tensor | None:
        """Return the loss of a forward, run with a graph if it fails without: it may contain derivatives."""
        try:
            return self._rerun(forward, self._around, graph=self._graph)
        except RuntimeError as error:
            if self._graph or self._sharded or isinstance(error, torch.OutOfMemoryError):
                raise
            loss = self._rerun(forward, self._around, graph=True)
            self._graph = True
            return loss

    def can_run(self, step_inputs: StepInputs) -> bool:
        """Return whether this process knows the loss before the step and can run again all that led to it."""
        self._check(step_inputs)
        count, accumulated = len(self._forwards), step_inputs.accumulated
        # A loss that is divided by 1 is that of one batch, or of several that are added up.
        complete = count == accumulated or (accumulated == 1 and count > 1)
        return complete and not self._obstacle and self._trained_loss(step_inputs) is not None

    def _check(self, step_inputs: StepInputs) -> None:
        """See, once, whether the forwards run again before the step gave its loss."""
        loss = self._trained_loss(step_inputs)
        if self._checked or self._before is None or loss is None:
            return
        self._checked = True  # in all processes, which may have to run it together
        repeated, original = float(self._before / step_inputs.accumulated), float(loss)
        tolerance = EAGER_TOLERANCE if self._rounded else TOLERANCE
        if abs(repeated - original) > tolerance * abs(original):
            self._obstacle = self._lasting_obstacle = NOT_REPEATABLE.format(repeated=repeated, original=original)
            self._warn(f"{self._obstacle}; {UNNOTICED}")

    def _trained_loss(self, step_inputs: StepInputs) -> Tensor | None:
        """Return the loss of the step as backward passes began with it; ``None`` if it is not known."""
        if self._returned:
            losses = [call.loss for call in self._returned if call.loss is not None and _is_whole(call, step_inputs)]
            complete = len(losses) == len(self._returned)
            return torch.stack(losses).double().sum() / step_inputs.accumulated if complete else None
        if step_inputs.loss is None:
            return None
        return torch.stack([*self._earlier_losses, step_inputs.loss]).double().sum()

    def _total(self) -> Tensor | None:
        """Run all micro-batches; return the sum of their losses, ``None`` if one has none or cannot be run again."""
        try:
            losses = [loss for forward in self._forwards if (loss := self._run(forward)) is not None]
        except Exception as error:
            self._obstacle = f"the step could not be run again ({type(error).__name__}: {error})"
            self._warn(f"{self._obstacle}; {UNNOTICED}", error)
            return None
        return torch.stack(losses).double().sum() if len(losses) == len(self._forwards) else None

    def _change(self, step_inputs: StepInputs) -> Tensor | None:
        """Return the change of the loss by the step, and the loss before it."""
        trained, after = self._trained_loss(step_inputs), self._total()
        before = trained if self._before is None else self._before / step_inputs.accumulated
        assert before is not None
        return None if after is None else torch.stack([after / step_inputs.accumulated - before, before])


def _is_whole(call: RootCall, step_inputs: StepInputs) -> bool:
    """Return whether the backward pass began with the loss that a call returned, and with nothing else."""
    return call.flow is not None and bool(
        call.flow.whole(step_inputs.accumulated, step_inputs.loss_parts, divided=True)
    )
