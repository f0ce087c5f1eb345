"""Tier "full": what the papers assume, checked in the step's own passes and in forwards after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spectral_monitor.capture.hooks.forward import FeatureCapture
from spectral_monitor.capture.records.assumption_checks import is_pointwise
from spectral_monitor.capture.replay.batch_slicing import BatchSlice
from spectral_monitor.capture.replay.feature_change import PARTS, Outputs, Replay, first_outputs
from spectral_monitor.engine.features.linearization import SINCE_START, Linearization
from spectral_monitor.engine.features.replays import Probe
from spectral_monitor.engine.features.step_inputs import Context
from spectral_monitor.engine.results.raw import NETWORK, RawScalars
from spectral_monitor.engine.results.reasons import StepContext
from spectral_monitor.functional.features import mean_ratio
from spectral_monitor.functional.laziness import kernel_alignment, kernel_change
from spectral_monitor.functional.vector_norms import lengths
from spectral_monitor.linalg import compute_dtype
from spectral_monitor.quantities import TIERS, assumptions, laziness

ALONE = frozenset(q.key for q in (*assumptions.ENTRIES, *laziness.ENTRIES) if q.needs & {"h", "b"})
"""Quantities that are measured in a single process only."""

SINGLE_PROCESS = "measured in a single process only"
NO_SOURCE = "its inputs are not a measured layer's outputs after only elementwise operations"
NO_SHARE = "defined only for a single matrix that is called once and whose inputs and gradients are known"


@dataclass(frozen=True)
class FullStage:
    """The stage of a measured step for tier "full"; it notes why a quantity is missing."""

    model: nn.Module
    features: FeatureCapture
    keys: frozenset[str]  # the quantities of :data:`ALONE` that are measured
    host: bool  # whether copies are kept in host memory
    facts: StepContext
    out: RawScalars
    old: Mapping[int, Tensor]  # layer index -> its weight before the step, where a quantity needs it

    def replay(self, outputs: Outputs, portion: BatchSlice | None) -> Replay:
        """Return a replay that compares a forward after the step with these outputs.

        It also compares inputs if parts of changes are measured, or the whole tier. ``portion``: the samples that are
        run; ``None`` for all.
        """
        layers = self.features.layers
        complete = self.keys >= ALONE & set(TIERS["full"])
        input_layers = {i for i, layer in layers.items() if layer.info.role == "readout"} if complete else set()
        input_layers |= {i for i, layer in layers.items() if is_pointwise(layer)} if self.keys & PARTS else set()
        inputs = {i: rows for k in sorted(input_layers) for i, rows in self.features.inputs(k).items()} or None
        if portion is not None:
            outputs = first_outputs(outputs, portion)
            inputs = None if inputs is None else first_outputs(inputs, portion)
        return Replay(outputs, self.keys - PARTS, inputs, None if portion is None else portion.samples)

    def checks(self) -> None:
        """Put what the step's own passes showed, if they were observed."""
        if self.features.checks is None:
            return
        for i, recorded in self.features.calls.items():
            checks = [call.checked for call in recorded if call.checked is not None]
            pairs = [(c.input, c.source) for c in checks if c.input is not None and c.source is not None]
            if pairs and len(pairs) == len(recorded):
                self.out.put(i, "activation_ratio", mean_ratio(*map(torch.cat, zip(*pairs, strict=True))))
            else:
                self.facts.why_not["activation_ratio", i] = NO_SOURCE
            if len(recorded) == len(checks) == recorded[0].b_count == 1 and checks[0].share is not None:
                self.out.put(i, "sample_share", checks[0].share)
            else:
                self.facts.why_not["sample_share", i] = NO_SHARE

    def compared(self, replay: Replay) -> None:
        """Put what the forward after the step showed."""
        for i in replay.outputs:
            change = replay.change(i)
            if change is not None and change.after is not None:
                ratios = mean_ratio(change.after, change.before + change.lengths)
                self.out.put(i, "feature_cancellation", ratios.clamp(max=1))
            if change is not None and change.pairs is not None:
                self.out.put(i, "kernel_change", kernel_change(*change.pairs))
        if replay.inputs is None:
            return
        for i in replay.inputs.outputs:
            change = replay.inputs.change(i)
            if change is not None and change.size:
                self.out.put(i, "x.norm", lengths(change.before))
                self.out.put(i, "dx.norm", lengths(change.lengths))
                self.out.note(i, "dx.size", float(change.size))
                if change.pairs is not None and i in self.old and is_pointwise(self.features.layers[i]):
                    self._parts(i, *change.pairs)

    def _parts(self, i: int, before: Tensor, after: Tensor) -> None:
        """Put mean squares of the products of the change of a layer's inputs with its old weight and its update."""
        layer = self.features.layers[i]
        dtype = compute_dtype(before.dtype)
        dx, old, now = after.to(dtype) - before.to(dtype), self.old[i].to(after.device), layer.weight()
        for name, matrix in (("W.dh", old.to(dtype)), ("dW.dh", now.to(dtype) - old.to(dtype))):
            rows = dx @ layer.layout.stack(matrix).flatten(0, 2).T
            self.out.put(i, name, lengths(rows).square().mean())

    def drifted(self, replay: Replay) -> None:
        """Put what the forward of the probe batch showed."""
        for i in replay.outputs if self.keys & {"kernel_drift", "kernel_alignment"} else ():
            change = replay.change(i)
            if change is not None and change.pairs is not None:
                self.out.put(i, "kernel_drift", kernel_change(*change.pairs))
                self.out.put(i, "kernel_alignment", kernel_alignment(*change.pairs))

    def linearized(self, probe: Probe | None, start: Mapping[str, Tensor], context: Context) -> None:
        """Compare the probe batch's outputs with those of the start and their linearization, if they are due.

        ``start``: parameters at the start, by name.
        """
        keys = SINCE_START & self.keys
        linearization = Linearization(self.model, self.features, start, self.host, self.out, context)
        while keys and not self.facts.no_drift and probe is not None:
            failed = {"linearity"} & keys or keys
            try:
                self.facts.why_not.update(linearization.measure(keys, probe, self.facts.eps))
                return
            except Exception as error:
                message = f"{type(error).__name__}: {error}".splitlines()[0]
                problem = "has no derivative in forward mode" if "linearity" in failed else "could not be run again"
                reason = f"the probe batch {problem} ({message})"
                self.facts.why_not.update({(key, NETWORK): reason for key in failed})
            keys -= failed  # the others need no derivative
