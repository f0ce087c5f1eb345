"""Rows of the calls of layers: of their inputs, their outputs and the gradients of these."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from spectral_monitor.capture.hooks.registration import Harmless, Removable, backward_pass, in_transform
from spectral_monitor.capture.records.assumption_checks import CHECKED, Checks, is_linear
from spectral_monitor.capture.records.calls import Call
from spectral_monitor.capture.replay.batch_slicing import BatchSlice
from spectral_monitor.capture.replay.eager_pass import Arrival
from spectral_monitor.capture.replay.feature_change import CallRows, Outputs
from spectral_monitor.capture.replay.replay import RootCall
from spectral_monitor.capture.row_sampling import (
    GuardedTensor,
    chosen_rows,
    count_rows,
    first_rows,
    first_tensor,
    is_table,
    patches_of,
    rows_of,
    sample_size,
    table_rows,
)
from spectral_monitor.functional.vector_norms import whole_length
from spectral_monitor.layers import Layer
from spectral_monitor.measurement import NODE, UNFIT
from spectral_monitor.state.dtensor import local_part

Foresight = Callable[[Any], BatchSlice | None]
"""Of a call that begins: the samples that will be run again, if it is known that those will do."""


TRANSFORMED, NOT_A_PRODUCT, BORROWED, NESTED = 1, 2, 3, 4
WHY_HIDDEN = {
    TRANSFORMED: "called inside a transform of torch.func, where its features cannot be seen",
    NOT_A_PRODUCT: UNFIT,
    BORROWED: "called with other parameters than its own, as by torch.func.functional_call",
    NESTED: "its outputs are a sparse or nested tensor, of which no rows are taken",
}
"""Why features of a layer's calls cannot be seen, by the number that processes send each other."""


class Watcher(Protocol):
    """Is shown the calls of layers in a forward that is run again."""

    def add(self, i: int, given: Tensor | None, out: Tensor, layer: Layer) -> None:
        """Record one more call of layer ``i`` with what it was given and what it returned."""


