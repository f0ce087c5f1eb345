"""Replays of a measured step with their graph: kernels, and a second backward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel

from spectral_monitor.capture.hooks.forward import FeatureCapture
from spectral_monitor.capture.replay.feature_change import Outputs
from spectral_monitor.capture.replay.graph_replay import Graph, sees_all_modules, unseen
from spectral_monitor.capture.replay.replay import Replayable, RootCall
from spectral_monitor.capture.row_sampling import rows_of
from spectral_monitor.engine.features.step_inputs import StepInputs
from spectral_monitor.engine.results.raw import NETWORK, RawScalars
from spectral_monitor.engine.results.reasons import StepContext
from spectral_monitor.functional.kernels import bfk_extremes, bfk_moments, dual_bfk_moments, signs
from spectral_monitor.functional.vector_norms import row_products, whole_length
from spectral_monitor.linalg import compute_dtype
from spectral_monitor.messages import WarnOnce
from spectral_monitor.state.snapshot import preserved

PROBES = 4
"""Random vectors for the moments of the kernel of each layer; each takes two passes."""
LANCZOS_STEPS = 8
"""Products with the kernel of each layer for its extreme eigenvalues; each takes two passes."""
SEED = 3
"""Seed of the generator of these vectors, which are the same in every step, so that their noise is no change."""

MOMENTS, EXTREMES = frozenset({"bfk_ratio", "bfk_peak"}), frozenset({"bfk_peak", "bfk_guarantee"})
"""Quantities of the backward-to-feature kernel: from its moments, and from its extreme eigenvalues."""
OF_OUTPUTS = frozenset({"backward_speed", "dual_bfa_cos"})
"""Quantities from gradients of outputs in a second backward pass."""
CHANGES = OF_OUTPUTS | {"gradient_change"}
"""All quantities from the second backward pass."""
DUAL = "dual_bfk_ratio"
"""The quantity from passes through the graph of gradients."""
BACKWARD = CHANGES | {DUAL}
"""Quantities that need the loss, and the gradient that its backward pass began with."""

ACCUMULATED = "gradients are accumulated, so this batch alone does not determine how features move"
DIFFERENTLY = "called differently when the forward was run again"
NO_GRAPH = "its outputs have no graph: no layer up to it is trained, or activation checkpointing is on"
HALVED = "the gradients of the outputs were rounded to half precision"
NO_WEIGHT = "no gradient arrived at its weight, or more than one"
NO_LOSS = "the loss after the step is not known: the model does not return the loss that was trained on"

Work = Callable[[Graph, Tensor | None], None]


@dataclass(frozen=True)
class GraphPasses:
    """Passes through the graph of a step's forward, run again at the weights after the step."""

    model: nn.Module
    features: FeatureCapture
    keys: frozenset[str]  # quantities that are measured
    host: bool  # whether copies are kept in host memory
    facts: StepContext
    out: RawScalars
    warn: WarnOnce
    step_inputs: StepInputs
    rates: Sequence[tuple[nn.Parameter, float]]  # the parameters that are trained, and their learning rates

    def measure(self, forward: Replayable | None, outputs: Outputs) -> None:
        """Measure the quantities that need a graph.

        ``outputs``: of the layers, before the step, with their gradients.
        """
        accumulated = ACCUMULATED if self.facts.accumulated > 1 else ""
        if (MOMENTS | EXTREMES) & self.keys:
            self._kernels(forward, accumulated)
        if not BACKWARD & self.keys:
            return
        loss_forward, start = self.step_inputs.forward_to_loss(forward)
        reason = NO_LOSS if forward is not None and loss_forward is None else ""
        if not reason and isinstance(self.features.looked, RootCall) and self.features.looked.halves:
            reason = HALVED
        if CHANGES & self.keys:
            self._backwards(loss_forward, start, reason, outputs)
        if DUAL in self.keys:
            self._dual_kernels(loss_forward, start, accumulated or reason)

    def _trained(self) -> tuple[list[nn.Parameter], list[float]]:
        """Return the parameters that take gradients, and their learning rates."""
        return [p for p, _ in self.rates if p.requires_grad], [rate for p, rate in self.rates if p.requires_grad]

    def _kernels(self, forward: Replayable | None, reason: str) -> None:
        """Put moments and extreme eigenvalues of backward-to-feature kernels, at the weights after the step."""
        keys = (MOMENTS | EXTREMES) & self.keys

        def work(graph: Graph, loss: Tensor | None) -> None:
            for i in self._as_before(keys, graph):
                self._kernel(i, graph.outputs[i])

        with sdpa_kernel(SDPBackend.MATH):  # the only attention that can be differentiated twice
            self._trace(keys, forward, reason, Graph(copies=True), work)

    def _kernel(self, i: int, outputs: Sequence[Tensor]) -> None:
        keys = (MOMENTS | EXTREMES) & self.keys
        if not all(out.requires_grad for out in outputs):
            self._missing(keys, i, NO_GRAPH)
            return
        probes, (parameters, rates) = _probes(outputs), self._trained()
        numbers: dict[str, Tensor] = {}
        try:
            if MOMENTS & keys:
                numbers["K.1"], numbers["K.2"] = bfk_moments(outputs, parameters, rates, probes)
            if EXTREMES & keys:
                extremes = bfk_extremes(outputs, parameters, rates, probes[0], LANCZOS_STEPS)
                numbers["K.smallest"], numbers["K.largest"] = extremes
        except Exception as error:
            self._missing(keys, i, f"no second derivatives ({type(error).__name__}: {error})")
            return
        for name, number in numbers.items():
            self.out.put(i, name, number)

    def _backwards(self, forward: Replayable | None, start: Tensor | float, reason: str, outputs: Outputs) -> None:
        """Put how far the gradients of the layers' outputs and weights have moved."""
        keys, weight_gradients = self.keys & CHANGES, self.features.weight_gradients

        def work(graph: Graph, loss: Tensor | None) -> None:
            loss = _differentiable(loss)
            layers = self._as_before(keys, graph)
            edges = [edge for i in layers for edge in graph.edges[i] if edge is not None]
            before = {i: g for i in layers if (g := weight_gradients.get(i)) is not None}
            weights = [get_gradient_edge(self.features.layers[i].sources[0]) for i in before]
            begin = torch.as_tensor(start, dtype=loss.dtype, device=loss.device)
            gradients = iter(torch.autograd.grad(loss, [*edges, *weights], begin, allow_unused=True) if edges else ())
            for i in layers:
                after = [None if edge is None else next(gradients) for edge in graph.edges[i]]
                if i in outputs:  # otherwise they were overwritten, and another reason says so
                    self._backward(i, after, outputs)
            for i, gradient in zip(before, gradients, strict=bool(edges)):
                self._gradient(i, before[i], gradient)

        unknown = [i for i in self.features.layers if weight_gradients.get(i) is None]
        self.facts.why_not.update({("gradient_change", i): NO_WEIGHT for i in unknown})
        self._trace(keys, forward, reason, Graph(copies=False), work)

    def _dual_kernels(self, forward: Replayable | None, start: Tensor | float, reason: str) -> None:
        """Put moments of the layers' feature-to-backward kernels, at the weights after the step."""
        parameters, rates = self._trained()

        def work(graph: Graph, loss: Tensor | None) -> None:
            loss = _differentiable(loss)
            scaled_loss = (loss * torch.as_tensor(start, dtype=loss.dtype, device=loss.device)).sum()
            for i in self._as_before({DUAL}, graph):
                edges = [edge for edge in graph.edges[i] if edge is not None]
                if len(edges) < len(graph.edges[i]):
                    self._missing({DUAL}, i, NO_GRAPH)
                    continue
                try:
                    probes = _probes(graph.outputs[i])
                    first, second = dual_bfk_moments(scaled_loss, edges, parameters, rates, probes)
                except Exception as error:
                    self._missing({DUAL}, i, f"no second derivatives ({type(error).__name__}: {error})")
                    continue
                self.out.put(i, "dual.1", first)
                self.out.put(i, "dual.2", second)

        with sdpa_kernel(SDPBackend.MATH):
            self._trace({DUAL}, forward, reason, Graph(copies=True), work)

    def _backward(self, i: int, after: Sequence[Tensor | None], outputs: Outputs) -> None:
        layer, parts = self.features.layers[i], []
        for b, call in zip(after, outputs[i], strict=True):
            if b is None or call.b is None:
                self._missing(OF_OUTPUTS, i, NO_GRAPH)
                return
            new = rows_of(b, *layer.features_of(b), call.index)
            if new.shape != call.b.shape:
                self._missing(OF_OUTPUTS, i, DIFFERENTLY)
                return
            dtype = compute_dtype(call.b.dtype)
            db, h = new.to(dtype) - call.b.to(dtype), call.h.to(new.device, dtype)
            parts.append(torch.stack([whole_length(db), whole_length(h), row_products(db, h).sum()]))
        sizes, features, inner = torch.stack(parts).unbind(1)
        self.out.put(i, "db.norm", whole_length(sizes))
        self.out.put(i, "h.beside_db", whole_length(features))
        self.out.put(i, "db.h", inner.sum())

    def _gradient(self, i: int, before: Tensor, after: Tensor | None) -> None:
        if after is None:
            self.facts.why_not["gradient_change", i] = NO_GRAPH
            return
        dtype = compute_dtype(before.dtype)
        old, new = (g.to_dense().to(dtype) for g in (before, after))
        self.out.put(i, "dg.norm", whole_length(new - old))
        self.out.put(i, "g.norm", whole_length(old))

    def _as_before(self, keys: Collection[str], graph: Graph) -> list[int]:
        """Return the layers that were called as often as in the step; note a reason for the others."""
        calls = self.features.calls
        differing = {i for i, recorded in calls.items() if len(graph.edges.get(i, ())) != len(recorded)}
        for i in differing:
            self._missing(keys, i, DIFFERENTLY)
        return [i for i in graph.edges if i not in differing]

    def _missing(self, keys: Collection[str], i: int, reason: str) -> None:
        self.facts.why_not.update({(key, i): reason for key in keys})

    def _trace(self, keys: Collection[str], forward: Replayable | None, reason: str, graph: Graph, work: Work) -> None:
        """Run a forward again with its graph, then ``work`` on that graph, unless there is a reason not to."""
        reason = self.facts.no_replay or reason or sees_all_modules()
        if forward is None or reason:
            self._missing(keys, NETWORK, reason)
            return
        try:
            with preserved(self.model, host=self.host), unseen(self.model, [p for p, _ in self.rates]):
                forward.rewind()
                with self.features.replaying(graph):
                    with self.step_inputs.context():
                        loss = forward()
                    work(graph, loss)
        except Exception as error:
            reason = f"the forward could not be run again with a graph ({type(error).__name__}: {error})"
            self._missing(keys, NETWORK, reason)
            self.warn(f"{reason}; not measured: {', '.join(sorted(keys))}", error)


def _probes(outputs: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return random signs for the outputs of a layer."""
    generator = torch.Generator().manual_seed(SEED)
    return [[signs(out.shape, generator) for out in outputs] for _ in range(PROBES)]


def _differentiable(loss: Tensor | None) -> Tensor:
    """Return the loss of a forward with a graph.

    Raises:
        ValueError: there is none, or no graph leads to it.
    """
    if loss is None or not loss.requires_grad:
        raise ValueError("its loss has no graph")
    return loss
