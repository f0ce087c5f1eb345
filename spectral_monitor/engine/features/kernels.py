"""Tier "full": forwards that are run again with their graph, and checks of what the papers assume."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel

from spectral_monitor.capture.hooks.forward import FeatureCapture
from spectral_monitor.capture.records.assumption_checks import is_pointwise
from spectral_monitor.capture.replay.batch_slicing import BatchSlice
from spectral_monitor.capture.replay.feature_change import PARTS, Outputs, Replay
from spectral_monitor.capture.replay.graph_replay import Graph, sees_all_modules, unseen
from spectral_monitor.capture.replay.replay import RootCall
from spectral_monitor.capture.replay.replayable import Replayable
from spectral_monitor.capture.row_sampling import rows_of
from spectral_monitor.engine.features.linearization import SINCE_START, Linearization
from spectral_monitor.engine.features.replays import Context, Probe, StepInputs, trained_on
from spectral_monitor.engine.results.raw import NETWORK, RawScalars
from spectral_monitor.engine.results.reasons import StepContext
from spectral_monitor.engine.settings import Settings
from spectral_monitor.functional.features import mean_ratio
from spectral_monitor.functional.kernels import bfk_extremes, bfk_moments, dual_bfk_moments, signs
from spectral_monitor.functional.laziness import kernel_alignment, kernel_change
from spectral_monitor.functional.vector_norms import length, lengths, whole_length
from spectral_monitor.linalg import compute_dtype
from spectral_monitor.messages import WarnOnce
from spectral_monitor.quantities import TIERS, assumptions, laziness
from spectral_monitor.state.snapshot import preserved

PROBES = 4
"""Random vectors for the moments of the kernel of each layer; each takes two passes."""
LANCZOS_STEPS = 8
"""Products with the kernel of each layer for its extreme eigenvalues; each takes two passes."""
SEED = 3
"""Of the private generator they are drawn from: the same ones in every step, so that their noise is no change."""

ALONE = frozenset(q.key for q in (*assumptions.ENTRIES, *laziness.ENTRIES) if q.needs & {"h", "b"})
"""Quantities that are measured in a single process only."""
MOMENTS, EXTREMES = frozenset({"bfk_ratio", "bfk_peak"}), frozenset({"bfk_peak", "bfk_guarantee"})
"""Those of the backward-to-feature kernel: by its moments, and by its extreme eigenvalues."""
OF_OUTPUTS = frozenset({"backward_speed", "dual_bfa_cos"})
"""Those that gradients of outputs in a second backward pass say."""
CHANGES = OF_OUTPUTS | {"gradient_change"}
"""All that the second backward pass is for."""
DUAL = "dual_bfk_ratio"
"""What passes through the graph of gradients say."""
BACKWARD = CHANGES | {DUAL}
"""All that takes the loss, and where its backward pass began."""

SEVERAL = "measured in a single process only"
ACCUMULATED = "gradients are accumulated: it is not this batch alone that moves the features"
DIFFERENTLY = "called differently when the forward was run again"
NO_GRAPH = "no graph leads to its outputs: nothing up to there is trained, or activation checkpointing"
NO_SOURCE = "its inputs are not a measured layer's outputs after elementwise operations alone"
NO_SHARE = "defined for a single matrix only, which is called once, and whose inputs and gradients are known"
HALVED = "the gradients that it begins with were rounded to half precision"
NO_WEIGHT = "no gradient arrived at its weight, or more than one"
NO_LOSS = "the loss after the step is not known: the model does not return what was trained on"

Work = Callable[[Graph, Tensor | None], None]


class FullStage:
    """The stage of a measured step for tier "full"; it notes why a quantity is missing."""

    def __init__(
        self,
        model: nn.Module,
        features: FeatureCapture,
        settings: Settings,
        alone: bool,
        facts: StepContext,
        out: RawScalars,
        warn: WarnOnce,
        old: Mapping[int, Tensor],
    ) -> None:
        """``alone``: whether no other process takes part, otherwise there is nothing to do; ``old``: layer index -> its
        weight before the step, where that is asked for.
        """
        asked = ALONE & set(settings.keys)
        self._keys = asked if alone else frozenset[str]()
        self._host = settings.low_memory
        self._model = model
        self._features = features
        self._facts = facts
        self._out = out
        self._warn = warn
        self._old = old
        facts.why_not.update({(key, NETWORK): SEVERAL for key in asked - self._keys})

    def replay(self, outputs: Outputs, portion: BatchSlice | None) -> Replay:
        """To compare a forward after the step with; where parts of changes or all properties are asked for, inputs too.

        ``portion``: the samples it is run on, if that is not all.
        """
        layers = self._features.layers
        tier = self._keys >= ALONE & set(TIERS["full"])
        read = {i for i, layer in layers.items() if layer.info.role == "readout"} if tier else set()
        read |= {i for i, layer in layers.items() if is_pointwise(layer)} if self._keys & PARTS else set()
        inputs = {i: rows for k in sorted(read) for i, rows in self._features.inputs(k).items()} or None
        if portion is not None:
            outputs = self._features.first(outputs, portion)
            inputs = None if inputs is None else self._features.first(inputs, portion)
        return Replay(outputs, self._keys - PARTS, inputs, None if portion is None else portion.samples)

    def checks(self) -> None:
        """Put what the step's own passes showed, if they were observed."""
        if self._features.checks is None:
            return
        for i, recorded in self._features.calls.items():
            found = [call.checked for call in recorded if call.checked is not None]
            pairs = [(c.input, c.source) for c in found if c.input is not None and c.source is not None]
            if pairs and len(pairs) == len(recorded):
                self._out.put(i, "activation_ratio", mean_ratio(*map(torch.cat, zip(*pairs, strict=True))))
            else:
                self._facts.why_not["activation_ratio", i] = NO_SOURCE
            if len(recorded) == len(found) == recorded[0].b_count == 1 and found[0].share is not None:
                self._out.put(i, "sample_share", found[0].share)
            else:
                self._facts.why_not["sample_share", i] = NO_SHARE

    def compared(self, replay: Replay) -> None:
        """Put what the forward after the step showed."""
        for i in replay.layers():
            change = replay.change(i)
            if change is not None and change.after is not None:
                ratios = mean_ratio(change.after, change.before + change.lengths)
                self._out.put(i, "feature_cancellation", ratios.clamp(max=1))
            if change is not None and change.pairs is not None:
                self._out.put(i, "kernel_change", kernel_change(*change.pairs))
        for i in replay.inputs.layers() if replay.inputs is not None else ():
            change = replay.inputs.change(i) if replay.inputs is not None else None
            if change is not None and change.size:
                self._out.put(i, "x.norm", length(change.before))
                self._out.put(i, "dx.norm", length(change.lengths))
                self._out.note(i, "dx.size", float(change.size))
                if change.pairs is not None and i in self._old and is_pointwise(self._features.layers[i]):
                    self._parts(i, *change.pairs)

    def _parts(self, i: int, before: Tensor, after: Tensor) -> None:
        """Put mean squares of what a layer's old weight, and its update, make of the change of its inputs."""
        layer = self._features.layers[i]
        dtype = compute_dtype(before.dtype)
        dx, old, now = after.to(dtype) - before.to(dtype), self._old[i].to(after.device), layer.weight()
        for name, matrix in (("W.dh", old.to(dtype)), ("dW.dh", now.to(dtype) - old.to(dtype))):
            rows = dx @ layer.layout.stack(matrix).flatten(0, 2).T
            self._out.put(i, name, lengths(rows).square().mean())

    def drifted(self, replay: Replay) -> None:
        """Put what the forward of the probe batch showed."""
        for i in replay.layers() if self._keys & {"kernel_drift", "kernel_alignment"} else ():
            change = replay.change(i)
            if change is not None and change.pairs is not None:
                self._out.put(i, "kernel_drift", kernel_change(*change.pairs))
                self._out.put(i, "kernel_alignment", kernel_alignment(*change.pairs))

    def linearized(self, probe: Probe | None, start: Mapping[str, Tensor], context: Context) -> None:
        """Compare the probe batch's outputs with those of the start and their linearization, if they are due.

        ``start``: parameters then, by name.
        """
        keys = SINCE_START & self._keys
        found = Linearization(self._model, self._features, start, self._host, self._out)
        while keys and not self._facts.no_drift and probe is not None:
            failed = {"linearity"} & keys or keys
            try:
                self._facts.why_not.update(found.measure(keys, probe, context, self._facts.eps))
                return
            except Exception as error:
                said = f"{type(error).__name__}: {error}".splitlines()[0]
                way = "has no derivative in forward mode" if "linearity" in failed else "could not be run again"
                self._missing(failed, NETWORK, f"the probe batch {way} ({said})")
            keys -= failed  # the others take no derivative

    def graphs(
        self, again: Replayable | None, given: StepInputs, outputs: Outputs, rates: Sequence[tuple[nn.Parameter, float]]
    ) -> None:
        """Measure what takes forwards with a graph, and passes through it.

        Args:
            again: the step's forward, if it can be run again.
            given: what is known of the step.
            outputs: of the layers, before it, with their gradients.
            rates: the parameters that are trained, and their learning rates.
        """
        if (MOMENTS | EXTREMES) & self._keys:
            self._kernels(again, rates, given.context)
        if CHANGES & self._keys:
            self._backwards(again, given, outputs, [p for p, _ in rates])
        if DUAL in self._keys:
            self._dual_kernels(again, given, [(p, rate) for p, rate in rates if p.requires_grad])

    def _kernels(self, again: Replayable | None, rates: Sequence[tuple[nn.Parameter, float]], context: Context) -> None:
        """Moments and extreme eigenvalues of backward-to-feature kernels, at the weights after the step."""
        keys = (MOMENTS | EXTREMES) & self._keys
        reason = ACCUMULATED if self._facts.accumulated > 1 else ""
        trained = [(p, rate) for p, rate in rates if p.requires_grad]

        def work(graph: Graph, loss: Tensor | None) -> None:
            for i in self._as_before(keys, graph):
                self._kernel(i, graph.outputs[i], trained)

        with sdpa_kernel(SDPBackend.MATH):  # of attention's ways the one that can be differentiated twice
            self._trace(keys, again, reason, [p for p, _ in rates], context, Graph(copies=True), work)

    def _kernel(self, i: int, outputs: Sequence[Tensor], trained: Sequence[tuple[nn.Parameter, float]]) -> None:
        keys = (MOMENTS | EXTREMES) & self._keys
        if not all(out.requires_grad for out in outputs):
            self._missing(keys, i, NO_GRAPH)
            return
        generator = torch.Generator().manual_seed(SEED)
        probes = [[signs(out.shape, generator) for out in outputs] for _ in range(PROBES)]
        parameters, rates = [p for p, _ in trained], [rate for _, rate in trained]
        found: dict[str, Tensor] = {}
        try:
            if MOMENTS & keys:
                found["K.1"], found["K.2"] = bfk_moments(outputs, parameters, rates, probes)
            if EXTREMES & keys:
                extremes = bfk_extremes(outputs, parameters, rates, probes[0], LANCZOS_STEPS)
                found["K.smallest"], found["K.largest"] = extremes
        except Exception as error:
            self._missing(keys, i, f"no second derivatives ({type(error).__name__}: {error})")
            return
        for name, value in found.items():
            self._out.put(i, name, value)

    def _backwards(
        self, again: Replayable | None, given: StepInputs, outputs: Outputs, parameters: Sequence[nn.Parameter]
    ) -> None:
        """Measure how far the gradients of the layers' outputs and weights have moved."""
        keys, seen = self._keys & CHANGES, self._features.weight_gradients
        run, start = _with_loss(again, given)

        def work(graph: Graph, loss: Tensor | None) -> None:
            if loss is None or not loss.requires_grad:
                raise ValueError("no graph leads to its loss")
            layers = self._as_before(keys, graph)
            edges = [edge for i in layers for edge in graph.edges[i] if edge is not None]
            before = {i: g for i in layers if (g := seen.get(i)) is not None}
            weights = [get_gradient_edge(self._features.layers[i].sources[0]) for i in before]
            begin = torch.as_tensor(start).to(loss)
            found = iter(torch.autograd.grad(loss, [*edges, *weights], begin, allow_unused=True) if edges else ())
            for i in layers:
                after = [None if edge is None else next(found) for edge in graph.edges[i]]
                if i in outputs:  # else they were overwritten, which is known
                    self._backward(i, after, outputs)
            for i, g in zip(before, found, strict=bool(edges)):
                self._gradient(i, before[i], g)

        reason = self._no_backward(again, run)
        self._facts.why_not.update(
            {("gradient_change", i): NO_WEIGHT for i in self._features.layers if seen.get(i) is None}
        )
        self._trace(keys, run, reason, parameters, given.context, Graph(copies=False), work)

    def _no_backward(self, again: Replayable | None, run: Replayable | None) -> str:
        if again is not None and run is None:
            return NO_LOSS
        return HALVED if isinstance(self._features.looked, RootCall) and self._features.looked.halves else ""

    def _dual_kernels(
        self, again: Replayable | None, given: StepInputs, rates: Sequence[tuple[nn.Parameter, float]]
    ) -> None:
        """Put moments of the layers' feature-to-backward kernels, at the weights after the step."""
        run, start = _with_loss(again, given)
        parameters = [p for p, _ in rates]

        def work(graph: Graph, loss: Tensor | None) -> None:
            if loss is None or not loss.requires_grad:
                raise ValueError("no graph leads to its loss")
            begun = (loss * torch.as_tensor(start).to(loss)).sum()
            for i in self._as_before({DUAL}, graph):
                places = [edge for edge in graph.edges[i] if edge is not None]
                if len(places) < len(graph.edges[i]):
                    self._missing({DUAL}, i, NO_GRAPH)
                    continue
                generator = torch.Generator().manual_seed(SEED)
                probes = [[signs(out.shape, generator) for out in graph.outputs[i]] for _ in range(PROBES)]
                try:
                    first, second = dual_bfk_moments(begun, places, parameters, [rate for _, rate in rates], probes)
                except Exception as error:
                    self._missing({DUAL}, i, f"no second derivatives ({type(error).__name__}: {error})")
                    continue
                self._out.put(i, "dual.1", first)
                self._out.put(i, "dual.2", second)

        reason = (ACCUMULATED if self._facts.accumulated > 1 else "") or self._no_backward(again, run)
        with sdpa_kernel(SDPBackend.MATH):
            self._trace({DUAL}, run, reason, parameters, given.context, Graph(copies=True), work)

    def _backward(self, i: int, after: Sequence[Tensor | None], outputs: Outputs) -> None:
        layer, parts = self._features.layers[i], []
        for b, seen in zip(after, outputs[i], strict=True):
            if b is None or seen.b is None:
                self._missing(OF_OUTPUTS, i, NO_GRAPH)
                return
            new = rows_of(b, *layer.features_of(b), seen.index)
            if new.shape != seen.b.shape:
                self._missing(OF_OUTPUTS, i, DIFFERENTLY)
                return
            dtype = compute_dtype(seen.b.dtype)
            db, h = new.to(dtype) - seen.b.to(dtype), seen.h.to(new.device, dtype)
            parts.append(torch.stack([length(db), length(h), (db * h).sum(dtype=torch.float64).to(dtype)]))
        sizes, features, inner = torch.stack(parts).unbind(1)
        self._out.put(i, "db.norm", length(sizes))
        self._out.put(i, "h.beside_db", length(features))
        self._out.put(i, "db.h", inner.sum())

    def _gradient(self, i: int, before: Tensor, after: Tensor | None) -> None:
        if after is None:
            self._facts.why_not["gradient_change", i] = NO_GRAPH
            return
        dtype = compute_dtype(before.dtype)
        old, new = (g.to_dense().to(dtype) for g in (before, after))
        self._out.put(i, "dg.norm", whole_length(new - old))
        self._out.put(i, "g.norm", whole_length(old))

    def _as_before(self, keys: Collection[str], graph: Graph) -> list[int]:
        """Layers that were called as often as in the step; the others have a reason."""
        calls = self._features.calls
        other = {i for i, some in calls.items() if len(graph.edges.get(i, ())) != len(some)}
        for i in other:
            self._missing(keys, i, DIFFERENTLY)
        return [i for i in graph.edges if i not in other]

    def _missing(self, keys: Collection[str], i: int, reason: str) -> None:
        self._facts.why_not.update({(key, i): reason for key in keys})

    def _trace(
        self,
        keys: Collection[str],
        again: Replayable | None,
        reason: str,
        parameters: Sequence[Tensor],
        context: Context,
        graph: Graph,
        work: Work,
    ) -> None:
        """Run a forward again with its graph, and ``work`` on that, unless there is a reason not to."""
        reason = self._facts.no_replay or reason or sees_all_modules()
        if again is None or reason:
            self._missing(keys, NETWORK, reason)
            return
        try:
            with preserved(self._model, host=self._host), unseen(self._model, parameters):
                again.rewind()
                with self._features.replaying(graph):
                    with context():
                        loss = again()
                    work(graph, loss)
        except Exception as error:
            reason = f"the forward could not be run again with a graph ({type(error).__name__}: {error})"
            self._missing(keys, NETWORK, reason)
            self._warn(f"{reason}; {', '.join(sorted(keys))} is left out", error)


def _with_loss(again: Replayable | None, given: StepInputs) -> tuple[Replayable | None, Tensor | float]:
    """Return the forward up to the loss, and the gradient with which the backward pass began there."""
    if isinstance(again, RootCall) and again.flow is not None and len(again.flow.gradients) == 1:
        loss = None if given.loss is None else trained_on(again, given)
        if bool(again.flow.alone() if loss is None else ~loss.isnan()):
            return again, again.flow.gradients[0]
    step = given.training_step if again is None or isinstance(again, RootCall) else again
    if again is None or step is None or step.obstacles or step.uncopied or given.loss is None:
        return None, 0.0
    return step, given.loss_scale / given.accumulated
