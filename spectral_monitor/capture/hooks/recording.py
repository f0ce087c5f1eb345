"""Records of the calls of layers: rows of their inputs, of their outputs and of the outputs' gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from spectral_monitor.capture.hooks.registration import Harmless, Hooks, backward_pass, in_transform
from spectral_monitor.capture.records.assumption_checks import CHECKED, Checks, is_linear
from spectral_monitor.capture.records.calls import Call
from spectral_monitor.capture.replay.batch_slicing import BatchSlice
from spectral_monitor.capture.replay.eager_pass import Arrival
from spectral_monitor.capture.replay.feature_change import CallRows, Outputs
from spectral_monitor.capture.replay.replay import RootCall
from spectral_monitor.capture.row_sampling import (
    GuardedTensor,
    RowLimit,
    chosen_rows,
    count_rows,
    first_rows,
    first_tensor,
    is_table,
    patches_of,
    rows_of,
    table_rows,
)
from spectral_monitor.functional.vector_norms import whole_length
from spectral_monitor.layers import Layer
from spectral_monitor.measurement import NODE, PASSED_OVER, UNFIT
from spectral_monitor.state.dtensor import local_part, local_tensor

Foresight = Callable[[Any], BatchSlice | None]
"""A call that begins -> the samples that will be rerun, if it is known that they are enough; else ``None``."""

TRANSFORMED, NOT_A_PRODUCT, BORROWED, NESTED, DROPPED = 1, 2, 3, 4, 5
WHY_HIDDEN = {
    TRANSFORMED: "called inside a torch.func transform, where its features cannot be seen",
    NOT_A_PRODUCT: UNFIT,
    BORROWED: "called with parameters other than its own, as by torch.func.functional_call",
    NESTED: "its outputs are a sparse or nested tensor, whose rows cannot be sampled",
    DROPPED: PASSED_OVER,
}
"""Why features of a layer's calls cannot be recorded, by the number that processes send each other."""


class Watcher(Protocol):
    """Receives the calls of layers in a repeated forward."""

    def add(self, i: int, x: Tensor | None, out: Tensor, layer: Layer) -> None:
        """Record one more call of layer ``i``, with input ``x`` and output ``out``."""


