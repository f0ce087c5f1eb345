"""Inputs, outputs and output gradients of the measured layers, recorded by hooks only while armed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spectral_monitor.capture.hooks.recording import BORROWED, CallRecorder, Watcher
from spectral_monitor.capture.hooks.registration import (
    GradientHook,
    Harmless,
    Hook,
    Removable,
    WrappedCall,
    ancestors,
    in_backward,
    in_transform,
)
from spectral_monitor.capture.replay.batch_slicing import batch_size
from spectral_monitor.capture.replay.eager_pass import LossGradient, OutputGradients
from spectral_monitor.capture.replay.loss_flow import loss_in
from spectral_monitor.capture.replay.replay import Replayable, RootCall, why_not
from spectral_monitor.capture.row_sampling import RowLimit, WeightVersions, weight_versions
from spectral_monitor.layers import Layer
from spectral_monitor.state.rng import RandomState


class FeatureCapture(CallRecorder):
    """Records the calls of measured layers in the forward that leads to the step, and in replays of it.

    Attributes:
        roots: the outermost calls that reached a measured layer, recorded so that they can be repeated.
        forward_open: whether calls made now belong to the forward that leads to the step.
        settled: layers whose step is done; their later calls are not recorded.
        redirected: whether the strategy runs the training step inside the forward of the model's wrapper; the first
            outermost call of the model is then the strategy's.
        weights: versions of the watched parameters at the end of the last forward.
        watch_losses: whether to record gradients of the losses that outermost calls return.
        watch_gradients: whether gradients of outputs are compared with those after the step.
        watch_weights: whether to record gradients of weights.
        weight_gradients: layer index -> the gradient of its weight in the last backward pass, before it is added to
            earlier ones, averaged or clipped; ``None`` if several arrived.
        refined: whether :meth:`look_aside` also serves layers that compute in half precision, by autocast.
        looked: the call that was repeated beside the step, if any.
        looked_at: number of its samples that were repeated; 0 for all.
        began_at_loss: whether its backward pass began at its own loss, not with the gradients that arrived in the step.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[int, Layer],
        limit: RowLimit,
        watched: Sequence[Tensor],
        harmless: Harmless,
        entrances: Sequence[nn.Module] | None,
        refined: bool,
    ) -> None:
        """``entrances``: modules whose calls hooks can see, if parts of the model are compiled; ``None`` for all."""
        called = {i: layer for i, layer in layers.items() if layer.module is not None}
        super().__init__(called, limit, harmless)
        self._entrances = entrances
        self._sees_layers = False
        self._parameters: dict[int, tuple[nn.Parameter | None, ...]] = {}
        self.refined = refined
        self._watched = watched
        self._hooked = {i: layer.module for i, layer in self.layers.items() if layer.module is not None}
        targets = {id(module) for module in self._hooked.values()}
        visible = None if entrances is None else {id(module) for module in entrances}
        self._roots = [root for root in ancestors(model, targets) if visible is None or id(root) in visible]
        self.watch_losses = self.watch_gradients = self.watch_weights = False
        self._model = model
        self.redirected = False
        self._tables = {i for i, layer in self.layers.items() if layer.info.role == "embedding"}
        self.begin()

    def begin(self) -> None:
        """Forget all calls: the training step begins now."""
        self.forget()
        self.roots: list[RootCall] = []
        self.forward_open = True
        self.settled: set[int] = set()
        self.passed_over: set[int] = set()
        self.looked: Replayable | None = None
        self.looked_at, self.began_at_loss = 0, False
        self.weights: WeightVersions = {}
        self.weight_gradients: dict[int, Tensor | None] = {}
        self._waiting: set[int] = set()  # ids of outermost calls that wait for their gradients
        self._depth = 0
        self._skips_enter = self.redirected
        self._skips_leave = False

    def arm(self) -> None:
        """Register the hooks."""
        self.begin()
        self._sees_layers = not self.hidden_layers
        # Not of sharded modules, whose parameters differ in every forward.
        self._parameters = {i: tuple(module._parameters.values()) for i, module in self._hooked.items() if self.refined}
        for i, module in self._hooked.items() if self._sees_layers else ():
            hook = partial(self._called, i)
            self._hooks.add(module, module.register_forward_hook, hook, with_kwargs=True)
        self._hooks.handles += self._weight_hooks() if self.watch_weights else []
        self._hooks.handles += self._table_hooks() if self.hidden_layers or self.refined else []
        for module in self._roots:
            if getattr(module, "_compiled_call_impl", None) is not None:
                self._hooks.handles.append(WrappedCall(module, self._enter, self._leave))
            else:
                self._hooks.add_around(module, self._enter, self._leave)

    @property
    def inlined(self) -> bool:
        """True if layers were called inside a compiled function outside the model."""
        return bool(self._hooks.compiled)

    @property
    def hidden_layers(self) -> bool:
        """True if compiled code hides the calls of layers, so that only :meth:`look_aside` records them."""
        return self._entrances is not None or self.inlined

    @contextmanager
    def _seeing_layers(self) -> Iterator[None]:
        """Record calls of layers inside, also of layers that are compiled in the step: for eager passes."""
        with ExitStack() as stack:
            for i, module in self._hooked.items() if not self._sees_layers else ():
                stack.enter_context(module.register_forward_hook(Hook(partial(self._called, i)), with_kwargs=True))
            yield

    def _weight_hooks(self) -> list[Removable]:
        """Register hooks where gradients of weights arrive."""
        weights = {i: layer.sources[0] for i, layer in self.layers.items() if layer.sources and layer.compute is None}
        return self._hooks_at(weights, self._weight_gradient)

    def _table_hooks(self) -> list[Removable]:
        """Register hooks where gradients of embedding tables arrive: all samples may share their rows."""
        uses = Counter(id(source) for layer in self.layers.values() for source in layer.sources)
        tables = {i: self._hooked[i] for i in self._tables}
        untied = {
            i: table.weight
            for i, table in tables.items()
            if isinstance(table, nn.Embedding) and uses[id(table.weight)] == 1 and table.padding_idx is None
        }
        return self._hooks_at(untied, self._table_gradient)

    def _hooks_at(self, weights: Mapping[int, Tensor], hook: Callable[..., None]) -> list[Removable]:
        return [GradientHook(p, partial(hook, i)) for i, p in weights.items() if p.requires_grad]

    def _table_gradient(self, i: int, gradients: Sequence[Tensor | None]) -> None:
        if self.hidden_layers or self.halved:  # known only now, after the forward
            self._keep_gradient(i, gradients[0], self.table_gradients)

    def _weight_gradient(self, i: int, gradients: Sequence[Tensor | None]) -> None:
        self._keep_gradient(i, gradients[0], self.weight_gradients)

    def _keep_gradient(self, i: int, gradient: Tensor | None, kept: dict[int, Tensor | None]) -> None:
        """Copy the gradient of a weight, if it is the only one that arrives."""
        if self.backward_open and not self._beside_step and gradient is not None:
            with self._harmless(f"the gradient of {self.layers[i].info.name}"):
                kept[i] = None if i in kept else gradient.detach().clone()

    @property
    def halved(self) -> bool:
        """True if layers compute in half precision, by autocast, and can be repeated beside the step."""
        return self.refined and any(root.halves for root in self.roots)

    def disarm(self) -> None:
        """Remove the hooks and drop every tensor; safe to call at any time."""
        self._hooks.remove()
        self._parameters, self._sees_layers = {}, False
        self.begin()

    @property
    def _ignores_calls(self) -> bool:
        """True if calls made now do not belong to the forward that leads to the step."""
        replaying = self._watchers is not None or self._beside_step
        return replaying or not self.forward_open or in_backward() or in_transform()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._ignores_calls:
            return
        if self._skips_enter and module is self._model:
            self._skips_enter, self._skips_leave = False, True
            return
        self._depth += 1
        if self._depth > 1:
            return
        with self._harmless("the start of the forward pass"):
            if self._backward_seen:
                self._drop_finished()
                self._backward_seen = False
            self._portion = None
            self._root = RootCall(module, args, kwargs)
            self._portion = self._foresight(self._root)
            self._samples = batch_size(self._root.arguments)

    def _drop_finished(self) -> None:
        """Drop the calls of finished micro-batches: a forward after a backward pass begins another micro-batch, and the
        last one leads to the step.

        A forward without any gradient yet is not finished: that of a generator, for example, whose output was first
        used to train a discriminator.
        """
        self.weight_gradients.clear()
        self.table_gradients.clear()
        all_calls = [call for calls in self.calls.values() for call in calls]
        reached = {id(call.root) for call in all_calls if call.b is not None}
        self._waiting = waiting = {id(call.root) for call in all_calls if call.watched} - reached
        if self.hidden_layers:
            waiting |= {id(root) for root in self.roots if root.returned is not None and not root.returned.arrived}
        kept = {
            i: [call for call in calls if i in self.settled or id(call.root) in waiting]
            for i, calls in self.calls.items()
        }
        reached_layers = {i for i, calls in self.calls.items() if any(call.b is not None for call in calls)}
        self.passed_over |= {i for i, calls in kept.items() if not calls} - reached_layers
        self.calls = {i: calls for i, calls in kept.items() if calls}
        self.roots = [root for root in self.roots if self.settled or id(root) in waiting]

    def drop_unfinished(self) -> None:
        """Drop forwards that never got a gradient if a later one did: the later one leads to the step."""
        if self.checks is not None:
            self.checks.forget()
        for i, calls in self.calls.items():
            finished = [call for call in calls if call.b is not None or id(call.root) not in self._waiting]
            if any(call.b is not None for call in finished):
                self.calls[i] = finished

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._ignores_calls:
            return
        if self._skips_leave and self._depth == 0 and module is self._model:
            self._skips_leave = False
            return
        self._depth -= 1
        if self._depth == 0 and self._root is not None:
            root, self._root = self._root, None
            if root.reached or self.hidden_layers:
                with self._harmless("the end of the forward pass"):
                    self._hooks.handles += root.keep_loss(output, watch=self.watch_losses)
                    if self.hidden_layers or (self.refined and root.halves):
                        root.returned = OutputGradients(output, self._arriving)
                        self._hooks.handles += root.returned.handles
                        root.drew = not root.randomness.same(RandomState.now())
                    self.weights = weight_versions(self._watched)
                self.roots.append(root)

    def _called(self, i: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if in_backward():
            if self._watchers is None:
                self.recomputed(i, output)
        elif self._watchers is not None:
            self.record(i, module, args, kwargs, output)
        elif self.forward_open and i not in self.settled:
            borrows = not in_transform() and self._borrows(i, module)
            if borrows and torch.is_grad_enabled():
                self.hide(i, BORROWED)
            if not borrows:
                self.record(i, module, args, kwargs, output)

    def _borrows(self, i: int, module: nn.Module) -> bool:
        """Return whether a module has other parameters than when the step began, as inside ``functional_call``."""
        now, before = module._parameters.values(), self._parameters.get(i)
        return before is not None and any(p is not q for p, q in zip(now, before, strict=False))

    @contextmanager
    def replaying(self, *watchers: Watcher) -> Iterator[None]:
        """Show the calls of layers inside to some watchers, and record nothing else."""
        self._watchers = watchers
        try:
            with self._seeing_layers():
                yield
        finally:
            self._watchers = None

    def look_aside(
        self, around: Callable[[], AbstractContextManager[object]], step: tuple[Replayable, LossGradient] | None
    ) -> str:
        """Repeat the outermost call that led to the step eagerly, and record the calls of layers in it; return why it
        cannot be repeated, or an empty string.

        It runs for as few samples as are known to be enough, and its backward pass begins with the gradients of the
        step. Call it before the optimizer's step, and where modules are restored afterwards.

        Args:
            around: context for the forward, in which others register hooks.
            step: the full training step with the gradient of its loss. It is repeated if there is not exactly one
                outermost call; if gradients are compared, because those that arrived were rounded; or if random numbers
                are drawn, because those gradients belong to other numbers.

        Raises:
            ValueError: gradients of the step do not fit the output of the repeated call.
        """
        reached = [root for root in self.roots if root.returned is not None and root.returned.arrived]
        gradients: OutputGradients | LossGradient
        draws = any(root.drew for root in self.roots)
        needs_exact = self.halved and (self.watch_gradients or draws)
        # Hooks see only some of the calls if compiled functions contain layers.
        takes_step = step is not None and (needs_exact or self.inlined)
        is_single = len(reached) == 1 and (self.hidden_layers or len(self.roots) == 1)
        if is_single and not takes_step and reached[0].returned is not None:
            replay: Replayable = reached[0].precise()
            gradients = (reached[0].gradient_of_loss() if draws else None) or reached[0].returned
        elif step is not None:
            replay, gradients = step[0].precise(), step[1]
        else:
            return f"the model is called in {len(reached)} separate parts" if reached else "no gradient arrived"
        if reason := why_not(replay):
            return reason
        replay.rewind()
        portion = self._portion = self._foresight(replay)
        run = replay if portion is None else replay.part(slice(portion.samples))
        self._samples = batch_size(run.arguments)
        before = self.calls, self.backward_pass
        opened = self.forward_open, self.backward_open
        self.calls = {}
        self._beside_step = self.forward_open = self.backward_open = True
        try:
            with self._seeing_layers():
                with around():
                    output = run.output()
                arrivals = [call.arrival for calls in self.calls.values() for call in calls]
                gradients.send(output, portion, [arrival for arrival in arrivals if arrival is not None])
        except Exception:
            self.calls, _ = before
            raise
        finally:
            self._beside_step = False
            (self.forward_open, self.backward_open), self.backward_pass = opened, before[-1]
            for call in (call for calls in self.calls.values() for call in calls):
                call.arrival = None
        if portion is not None:  # the gradients of tables without common rows need not be copied any more
            self._tables &= {i for i, _ in portion.common}
        loss = loss_in(output)
        replay.first_loss = None if portion is not None or loss is None else loss.detach()
        replay.drew, self.began_at_loss = run.drew, isinstance(gradients, LossGradient)
        self.looked, self.looked_at = replay, 0 if portion is None else portion.samples
        return ""
