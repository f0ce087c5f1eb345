"""The loss of the whole batch after the step: for a correction that asks whether its steps are too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
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
    "the loss after the step is not known: nothing that is run again returns it (in a loop of your own, "
    "probe.report_loss(loss, again=...) tells how it is computed)"
)
IN_PARTS = "processes share weights, and what is compiled or in half precision would have to run before the step too"
"""Why a step's loss cannot be had although it can be run again."""
NOT_REPEATABLE = (
    "what is run again gives another loss ({again:.4g}) than the step had ({told:.4g}); a function given to "
    "report_loss must compute that loss again, of its own micro-batch (lambda x=x, y=y: ...), and random numbers that "
    "are drawn before its forward, such as those that choose the batch, must be drawn before the step begins"
)
SAME, ALIKE = 1e-3, 0.5
"""Parts by which a loss may differ from what it was: where the same was run again, and where it ran eagerly and in full
precision instead. Compiled code draws other random numbers.
"""
UNNOTICED = "steps that are too long are not noticed"
ELSEWHERE = "the loss after the step is not known in another process"


class MicroBatch(NamedTuple):
    """One of several whose gradients are added up: how to run its forward again, and what its backward began with."""

    again: Repeatable
    loss: Tensor


class StepLoss:
    """Runs the forward of a step again, whole, when the optimizer has stepped.

    Where it is compiled or in half precision, the loss that it returned is rounded, and so would be their difference,
    which is small. It then runs eagerly and in full precision, before the step and after it. The first time it always
    runs before the step too, to see whether it gives the same loss again.

    Where nothing is offered, the calls of the model that return a loss are run again.

    Attributes:
        wanted: whether the loss after the step that is watched is asked for.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Callable[..., Tensor | None],
        sharded: bool,
        returned: bool,
        warn: WarnOnce,
        harmless: Harmless,
    ) -> None:
        """``run``: runs a forward again without a trace and returns its loss, see :meth:`.replays.Replays.run_again`;
        ``sharded``: whether processes share weights; ``returned``: whether calls of the model are watched;
        ``harmless``: to be entered around what hooks do.
        """
        self._model, self._run_again, self._sharded, self._warn = model, run, sharded, warn
        self._graph = self._checked = False
        self._never = ""
        self._calls = ReturnedLosses(model, harmless) if returned else None
        self._compiled = bool(compiled_modules(model))
        self.begin(False)

    def begin(self, wanted: bool) -> None:
        """Forget the last step; ``wanted``: whether that of the coming one is asked for."""
        self.wanted = wanted
        if self._calls is not None:
            self._calls.disarm()
        self._parts: list[Repeatable] = []  # micro-batches, and what backward passes began with, but for the last
        self._losses: list[Tensor] = []
        self._returned: Sequence[RootCall] = ()  # calls whose losses are known by what they returned
        self._context: Context = nullcontext
        self._before: Tensor | None = None
        self._rounded = False
        self._why = self._never

    def arm(self) -> None:
        """Register the hooks that watch which calls of the model return a loss, if they are needed."""
        if self._calls is not None and self.wanted:
            self._calls.arm()

    @property
    def returned(self) -> Sequence[RootCall]:
        """The calls of the model that returned a loss in the step that is watched."""
        return () if self._calls is None else self._calls.calls

    def offer(self, again: Repeatable, context: Context = nullcontext, earlier: Sequence[MicroBatch] = ()) -> None:
        """Take what led to the loss of the step that is watched.

        Args:
            again: runs its forward again.
            context: to be entered around that.
            earlier: micro-batches before this one whose gradients are part of the step.
        """
        if self.wanted:
            self._parts, self._context = [*(part.again for part in earlier), again], context
            self._losses = [part.loss for part in earlier]
            self._why = self._never or next(filter(None, map(why_not, self._parts)), "")

    def _offer_returned(self) -> None:
        """Take the calls that returned the losses of the step's micro-batches, where nothing else was offered."""
        calls = self.returned
        if self.wanted and calls and not self._parts:
            self.offer(
                calls[-1],
                nullcontext,
                [MicroBatch(call, loss) for call in calls[:-1] if (loss := call.loss) is not None],
            )
            self._returned = calls

    def stepping(self) -> None:
        """Look at the loss before the optimizer steps, if that which the forward returned is not precise enough, or it
        is not known yet whether it can be had again.
        """
        if self._calls is not None:
            self._calls.close()
            self._offer_returned()
        if not self._parts or self._before is not None or self._why:
            return
        with self._context():
            halves = AutocastState.now(self._model).halves or any(call.halves for call in self._returned)
            self._rounded = self._compiled or halves or bool(undecorated(self._model))
        if self._rounded and self._sharded:
            self._why = IN_PARTS
        elif self._rounded:
            self._parts = [again.precise() for again in self._parts]
        if not self._why and (self._rounded or not (self._checked or self._sharded)):
            self._before = self._total()

    @torch.no_grad()
    def after(
        self,
        optimizers: int,
        given: StepInputs,
        seen: RankReports,
        facts: StepContext,
        processes: ProcessGroup | None,
        out: RawScalars,
    ) -> Coroutine[None]:
        """Put the change of the loss, the mean over the batches of all processes, or say why it is not known.

        Args:
            optimizers: how many made a step.
            given: what the training loop knows of the step.
            seen: reports of all processes.
            facts: of the step; are told why, and how precise the loss is.
            processes: those that train together.
            out: where it is put.
        """
        whole = all(some.whole for some in seen.steps)
        self._why = self._why or why_unknown(optimizers, facts, whole) or ("" if whole else NOT_WHOLE)
        change = None if self._why else self._change(given)
        change = None if change is None else change * facts.loss_parts
        change, _ = yield from mean_of_batches(change, (), seen, processes)
        unknown = self._why or (NOT_WHOLE if processes is None else ELSEWHERE)
        facts.no_loss = unknown if change is None else ""
        kinds = {p.dtype for p in self._model.parameters() if p.is_floating_point()}
        facts.loss_eps = max((torch.finfo(kind).eps for kind in kinds), default=0.0)
        if change is not None:
            out.put(NETWORK, LOSS_CHANGE, change)

    def _run(self, again: Repeatable) -> Tensor | None:
        """Return the loss; with a graph where it does not come without, for it has derivatives of the network in it."""
        try:
            return self._run_again(again, self._context, graph=self._graph)
        except RuntimeError as error:
            if self._graph or self._sharded or isinstance(error, torch.OutOfMemoryError):
                raise
            loss = self._run_again(again, self._context, graph=True)
            self._graph = True
            return loss

    def can_run(self, given: StepInputs) -> bool:
        """Return whether this process knows the loss before the step and can run again all that led to it."""
        self._check(given)
        # A loss that is divided by 1 is one of one batch, or of several that are added up.
        whole = len(self._parts) == given.accumulated or (given.accumulated == 1 and len(self._parts) > 1)
        return whole and not self._why and self._loss_before(given) is not None

    def _check(self, given: StepInputs) -> None:
        """See, once, whether what was run again before the step gave its loss."""
        told = self._told(given)
        if self._checked or self._before is None or told is None:
            return
        self._checked = True  # in all processes alike, which may have to run it together
        again, was = float(self._before / given.accumulated), float(told)
        if abs(again - was) > (ALIKE if self._rounded else SAME) * abs(was):
            self._why = self._never = NOT_REPEATABLE.format(again=again, told=was)
            self._warn(f"{self._why}; {UNNOTICED}")

    def _loss_before(self, given: StepInputs) -> Tensor | None:
        """Return the loss that the step's gradient is that of."""
        told = self._told(given)
        return told if told is None or self._before is None else self._before / given.accumulated

    def _told(self, given: StepInputs) -> Tensor | None:
        """Return that loss as backward passes began with it; ``None`` if it is not known."""
        if self._returned:
            losses = [call.loss for call in self._returned if call.loss is not None and _is_whole(call, given)]
            known = len(losses) == len(self._returned)
            return torch.stack(losses).double().sum() / given.accumulated if known else None
        return None if given.loss is None else torch.stack([*self._losses, given.loss]).double().sum()

    def _total(self) -> Tensor | None:
        """Run all micro-batches; return the sum of their losses, ``None`` where one has none or cannot be run again."""
        try:
            losses = [loss for again in self._parts if (loss := self._run(again)) is not None]
        except Exception as error:
            self._why = f"the step could not be run again ({type(error).__name__}: {error})"
            self._warn(f"{self._why}; {UNNOTICED}", error)
            return None
        return torch.stack(losses).double().sum() if len(losses) == len(self._parts) else None

    def _change(self, given: StepInputs) -> Tensor | None:
        """Return the loss after the step less that before it, and that before it."""
        before, after = self._loss_before(given), self._total()
        assert before is not None
        return None if after is None else torch.stack([after / given.accumulated - before, before])


def _is_whole(call: RootCall, given: StepInputs) -> bool:
    """Return whether the backward pass began with the loss that a call returned, and with nothing else."""
    return call.flow is not None and bool(call.flow.whole(given.accumulated, given.loss_parts, divided=True))