class CallRecorder:
    """Keeps a sample of the rows of each call that it is shown.

    Attributes:
        layers: layer index -> layer, for all layers whose calls are recorded.
        calls: layer index -> its calls.
        backward_open: whether gradients that arrive now belong to the step's backward pass.
        backward_pass: id of the last backward pass in which a gradient arrived.
        hidden: layer index -> why features of its calls cannot be recorded, a key of ``WHY_HIDDEN``.
        unfit: layers whose outputs were not inputs times weight at their first call.
        shared: layers with an output that all samples share, of whose gradient only some samples' part is known.
        table_gradients: layer index -> gradient of an embedding table over all samples, for a pass beside the step.
        checks: checks of calls and gradients, if quantities need any.
        traced: whether to record the nodes of outputs in the graph.
    """

    def __init__(self, layers: Mapping[int, Layer], limit: RowLimit, harmless: Harmless) -> None:
        self.layers = dict(layers)
        self._limit = limit
        self._harmless = harmless
        self._hooks: Hooks[nn.Module] = Hooks()
        self.checks: Checks | None = None
        self.traced = False
        self._watchers: tuple[Watcher, ...] | None = None  # of a repeated forward that is under way
        self._beside_step = False  # whether a pass beside the step is under way
        self._foresight: Foresight = no_foresight
        self._ranked = False
        self._lasting: set[int] = set()
        self._overwritten: set[int] = set()
        self._unverified = {i for i, layer in self.layers.items() if layer.unverified}
        self.unfit: set[int] = set()
        self.forget()

    def forget(self) -> None:
        """Drop what was recorded."""
        self.calls: dict[int, list[Call]] = {}
        self.backward_open = True
        self.backward_pass = -1
        self.hidden: dict[int, int] = {}
        self.shared: set[int] = set()
        self.table_gradients: dict[int, Tensor | None] = {}
        self._backward_seen = False
        if self.checks is not None:
            self.checks.forget()
        self._shares: dict[int, float] = {}  # share of rows that is kept of each call of a layer with many calls
        self._call_count = 0
        self._root: RootCall | None = None  # the outermost call that is under way
        self._samples: int | None = None  # in its batch
        self._portion: BatchSlice | None = None

    def foresee(self, foresight: Foresight, ranked: bool) -> None:
        """Keep from now on only the rows that will be needed, if they are known.

        Args:
            foresight: the samples that will be rerun.
            ranked: whether stable ranks of gradients are measured.
        """
        self._foresight, self._ranked = foresight, ranked

    def look_for(self, keys: Collection[str]) -> None:
        """Check calls and gradients from now on, if some quantities need it."""
        self.checks = Checks(keys) if CHECKED & set(keys) else None

    def record(self, i: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record one more call of layer ``i``, or show it to the watchers of a repeated forward."""
        if in_transform():
            self.hide(i, TRANSFORMED)
        if i in self.hidden:
            return
        with self._harmless(f"the forward pass of {self.layers[i].info.name}"):
            out, layer = first_tensor(output), self.layers[i]
            if out is None:
                return
            if not is_table(out):
                self.hide(i, NESTED)
                return
            x = None if layer.info.role == NODE else first_tensor(args or kwargs)
            x = x if x is None or is_table(x) else None
            if i in self._unverified and self._watchers is None:
                self._unverified.discard(i)
                self.unfit |= set() if is_linear(layer, module, x, out) else {i}
            if i in self.unfit:
                self.hide(i, NOT_A_PRODUCT)
                return
            if self._watchers is not None:
                for watcher in self._watchers:
                    watcher.add(i, x, out, layer)
                return
            form, n = layer.features_of(out), len(self.calls.get(i, ()))
            count = count_rows(local_tensor(out), *form)
            call = self._call((i, n), out, count, *form)
            if x is not None:
                self._take_inputs(i, call, x, count, *form)
            self.calls.setdefault(i, []).append(call)
            if self._root is not None:
                self._root.reached += 1
            if self.checks is not None and layer.info.role != NODE:
                call.checked = self.checks.forward(layer, x, out, self._samples)
            if self._beside_step and self._portion is not None and (i, n) in self._portion.common:
                # Its gradient is a sum over all samples, of which only some are here. That of a table is known.
                b = table_rows(self.table_gradients.get(i), x) if n == 0 else None
                if b is None or b.shape != (count, call.features):
                    self.shared.add(i)
                else:
                    call.b, call.b_count = GuardedTensor(rows_of(b, False, 0, call.index)), 1
            else:
                self._watch(i, call, out)

    def _call(self, key: tuple[int, int], full: Tensor, count: int, channels_first: bool, spatial: int) -> Call:
        """Return the record of a call, (layer index, its number), with a sample of its ``count`` rows of outputs."""
        (i, _), out, outputs = key, local_part(full), count
        total = count + sum(call.outputs for call in self.calls.get(i, ()))
        limit = self._limit.of(out.shape[-spatial - 1 if channels_first else -1], total)
        index = self._chosen(i, count, limit, out.device)
        h_out = rows_of(out, channels_first, spatial, index)
        eps, norm = torch.finfo(out.dtype).eps, whole_length(h_out) * math.sqrt(count / max(len(h_out), 1))
        first, chosen = None if self._beside_step else self._first(key, out, count), len(h_out)
        first_index = None
        if self._beside_step and self._portion is not None:  # only the first samples run
            first, first_index, outputs = count, index, self._portion.all_rows(key, count)
            norm = norm * math.sqrt(outputs / max(count, 1))
        elif first is not None:
            limit = -(-first * chosen // count) if i in self._shares else limit
            first_index = chosen_rows(first, limit, out.device)
            h_out = rows_of(first_rows(out, first, count), channels_first, spatial, first_index)
        copy = (i not in self._lasting or first is not None) and h_out.data_ptr() == out.data_ptr()
        kept = GuardedTensor(h_out.clone() if copy else h_out)
        original = h_out if copy and first is None and i not in self._overwritten else None
        call = Call(kept, chosen, eps, index, self._root, h_out.shape[1], outputs, norm, original)
        call.first, call.first_index = first, first_index
        if self.traced:
            call.node, call.position = full.grad_fn, self._call_count
            self._call_count += 1
        return call

    def _take_inputs(self, i: int, call: Call, full: Tensor, count: int, channels_first: bool, spatial: int) -> None:
        """Add rows of a call's input, and whether processes with the same batch divide rows; ``count``: of outputs."""
        layer, x = self.layers[i], local_part(full)
        looks_up = layer.info.role == "embedding"
        if not channels_first:
            call.split_in = x.numel() < full.numel() and x.shape[-1] == full.shape[-1]
            call.split_out = count < (full.numel() if looks_up else count_rows(full, False, 0))
        if looks_up or not x.is_floating_point():
            return
        if layer.layout.kind == "patches":
            x, channels_first = patches_of(x, layer.layout.shape[2:]), False
        call.inputs = rows = count_rows(x, channels_first, spatial)
        first = self.calls[i][0].inputs if i in self.calls else rows
        index = self._chosen_inputs(first, rows, x.numel() // max(rows, 1), x.device)
        call.h_in = GuardedTensor.of(full, rows_of(x, channels_first, spatial, index))

    def hide(self, i: int, reason: int) -> None:
        """Leave a layer without features in this step, for a reason of ``WHY_HIDDEN``."""
        self.hidden.setdefault(i, reason)
        self.calls.pop(i, None)

    def _chosen(self, i: int, count: int, limit: int | None, device: torch.device) -> Tensor | None:
        """Return the rows to keep of one more call; ``None`` for all of them.

        If the calls of a layer together have more than ``limit`` rows, each keeps its share of half as many. So they
        are thinned out again only when their rows have doubled.
        """
        calls = self.calls.get(i, ())
        if limit is None or not calls:
            return chosen_rows(count, limit, device)
        total = count + sum(call.outputs for call in calls)
        share = self._shares.get(i, 1.0)
        if math.ceil(share * count) + sum(call.count for call in calls) > limit:
            share = self._shares[i] = limit / (2 * total)
            for call in calls:
                call.thin(math.ceil(share * call.outputs), device)
        return chosen_rows(count, math.ceil(share * count), device)

    def _first(self, call: tuple[int, int], out: Tensor, count: int) -> int | None:
        """Return the number of first rows of an output that will be rerun; ``None`` for all."""
        rows = None if self._portion is None else self._portion.rows(call, count)
        return None if rows is None or rows == count or len(out) * rows % count else rows

    def recomputed(self, i: int, output: Any) -> None:
        """Watch the output of a call that is repeated in the backward pass, by activation checkpointing.

        Reentrant checkpointing runs the first forward without a graph: gradients arrive at the second one's outputs.
        """
        calls, out = self.calls.get(i, []), first_tensor(output)
        if len(calls) == 1 and not calls[0].watched and out is not None:
            with self._harmless(f"the recomputed forward pass of {self.layers[i].info.name}"):
                self._watch(i, calls[0], out)

    def _watch(self, i: int, call: Call, out: Tensor) -> None:
        if out.requires_grad:
            call.watched = True
            if self._beside_step:
                call.arrival = Arrival(out)
            self._hooks.handles.append(out.register_hook(partial(self._gradient, i, call)))

    def _arriving(self) -> bool:
        """Record that a gradient arrives; return whether it belongs to the step."""
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
            if call.first is None or self._beside_step:
                call.b = GuardedTensor(rows_of(b, *form, call.index))
            else:
                first = first_rows(b, call.first, call.outputs)
                call.b = GuardedTensor(rows_of(first, *form, call.first_index).clone())
                if self._ranked:
                    rows = rows_of(b, *form, call.index)
                    call.b_sample = rows.clone() if call.index is None else rows
            if self.checks is not None and call.checked is not None:
                self.checks.backward(layer, call.checked, gradient)

    def outputs(self) -> Outputs:
        """Return the kept rows of outputs and their gradients, for layers that still have them all.

        An activation may change a layer's output in place. So outputs are copied, unless the first ones were not
        changed. If later ones are, this step has none, and the next one copies again.
        """
        outputs: Outputs = {}
        for i, calls in self.calls.items():
            kept = [call.rows(h) for call in calls if (h := call.h_out.get()) is not None]
            if len(kept) < len(calls):
                self._lasting.discard(i)
                continue
            outputs[i] = kept
            originals = [(call.original, rows.h) for call, rows in zip(calls, kept, strict=True)]
            if all(x is not None for x, _ in originals):  # only once, because the comparison waits for the device
                unchanged = all(x is not None and bool(((x == h) | x.isnan()).all()) for x, h in originals)
                (self._lasting if unchanged else self._overwritten).add(i)
            for call in calls:
                call.original = None
        return outputs

    @property
    def lasting(self) -> list[str]:
        """Layers whose outputs are not changed in place, and therefore not copied."""
        return [self.layers[i].info.name for i in sorted(self._lasting)]

    @lasting.setter
    def lasting(self, names: list[str]) -> None:
        self._lasting = {i for i, layer in self.layers.items() if layer.info.name in names}

    def inputs(self, i: int) -> Outputs:
        """Return the kept rows of the inputs of one layer; empty if they are not available."""
        inputs = []
        for call in self.calls.get(i, ()):
            rows = call.input()
            if rows is None:
                return {}
            index = self._chosen_inputs(self.calls[i][0].inputs, call.inputs, rows.shape[1], rows.device)
            inputs.append(CallRows(index, rows, None, call.inputs, call.inputs, call.inputs))
        return {i: inputs} if inputs else {}

    def _chosen_inputs(self, first: int, rows: int, features: int, device: torch.device) -> Tensor | None:
        """Return the same share of the rows of each call's input; the first call had ``first`` rows."""
        limit = self._limit.of(features, first)
        return None if limit is None else chosen_rows(rows, -(-rows * limit // first), device)

    def drop_inputs(self) -> None:
        """Free the rows of inputs, to leave memory for a replay."""
        for calls in self.calls.values():
            for call in calls:
                call.h_in = None


def no_foresight(root: RootCall) -> None:
    """Return ``None``: the samples that will be rerun are not known."""
