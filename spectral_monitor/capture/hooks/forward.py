"""Inputs, outputs and output gradients of the measured layers, seen by hooks that are there only while armed."""

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
    Hooks,
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
from spectral_monitor.capture.row_sampling import Marks, marks
from spectral_monitor.layers import Layer
from spectral_monitor.state.rng import RandomState


class FeatureCapture(CallRecorder):
    """Records the calls of measured layers in the forward that leads to the step, and in replays of it.

    Attributes:
        roots: the outermost calls that reached a measured layer, with what it takes to make them again.
        forward_open: whether calls that are made now are those of the forward that leads to the step.
        settled: layers whose step is done; later calls are none of theirs.
        redirected: whether the first outermost call of the model belongs to the strategy: it is how the training
            step is run inside a wrapper's forward.
        weights: marks of the watched parameters at the end of the last forward, see :func:`marks`.
        watch_losses: whether gradients of the losses that outermost calls return are waited for.
        watch_gradients: whether gradients of outputs are compared with those after the step.
        watch_weights: whether gradients of weights are.
        weight_gradients: layer index -> the gradient of its weight in the last backward pass, before it is added to
            earlier ones, averaged or clipped; ``None`` if several arrived.
        refined: whether :meth:`look_aside` is of use too where layers compute in half precision, by autocast.
        looked: the call that was looked at beside the step, if any.
        looked_at: how many of its samples were; 0 for all.
        began_at_loss: whether its gradients began at its own loss, not where those of the step had arrived.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[int, Layer],
        max_rows: int | None,
        watched: Sequence[Tensor],
        harmless: Harmless,
        entrances: Sequence[nn.Module] | None,
        refined: bool,
    ) -> None:
        """``entrances``: modules whose calls are seen, of a model in which others are compiled; ``None`` for all."""
        called = {i: layer for i, layer in layers.items() if layer.module is not None}
        super().__init__(called, max_rows, harmless)
        self._entrances = entrances
        self._hooks: Hooks[nn.Module] = Hooks()
        self._sees_layers = False
        self._own: dict[int, tuple[nn.Parameter | None, ...]] = {}
        self.refined = refined
        self._watched = watched
        self._hooked = {i: layer.module for i, layer in self.layers.items() if layer.module is not None}
        targets = {id(module) for module in self._hooked.values()}
        seen = None if entrances is None else {id(module) for module in entrances}
        self._roots = [root for root in ancestors(model, targets) if seen is None or id(root) in seen]
        self.watch_losses = self.watch_gradients = self.watch_weights = False
        self._model = model
        self.redirected = False
        self._tables = {i for i, layer in self.layers.items() if layer.info.role == "embedding"}
        self.begin()

    def begin(self) -> None:
        """Forget calls made so far: the training step begins now."""
        self.forget()
        self.roots: list[RootCall] = []
        self.forward_open = True
        self.settled: set[int] = set()
        self.looked: Replayable | None = None
        self.looked_at, self.began_at_loss = 0, False
        self.weights: Marks = {}
        self.weight_gradients: dict[int, Tensor | None] = {}
        self._waiting: set[int] = set()
        self._depth = 0
        self._way_in = self.redirected
        self._way_out = False

    def arm(self) -> None:
        """Register the hooks."""
        self.begin()
        self._sees_layers = not self.hidden_layers
        # Those of sharded modules are others in every forward.
        self._own = {i: tuple(module._parameters.values()) for i, module in self._hooked.items() if self.refined}
        for i, module in self._hooked.items() if self._sees_layers else ():
            seen = self._hooks.add(module, module.register_forward_hook, partial(self._called, i), with_kwargs=True)
            self._handles += seen
        self._handles += self._weight_hooks() if self.watch_weights else []
        self._handles += self._table_hooks() if self.hidden_layers or self.refined else []
        for module in self._roots:
            if getattr(module, "_compiled_call_impl", None) is not None:
                self._handles.append(WrappedCall(module, self._enter, self._leave))
                continue
            # First in line, to see the arguments before the user's own pre-hooks change them.
            before, after = module.register_forward_pre_hook, module.register_forward_hook
            self._handles += self._hooks.add(module, before, self._enter, prepend=True, with_kwargs=True)
            self._handles += self._hooks.add(module, after, self._leave, with_kwargs=True, always_call=True)

    @property
    def inlined(self) -> bool:
        """True if layers were called inside a compiled function that is no part of the model."""
        return bool(self._hooks.compiled)

    @property
    def hidden_layers(self) -> bool:
        """True if something is compiled, so that only the outermost calls are seen, and :meth:`look_aside` records
        those of layers.
        """
        return self._entrances is not None or self.inlined

    @contextmanager
    def _seeing_layers(self) -> Iterator[None]:
        """Inside, calls of layers are seen that are compiled in the step: for a pass in which nothing is."""
        with ExitStack() as stack:
            for i, module in self._hooked.items() if not self._sees_layers else ():
                stack.enter_context(module.register_forward_hook(Hook(partial(self._called, i)), with_kwargs=True))
            yield

    def _weight_hooks(self) -> list[Removable]:
        """Register hooks where gradients of weights arrive."""
        weights = {i: layer.sources[0] for i, layer in self.layers.items() if layer.sources and layer.compute is None}
        return self._hooks_at(weights, self._weight_gradient)

    def _table_hooks(self) -> list[Removable]:
        """Do the same for tables of embeddings, which all samples may have in common when some of them run aside."""
        held = Counter(id(source) for layer in self.layers.values() for source in layer.sources)
        tables = {i: self._hooked[i] for i in self._tables}
        alone = {
            i: table.weight
            for i, table in tables.items()
            if isinstance(table, nn.Embedding) and held[id(table.weight)] == 1 and table.padding_idx is None
        }
        return self._hooks_at(alone, self._table_gradient)

    def _hooks_at(self, weights: Mapping[int, Tensor], hook: Callable[..., None]) -> list[Removable]:
        return [GradientHook(p, partial(hook, i)) for i, p in weights.items() if p.requires_grad]

    def _table_gradient(self, i: int, gradients: Sequence[Tensor | None]) -> None:
        if self.hidden_layers or self.halved:  # known by now
            self._keep_gradient(i, gradients[0], self.of_all)

    def _weight_gradient(self, i: int, gradients: Sequence[Tensor | None]) -> None:
        self._keep_gradient(i, gradients[0], self.weight_gradients)

    def _keep_gradient(self, i: int, gradient: Tensor | None, kept: dict[int, Tensor | None]) -> None:
        """Copy the gradient of a weight, if it is the only one that arrives."""
        if self.backward_open and not self._looking and gradient is not None:
            with self._harmless(f"the gradient of {self.layers[i].info.name}"):
                kept[i] = None if i in kept else gradient.detach().clone()

    @property
    def halved(self) -> bool:
        """True if layers compute in half precision, by autocast, and can be looked at beside the step."""
        return self.refined and any(root.halves for root in self.roots)

    def disarm(self) -> None:
        """Remove the hooks and drop every tensor; safe to call at any time."""
        self._hooks.remove(self._handles)
        self._own, self._sees_layers = {}, False
        self.begin()

    @property
    def _passes_by(self) -> bool:
        """True if calls that are made now are none of the forward that leads to the step."""
        again = self._replayed is not None or self._looking
        return again or not self.forward_open or in_backward() or in_transform()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._passes_by:
            return
        if self._way_in and module is self._model:
            self._way_in, self._way_out = False, True
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
            self._samples = batch_size(self._root.given)

    def _drop_finished(self) -> None:
        """Drop the calls of finished micro-batches: a forward after a backward begins another one, and the last one is
        the one that steps.

        But a forward none of whose gradients has come is still under way: that of a generator, say, whose output
        first served to train a discriminator.
        """
        self.weight_gradients.clear()
        self.of_all.clear()
        everything = [call for calls in self.calls.values() for call in calls]
        reached = {id(call.root) for call in everything if call.b is not None}
        self._waiting = waiting = {id(call.root) for call in everything if call.watched} - reached
        if self.hidden_layers:
            waiting |= {id(root) for root in self.roots if root.returned is not None and not root.returned.arrived}
        left = {
            i: [call for call in calls if i in self.settled or id(call.root) in waiting]
            for i, calls in self.calls.items()
        }
        self.calls = {i: calls for i, calls in left.items() if calls}
        self.order = [i for i in self.order if i in self.calls]
        self.roots = [root for root in self.roots if self.settled or id(root) in waiting]

    def drop_unfinished(self) -> None:
        """Drop forwards that never got a gradient where a later one did: the later one belongs to the step."""
        if self.checks is not None:
            self.checks.forget()
        for i, calls in self.calls.items():
            rest = [call for call in calls if call.b is not None or id(call.root) not in self._waiting]
            if any(call.b is not None for call in rest):
                self.calls[i] = rest

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._passes_by:
            return
        if self._way_out and self._depth == 0 and module is self._model:
            self._way_out = False
            return
        self._depth -= 1
        if self._depth == 0 and self._root is not None:
            root, self._root = self._root, None
            if root.reached or self.hidden_layers:
                with self._harmless("the end of the forward pass"):
                    self._handles += root.keep_loss(output, watch=self.watch_losses)
                    if self.hidden_layers or (self.refined and root.halves):
                        root.returned = OutputGradients(output, self._arriving)
                        self._handles += root.returned.handles
                        root.drew = not root.randomness.same(RandomState.now())
                    self.weights = marks(self._watched)
                self.roots.append(root)

    def _called(self, i: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if in_backward():
            if self._replayed is None:
                self.recomputed(i, output)
        elif self._replayed is not None:
            self.record(i, module, args, kwargs, output)
        elif self.forward_open and i not in self.settled:
            borrows = not in_transform() and self._borrows(i, module)
            if borrows and torch.is_grad_enabled():
                self.hide(i, BORROWED)
            if not borrows:
                self.record(i, module, args, kwargs, output)

    def _borrows(self, i: int, module: nn.Module) -> bool:
        """Return whether a module has other parameters than when the step began, as inside ``functional_call``."""
        now, own = module._parameters.values(), self._own.get(i)
        return own is not None and any(p is not q for p, q in zip(now, own, strict=False))

    @contextmanager
    def replaying(self, *watchers: Watcher) -> Iterator[None]:
        """While inside, calls of layers are shown to some watchers, and nothing else is recorded."""
        self._replayed = watchers
        try:
            with self._seeing_layers():
                yield
        finally:
            self._replayed = None

    def look_aside(
        self, around: Callable[[], AbstractContextManager[object]], whole: tuple[Replayable, LossGradient] | None
    ) -> str:
        """Record the calls of layers in the outermost call that led to the step, which is run again eagerly; return why
        there is no such call.

        Of as few samples as are known to be enough; gradients begin where those of the step arrived. To be called
        before the step, where modules are put back afterwards.

        Args:
            around: entered for the forward, by others who register hooks.
            whole: the whole training step, and where its backward pass began, to be run if there is no such call; or if
                gradients are compared, for those that arrived were rounded; or if random numbers are drawn, for then
                they belong to other ones.

        Raises:
            ValueError: gradients of the step do not fit what the call returns now.
        """
        there = [root for root in self.roots if root.returned is not None and root.returned.arrived]
        gradients: OutputGradients | LossGradient
        draws = any(root.drew for root in self.roots)
        exactly = self.halved and (self.watch_gradients or draws)
        # Of what runs inside compiled functions the calls that were seen are only a part.
        wholly = whole is not None and (exactly or self.inlined)
        alone = len(there) == 1 and (self.hidden_layers or len(self.roots) == 1) and not wholly
        if alone and there[0].returned is not None:
            again: Replayable = there[0].precise()
            gradients = (there[0].gradient_of_loss() if draws else None) or there[0].returned
        elif whole is not None:
            again, gradients = whole[0].precise(), whole[1]
        else:
            return f"the model is called in {len(there)} separate parts" if there else "no gradient arrived"
        if reason := why_not(again):
            return reason
        again.rewind()
        portion = self._portion = self._foresight(again)
        run = again if portion is None else again.part(slice(portion.samples))
        self._samples = batch_size(run.given)
        before = self.calls, self.order, self.backward_pass
        opened = self.forward_open, self.backward_open
        self.calls, self.order = {}, []
        self._looking = self.forward_open = self.backward_open = True
        try:
            with self._seeing_layers():
                with around():
                    output = run.output()
                seen = [call for calls in self.calls.values() for call in calls]
                gradients.send(output, portion, [call.arrival for call in seen if call.arrival is not None])
        except Exception:
            self.calls, self.order, _ = before
            raise
        finally:
            self._looking = False
            (self.forward_open, self.backward_open), self.backward_pass = opened, before[-1]
            for call in (call for calls in self.calls.values() for call in calls):
                call.arrival = None
        # Of a large table that some samples look up themselves no copy is made again.
        self._tables &= {i for i, call in self._portion.common} if self._portion is not None else self._tables
        loss = loss_in(output)
        again.first_loss = None if portion is not None or loss is None else loss.detach()
        again.drew, self.began_at_loss = run.drew, isinstance(gradients, LossGradient)
        self.looked, self.looked_at = again, 0 if portion is None else portion.samples
        return ""
