"""Inputs, outputs and output gradients of the measured layers, seen by hooks that are there only while armed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from spectral_monitor.capture.hooks.registration import Hook, WrappedCall, ancestors, in_backward, in_transform
from spectral_monitor.capture.hooks.tensor_version import Marks, marks
from spectral_monitor.capture.records.assumption_checks import Checks
from spectral_monitor.capture.records.calls import Call
from spectral_monitor.capture.records.linearity_check import is_linear
from spectral_monitor.capture.replay.batch_slicing import BatchSlice
from spectral_monitor.capture.replay.eager_pass import Arrival, LossGradient, OutputGradients
from spectral_monitor.capture.replay.feature_change import CallRows, Outputs, first_outputs
from spectral_monitor.capture.replay.loss_flow import loss_in
from spectral_monitor.capture.replay.replay import RootCall
from spectral_monitor.capture.replay.replayable import Replayable, why_not
from spectral_monitor.capture.row_sampling import (
    GuardedTensor,
    RowSampler,
    count_rows,
    first_tensor,
    patches_of,
    rows_of,
    sample_size,
)
from spectral_monitor.functional.kernels import length
from spectral_monitor.layers import Layer
from spectral_monitor.state.dtensor import local_part

Harmless = Callable[[str], AbstractContextManager[None]]
Foresight = Callable[[Any], BatchSlice | None]
"""Of a call that begins: the samples that will be run again, if it is known that those will do."""


class Removable(Protocol):
    """Handle of a registration."""

    def remove(self) -> None:
        """Take it back."""


class Watcher(Protocol):
    """Is shown the calls of layers in a forward that is run again."""

    def add(self, i: int, given: Tensor | None, out: Tensor, layer: Layer) -> None:
        """Record one more call of layer ``i`` with what it was given and what it returned."""


class FeatureCapture:
    """Records the calls of measured layers in the forward that leads to the step, and in replays of it.

    Attributes:
        calls: layer index -> its calls.
        roots: the outermost calls that reached a measured layer, with what it takes to make them again.
        order: layer indices in the order of their last call.
        forward_open: whether calls that are made now are those of the forward that leads to the step.
        backward_open: whether gradients that arrive now are those of the step's backward pass.
        settled: layers whose step is done; later calls are none of theirs.
        hidden: layers that were called inside a transform of ``torch.func``, where features cannot be seen.
        unfit: layers whose outputs are not their inputs times their weight, seen at a first call.
        redirected: whether the first outermost call of the model belongs to the strategy: it is how the training
            step is run inside a wrapper's forward.
        weights: marks of the watched parameters at the end of the last forward, see :func:`marks`.
        checks: what else looks at calls and gradients, if anything does.
        watch_losses: whether gradients of the losses that outermost calls return are waited for.
        watch_gradients: whether gradients of outputs are compared with those after the step.
        traced: whether it is recorded where outputs are in the graph.
        backward_pass: id of the last backward pass in which a gradient arrived.
        hidden_layers: whether something is compiled, so that only the outermost calls are seen, and :meth:`look_aside`
            records those of layers.
        refined: whether it does so too where layers compute in half precision, by autocast.
        looked: the call it did so of, if any.
        looked_at: of how many of its samples; 0 for all.
        shared: layers with an output that all samples have in common, and of whose gradient it saw a part.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        wanted: Sequence[int],
        max_rows: int | None,
        watched: Sequence[Tensor],
        harmless: Harmless,
        entrances: Sequence[nn.Module] | None = None,
        refined: bool = False,
    ) -> None:
        """``entrances``: modules whose calls are seen, of a model in which others are compiled; ``None`` for all."""
        self.hidden_layers = entrances is not None
        self.refined = refined
        self.layers = {i: layers[i] for i in wanted if layers[i].module is not None}
        self._watched = watched
        self._hooked = {i: layer.module for i, layer in self.layers.items() if layer.module is not None}
        targets = {id(module) for module in self._hooked.values()}
        seen = None if entrances is None else {id(module) for module in entrances}
        self._roots = [root for root in ancestors(model, targets) if seen is None or id(root) in seen]
        self._picker = RowSampler(max_rows)
        self._max_rows = max_rows
        self._harmless = harmless
        self._handles: list[Removable] = []
        self.checks: Checks | None = None
        self.watch_losses = self.watch_gradients = False
        self.traced = False
        self._replayed: tuple[Watcher, ...] = ()
        self._looking = False
        self._foresight: Foresight = nothing
        self._ranked = self._apart = False
        self._lasting: set[int] = set()
        self._overwritten: set[int] = set()
        self._doubted = {i for i, layer in self.layers.items() if layer.doubted}
        self.unfit: set[int] = set()
        self._model = model
        self.redirected = False
        self._reset()

    def _reset(self) -> None:
        self.calls: dict[int, list[Call]] = {}
        self.roots: list[RootCall] = []
        self.order: list[int] = []
        self.forward_open = True
        self.backward_open = True
        self.settled: set[int] = set()
        self.looked: Replayable | None = None
        self.looked_at = 0
        self.shared: set[int] = set()
        self.hidden: set[int] = set()
        self.weights: Marks = {}
        self.backward_pass = -1
        self._backward_seen = False
        self._waiting: set[int] = set()
        if self.checks is not None:
            self.checks.forget()
        self._shares: dict[int, float] = {}
        self._depth = self._count = 0
        self._way_in = self.redirected
        self._way_out = False
        self._root: RootCall | None = None
        self._portion: BatchSlice | None = None

    def foresee(self, foresight: Foresight, ranked: bool, apart: bool) -> None:
        """From now on keep no more rows than will be needed, as far as that is foreseen.

        Args:
            foresight: which samples will be run again.
            ranked: whether stable ranks of gradients are measured.
            apart: whether others have rows too, so that it is not known yet which those are measured on.
        """
        self._foresight, self._ranked, self._apart = foresight, ranked, apart

    def look_for(self, keys: Collection[str]) -> None:
        """Observe from now on what some quantities of tier "full" need of calls and losses besides."""
        self.checks = Checks(keys) if {"activation_ratio", "sample_share"} & set(keys) else None

    def arm(self) -> None:
        """Register the hooks."""
        self._reset()
        self._handles += [] if self.hidden_layers else self._layer_hooks()
        for module in self._roots:
            if getattr(module, "_compiled_call_impl", None) is not None:
                self._handles.append(WrappedCall(module, self._enter, self._leave))
                continue
            # First in line, to see the arguments before the user's own pre-hooks change them.
            self._handles.append(module.register_forward_pre_hook(Hook(self._enter), prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(Hook(self._leave), with_kwargs=True, always_call=True))

    def _layer_hooks(self) -> list[Removable]:
        hooks = {i: Hook(partial(self._record, i)) for i in self._hooked}
        return [self._hooked[i].register_forward_hook(hook, with_kwargs=True) for i, hook in hooks.items()]

    def begin(self) -> None:
        """Forget calls made so far: the training step begins now."""
        self._reset()

    @property
    def halved(self) -> bool:
        """True if layers compute in half precision, by autocast, and can be looked at beside the step."""
        return self.refined and any(root.halves for root in self.roots)

    def disarm(self) -> None:
        """Remove the hooks and drop every tensor; safe to call at any time."""
        while self._handles:
            self._handles.pop().remove()
        self._reset()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._replayed or self._looking or not self.forward_open or in_backward() or in_transform():
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

    def _drop_finished(self) -> None:
        """Drop the calls of finished micro-batches: a forward after a backward begins another one, and the last one is
        the one that steps.

        But a forward none of whose gradients has come is still under way: that of a generator, say, whose output
        first served to train a discriminator.
        """
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
        if self._replayed or self._looking or not self.forward_open or in_backward() or in_transform():
            return
        if self._way_out and self._depth == 0 and module is self._model:
            self._way_out = False
            return
        self._depth -= 1
        if self._depth == 0 and self._root is not None:
            root, self._root = self._root, None
            if root.reached or self.hidden_layers:
                with self._harmless("the end of the forward pass"):
                    root.keep_loss(output)
                    self._handles += root.watch_loss(output) if self.watch_losses else []
                    if self.hidden_layers or (self.refined and root.halves):
                        root.returned = OutputGradients(output, self._arriving)
                        self._handles += root.returned.handles
                    self.weights = marks(self._watched)
                self.roots.append(root)

    def _record(self, i: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if in_backward():
            if not self._replayed:
                self._recomputed(i, output)
            return
        if not self._replayed and (not self.forward_open or i in self.settled):
            return
        if in_transform() or i in self.hidden:
            self.hidden.add(i)
            self.calls.pop(i, None)
            return
        with self._harmless(f"the forward pass of {self.layers[i].info.name}"):
            whole = first_tensor(output)
            if whole is None:
                return
            layer = self.layers[i]
            given = first_tensor(args) if args else first_tensor(kwargs)
            if i in self._doubted and not self._replayed:
                self._doubted.discard(i)
                self.unfit |= set() if is_linear(layer, module, given, whole) else {i}
            if i in self.unfit:
                return
            if self._replayed:
                for watcher in self._replayed:
                    watcher.add(i, given, whole, layer)
                return
            out = local_part(whole)
            spatial = len(layer.info.shape) - 2
            count = count_rows(out, layer.channels_first, spatial)
            index = self._chosen(i, count, out.device)
            h_out = rows_of(out, layer.channels_first, spatial, index)
            eps, norm = torch.finfo(out.dtype).eps, length(h_out) * math.sqrt(count / max(len(h_out), 1))
            n = len(self.calls.get(i, ()))
            first, chosen = None if self._looking else self._first((i, n), out, count), len(h_out)
            first_index, outputs = None, count
            if self._looking and self._portion is not None:  # nothing but the first rows is here
                first, first_index, outputs = count, index, self._portion.whole((i, n), count)
                norm = norm * math.sqrt(outputs / max(count, 1))
            elif first is not None:
                room = -(-first * chosen // count) if i in self._shares else self._max_rows or first
                first_index = self._picker.choose(first, room, out.device)
                h_out = rows_of(_first_rows(out, first, count), layer.channels_first, spatial, first_index)
            copy = (i not in self._lasting or first is not None) and h_out.data_ptr() == out.data_ptr()
            kept = GuardedTensor(h_out.clone() if copy else h_out)
            original = h_out if copy and first is None and i not in self._overwritten else None
            call = Call(None, kept, chosen, eps, index, self._root, h_out.shape[1], outputs, norm, original)
            call.first, call.first_index = first, first_index
            if self.traced:
                call.node, call.place = whole.grad_fn, self._count
                self._count += 1
            x = None if given is None else local_part(given)
            if given is not None and x is not None and not layer.channels_first:
                asked = given.numel() if layer.info.role == "embedding" else count_rows(given, False, 0)
                call.split_in = x.numel() < given.numel() and x.shape[-1] == given.shape[-1]
                call.split_out = count < asked
            if given is not None and x is not None and x.is_floating_point() and layer.info.role != "embedding":
                channels = layer.channels_first
                if layer.layout.kind == "patches":
                    x, channels = patches_of(x, layer.layout.shape[2:]), False
                rows = count_rows(x, channels, spatial)
                call.inputs = rows
                first = self.calls[i][0].inputs if i in self.calls else rows
                sample = self._chosen_inputs(first, rows, x.numel() // max(rows, 1), x.device)
                call.h_in = GuardedTensor.of(given, rows_of(x, channels, spatial, sample))
            self.calls.setdefault(i, []).append(call)
            self.order = [j for j in self.order if j != i] + [i]
            if self._root is not None:
                self._root.reached += 1
            if self.checks is not None:
                call.checked = self.checks.forward(layer, given, whole)
            if self._looking and self._portion is not None and (i, n) in self._portion.common:
                self.shared.add(i)  # its gradient is a sum over samples, of which only some are here
            else:
                self._watch(i, call, whole)

    def _chosen(self, i: int, count: int, device: torch.device) -> Tensor | None:
        """Return which rows of one more call are kept; ``None`` for all of them.

        Where a layer is called so often that its rows become too many, each call keeps its share of half the room, so
        that calls are thinned out again only when there are twice as many rows.
        """
        calls = self.calls.get(i, ())
        if self._max_rows is None or not calls:
            return self._picker.choose(count, self._max_rows or count, device)
        total = count + sum(call.outputs for call in calls)
        share = self._shares.get(i, 1.0)
        if math.ceil(share * count) + sum(call.count for call in calls) > self._max_rows:
            share = self._shares[i] = self._max_rows / (2 * total)
            for call in calls:
                room = math.ceil(share * call.outputs)
                call.thin(self._picker, room, device)
        return self._picker.choose(count, math.ceil(share * count), device)

    def _first(self, call: tuple[int, int], out: Tensor, count: int) -> int | None:
        """Return how many rows of the output, the first ones, will be there again; ``None`` for all."""
        rows = None if self._portion is None else self._portion.rows(call, count)
        return None if rows is None or rows == count or len(out) * rows % count else rows

    def _recomputed(self, i: int, output: Any) -> None:
        """Activation checkpointing computes the forward once more in the backward pass.

        One of its two kinds ran the first forward without gradients: they arrive at the second one's outputs.
        """
        calls, out = self.calls.get(i, []), first_tensor(output)
        if len(calls) == 1 and not calls[0].watched and out is not None:
            with self._harmless(f"the recomputed forward pass of {self.layers[i].info.name}"):
                self._watch(i, calls[0], out)

    def _watch(self, i: int, call: Call, out: Tensor) -> None:
        if out.requires_grad:
            call.watched = True
            if self._looking:
                call.arrival = Arrival(out)
            self._handles.append(out.register_hook(partial(self._gradient, i, call)))

    def _arriving(self) -> bool:
        """Note that a gradient arrives; return whether it is one of the step's."""
        if not self.backward_open:
            return False
        self._backward_seen = True
        self.backward_pass = torch._C._current_graph_task_id()
        return True

    def _gradient(self, i: int, call: Call, gradient: Tensor) -> None:
        if not self._arriving():
            return
        layer = self.layers[i]
        with self._harmless(f"the backward pass of {layer.info.name}"):
            call.b_count += 1
            b, spatial = local_part(gradient), len(layer.info.shape) - 2
            if call.first is None or self._looking:
                call.b = GuardedTensor(rows_of(b, layer.channels_first, spatial, call.index))
            else:
                few = _first_rows(b, call.first, call.outputs)
                call.b = GuardedTensor(rows_of(few, layer.channels_first, spatial, call.first_index).clone())
                if self._ranked:
                    rows = rows_of(b, layer.channels_first, spatial, call.index)
                    call.b_sample = self._sample(i, rows.clone() if call.index is None else rows)
            if self.checks is not None and call.checked is not None:
                self.checks.backward(call.checked, gradient)

    def _sample(self, i: int, rows: Tensor) -> Tensor:
        """Return the rows of a gradient that its stable rank is measured on, as far as that is known."""
        if self._apart or len(self.calls[i]) > 1:
            return rows
        index = self._picker.choose(len(rows), sample_size(rows.shape[1]), rows.device)
        return rows if index is None else rows.index_select(0, index)

    def outputs(self) -> Outputs:
        """Return, for layers that still have them all, which rows of each call were kept, what they were, and their
        gradients.

        An activation may work in place on what a layer returns, so a layer's outputs are copied unless the first
        ones were seen to last. Where they no longer do, this step has none, and the next one copies again.
        """
        outputs: Outputs = {}
        for i, calls in self.calls.items():
            kept = [call.rows(h) for call in calls if (h := call.h_out.get()) is not None]
            if len(kept) < len(calls):
                self._lasting.discard(i)
                continue
            outputs[i] = kept
            originals = [(call.original, rows.h) for call, rows in zip(calls, kept, strict=True)]
            if all(was is not None for was, _ in originals):  # asked once: the answer has to come from the device
                lasted = all(was is not None and bool(((was == h) | was.isnan()).all()) for was, h in originals)
                (self._lasting if lasted else self._overwritten).add(i)
            for call in calls:
                call.original = None
        return outputs

    def first(self, outputs: Outputs, portion: BatchSlice) -> Outputs:
        """Return the part of :meth:`outputs` that belongs to the first samples, which alone are run again."""
        return first_outputs(outputs, portion, self._picker)

    @property
    def lasting(self) -> list[str]:
        """Layers whose outputs were seen to last, so that they are not copied any more."""
        return [self.layers[i].info.name for i in sorted(self._lasting)]

    @lasting.setter
    def lasting(self, names: list[str]) -> None:
        self._lasting = {i for i, layer in self.layers.items() if layer.info.name in names}

    def inputs(self, i: int) -> Outputs:
        """Return the same for the inputs of one layer; nothing if they are not available."""
        layer, found = self.layers.get(i), []
        for call in self.calls.get(i, ()):
            rows = None if call.h_in is None else call.h_in.get()
            if rows is None or layer is None:
                return {}
            index = self._chosen_inputs(self.calls[i][0].inputs, call.inputs, rows.shape[1], rows.device)
            found.append(CallRows(index, rows, None, call.inputs, call.inputs, len(rows), call.inputs))
        return {i: found} if found else {}

    def _chosen_inputs(self, first: int, rows: int, features: int, device: torch.device) -> Tensor | None:
        """Return the share of each call's inputs that equals the share of the first one, which had ``first`` rows."""
        room = min(self._max_rows or first, sample_size(features))
        return self._picker.choose(rows, rows if first <= room else -(-rows * room // first), device)

    def drop_inputs(self) -> None:
        """Free what was kept of the layers' inputs, so that a replay finds room."""
        for calls in self.calls.values():
            for call in calls:
                call.h_in = None

    @contextmanager
    def replaying(self, *watchers: Watcher) -> Iterator[None]:
        """While inside, calls of layers are shown to some watchers, and nothing else is recorded."""
        self._replayed = watchers
        handles = self._layer_hooks() if self.hidden_layers else []
        try:
            yield
        finally:
            self._replayed = ()
            for handle in handles:
                handle.remove()

    def look_aside(
        self, around: Callable[[], AbstractContextManager[object]], whole: tuple[Replayable, LossGradient] | None
    ) -> str:
        """Record the calls of layers in the outermost call that led to the step, which is run again eagerly; return why
        there is no such call.

        Of as few samples as are known to be enough; gradients begin where those of the step arrived. To be called
        before the step, where modules are put back afterwards.

        Args:
            around: entered for the forward, by others who register hooks.
            whole: the whole training step, and where its backward pass began, to be run if there is no such call, or if
                gradients are compared, for those that arrived were rounded.

        Raises:
            ValueError: gradients of the step do not fit what the call returns now.
        """
        there = [root for root in self.roots if root.returned is not None and root.returned.arrived]
        gradients: OutputGradients | LossGradient
        exactly = whole is not None and self.watch_gradients and self.halved
        alone = len(there) == 1 and (self.hidden_layers or len(self.roots) == 1) and not exactly
        if alone and there[0].returned is not None:
            again: Replayable = there[0].precise()
            gradients = there[0].returned
        elif whole is not None:
            again, gradients = whole[0].precise(), whole[1]
        else:
            return f"the model is called in {len(there)} separate parts" if there else "no gradient arrived"
        reason = why_not(again)
        if reason:
            return reason
        again.rewind()
        portion = self._portion = self._foresight(again)
        run = again if portion is None else again.part(slice(portion.samples))
        before = self.calls, self.order, self.backward_pass
        opened = self.forward_open, self.backward_open
        self.calls, self.order = {}, []
        self._looking = self.forward_open = self.backward_open = True
        handles = self._layer_hooks() if self.hidden_layers else []
        try:
            with around():
                output = run.output()
            arrivals = [call.arrival for calls in self.calls.values() for call in calls if call.arrival is not None]
            gradients.send(output, portion, arrivals)
        except Exception:
            self.calls, self.order, _ = before
            raise
        finally:
            self._looking = False
            (self.forward_open, self.backward_open), self.backward_pass = opened, before[-1]
            for handle in handles:
                handle.remove()
            for call in (call for calls in self.calls.values() for call in calls):
                call.arrival = None
        loss = loss_in(output)
        again.first_loss = None if portion is not None or loss is None else loss.detach()
        self.looked, self.looked_at = again, 0 if portion is None else portion.samples
        return ""


def _first_rows(x: Tensor, first: int, count: int) -> Tensor:
    """Return the part of ``x`` that holds the first of its ``count`` rows."""
    return x.narrow(0, 0, len(x) * first // count)


def nothing(root: RootCall) -> None:
    """Foresees nothing."""