class CallRecorder:
    """Keeps a sample of the rows of each call that it is shown; when, is its owner's affair.

    Attributes:
        layers: layer index -> those whose calls are recorded.
        calls: layer index -> its calls.
        order: layer indices in the order of their last call.
        backward_open: whether gradients that arrive now are those of the step's backward pass.
        backward_pass: id of the last backward pass in which a gradient arrived.
        hidden: layer index -> why features of its calls cannot be seen, a key of ``WHY_HIDDEN``.
        unfit: layers whose outputs are not their inputs times their weight, seen at a first call.
        shared: layers with an output that all samples have in common, and of whose gradient a part was seen.
        of_all: layer index -> the gradient of a table of embeddings over all samples, where some of them run aside.
        checks: what else looks at calls and gradients, if anything does.
        traced: whether it is recorded where outputs are in the graph.
    """

    def __init__(self, layers: Mapping[int, Layer], max_rows: int | None, harmless: Harmless) -> None:
        self.layers = dict(layers)
        self._max_rows = max_rows
        self._harmless = harmless
        self._handles: list[Removable] = []
        self.checks: Checks | None = None
        self.traced = False
        self._replayed: tuple[Watcher, ...] | None = None
        self._looking = False  # at a pass beside the step
        self._foresight: Foresight = nothing
        self._ranked = self._apart = False
        self._lasting: set[int] = set()
        self._overwritten: set[int] = set()
        self._unverified = {i for i, layer in self.layers.items() if layer.unverified}
        self.unfit: set[int] = set()
        self.forget()

    def forget(self) -> None:
        """Drop what was recorded."""
        self.calls: dict[int, list[Call]] = {}
        self.order: list[int] = []
        self.backward_open = True
        self.backward_pass = -1
        self.hidden: dict[int, int] = {}
        self.shared: set[int] = set()
        self.of_all: dict[int, Tensor | None] = {}
        self._backward_seen = False
        if self.checks is not None:
            self.checks.forget()
        self._shares: dict[int, float] = {}
        self._count = 0
        self._root: RootCall | None = None
        self._samples: int | None = None  # of the call that is under way
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
        """Observe from now on what some quantities of tier "full" need of calls and gradients besides."""
        self.checks = Checks(keys) if CHECKED & set(keys) else None

    def record(self, i: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record one more call of layer ``i``, or show it to those who watch a forward that is run again."""
        if in_transform():
            self.hide(i, TRANSFORMED)
        if i in self.hidden:
            return
        with self._harmless(f"the forward pass of {self.layers[i].info.name}"):
            whole, layer = first_tensor(output), self.layers[i]
            if whole is None:
                return
            if not is_table(whole):
                self.hide(i, NESTED)
                return
            given = None if layer.info.role == NODE else first_tensor(args or kwargs)
            given = given if given is None or is_table(given) else None
            if i in self._unverified and self._replayed is None:
                self._unverified.discard(i)
                self.unfit |= set() if is_linear(layer, module, given, whole) else {i}
            if i in self.unfit:
                self.hide(i, NOT_A_PRODUCT)
                return
            if self._replayed is not None:
                for watcher in self._replayed:
                    watcher.add(i, given, whole, layer)
                return
            form, n = layer.features_of(whole), len(self.calls.get(i, ()))
            count = count_rows(local_part(whole), *form)
            call = self._call((i, n), whole, count, *form)
            if given is not None:
                self._take_inputs(i, call, given, count, *form)
            self.calls.setdefault(i, []).append(call)
            self.order = [j for j in self.order if j != i] + [i]
            if self._root is not None:
                self._root.reached += 1
            if self.checks is not None and layer.info.role != NODE:
                call.checked = self.checks.forward(layer, given, whole, self._samples)
            if self._looking and self._portion is not None and (i, n) in self._portion.common:
                # Its gradient is a sum over samples, of which only some are here; a table's is known all the same.
                of_all = table_rows(self.of_all.get(i), given) if n == 0 else None
                if of_all is None or of_all.shape != (count, call.features):
                    self.shared.add(i)
                else:
                    call.b, call.b_count = GuardedTensor(rows_of(of_all, False, 0, call.index)), 1
            else:
                self._watch(i, call, whole)

    def _call(self, place: tuple[int, int], whole: Tensor, count: int, channels_first: bool, spatial: int) -> Call:
        """Return the record of a call, (layer index, its number), with some of its ``count`` rows of outputs."""
        (i, _), out, outputs = place, local_part(whole), count
        index = self._chosen(i, count, out.device)
        h_out = rows_of(out, channels_first, spatial, index)
        eps, norm = torch.finfo(out.dtype).eps, whole_length(h_out) * math.sqrt(count / max(len(h_out), 1))
        first, chosen = None if self._looking else self._first(place, out, count), len(h_out)
        first_index = None
        if self._looking and self._portion is not None:  # nothing but the first rows is here
            first, first_index, outputs = count, index, self._portion.whole(place, count)
            norm = norm * math.sqrt(outputs / max(count, 1))
        elif first is not None:
            room = -(-first * chosen // count) if i in self._shares else self._max_rows
            first_index = chosen_rows(first, room, out.device)
            h_out = rows_of(first_rows(out, first, count), channels_first, spatial, first_index)
        copy = (i not in self._lasting or first is not None) and h_out.data_ptr() == out.data_ptr()
        kept = GuardedTensor(h_out.clone() if copy else h_out)
        original = h_out if copy and first is None and i not in self._overwritten else None
        call = Call(kept, chosen, eps, index, self._root, h_out.shape[1], outputs, norm, original)
        call.first, call.first_index = first, first_index
        if self.traced:
            call.node, call.place = whole.grad_fn, self._count
            self._count += 1
        return call

    def _take_inputs(self, i: int, call: Call, given: Tensor, count: int, channels_first: bool, spatial: int) -> None:
        """Add rows of a call's input, and whether processes with one batch share out rows; ``count``: of outputs."""
        layer, x = self.layers[i], local_part(given)
        looks_up = layer.info.role == "embedding"
        if not channels_first:
            asked = given.numel() if looks_up else count_rows(given, False, 0)
            call.split_in = x.numel() < given.numel() and x.shape[-1] == given.shape[-1]
            call.split_out = count < asked
        if looks_up or not x.is_floating_point():
            return
        if layer.layout.kind == "patches":
            x, channels_first = patches_of(x, layer.layout.shape[2:]), False
        call.inputs = rows = count_rows(x, channels_first, spatial)
        first = self.calls[i][0].inputs if i in self.calls else rows
        sample = self._chosen_inputs(first, rows, x.numel() // max(rows, 1), x.device)
        call.h_in = GuardedTensor.of(given, rows_of(x, channels_first, spatial, sample))

    def hide(self, i: int, why: int) -> None:
        """Leave a layer without features in this step, for a reason of ``WHY_HIDDEN``."""
        self.hidden.setdefault(i, why)
        self.calls.pop(i, None)

    def _chosen(self, i: int, count: int, device: torch.device) -> Tensor | None:
        """Return which rows of one more call are kept; ``None`` for all of them.

        Where a layer is called so often that its rows become too many, each call keeps its share of half the room, so
        that calls are thinned out again only when there are twice as many rows.
        """
        calls = self.calls.get(i, ())
        if self._max_rows is None or not calls:
            return chosen_rows(count, self._max_rows, device)
        total = count + sum(call.outputs for call in calls)
        share = self._shares.get(i, 1.0)
        if math.ceil(share * count) + sum(call.count for call in calls) > self._max_rows:
            share = self._shares[i] = self._max_rows / (2 * total)
            for call in calls:
                call.thin(math.ceil(share * call.outputs), device)
        return chosen_rows(count, math.ceil(share * count), device)

    def _first(self, call: tuple[int, int], out: Tensor, count: int) -> int | None:
        """Return how many rows of the output, the first ones, will be there again; ``None`` for all."""
        rows = None if self._portion is None else self._portion.rows(call, count)
        return None if rows is None or rows == count or len(out) * rows % count else rows

    def recomputed(self, i: int, output: Any) -> None:
        """Record where gradients of a call arrive that is made again in the backward pass: activation checkpointing.

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
        self.backward_pass = backward_pass()
        return True

    def _gradient(self, i: int, call: Call, gradient: Tensor) -> None:
        if not self._arriving():
            return
        layer = self.layers[i]
        with self._harmless(f"the backward pass of {layer.info.name}"):
            call.b_count += 1
            b, form = local_part(gradient), layer.features_of(gradient)
            if call.first is None or self._looking:
                call.b = GuardedTensor(rows_of(b, *form, call.index))
            else:
                few = first_rows(b, call.first, call.outputs)
                call.b = GuardedTensor(rows_of(few, *form, call.first_index).clone())
                if self._ranked:
                    rows = rows_of(b, *form, call.index)
                    call.b_sample = self._sample(i, rows.clone() if call.index is None else rows)
            if self.checks is not None and call.checked is not None:
                self.checks.backward(layer, call.checked, gradient)

    def _sample(self, i: int, rows: Tensor) -> Tensor:
        """Return the rows of a gradient that its stable rank is measured on, as far as that is known."""
        if self._max_rows is None or self._apart or len(self.calls[i]) > 1:
            return rows
        index = chosen_rows(len(rows), sample_size(rows.shape[1]), rows.device)
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

    @property
    def lasting(self) -> list[str]:
        """Layers whose outputs were seen to last, so that they are not copied any more."""
        return [self.layers[i].info.name for i in sorted(self._lasting)]

    @lasting.setter
    def lasting(self, names: list[str]) -> None:
        self._lasting = {i for i, layer in self.layers.items() if layer.info.name in names}

    def inputs(self, i: int) -> Outputs:
        """Return the same for the inputs of one layer; nothing if they are not available."""
        found = []
        for call in self.calls.get(i, ()):
            rows = call.input()
            if rows is None:
                return {}
            index = self._chosen_inputs(self.calls[i][0].inputs, call.inputs, rows.shape[1], rows.device)
            found.append(CallRows(index, rows, None, call.inputs, call.inputs, call.inputs))
        return {i: found} if found else {}

    def _chosen_inputs(self, first: int, rows: int, features: int, device: torch.device) -> Tensor | None:
        """Return the share of each call's inputs that equals the share of the first one, which had ``first`` rows."""
        if self._max_rows is None:
            return None
        room = min(self._max_rows, sample_size(features))
        return None if first <= room else chosen_rows(rows, -(-rows * room // first), device)

    def drop_inputs(self) -> None:
        """Free what was kept of the layers' inputs, so that a replay finds room."""
        for calls in self.calls.values():
            for call in calls:
                call.h_in = None


def nothing(root: RootCall) -> None:
    """Foresees nothing."""
