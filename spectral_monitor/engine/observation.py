"""Observations of one process, and the facts of a step that follow from those of all."""

from __future__ import annotations

import math
from collections.abc import Sequence

from spectral_monitor.capture.hooks.optimizer import OptimizerCapture
from spectral_monitor.capture.hooks.recording import DROPPED, WHY_HIDDEN
from spectral_monitor.capture.unwrap import parameters_of
from spectral_monitor.condition.findings import COMPILED_STEP
from spectral_monitor.engine.agreement.rank_report import LayerObservation, RankReports
from spectral_monitor.engine.agreement.row_hash import as_table, row_hashes
from spectral_monitor.engine.features.step_inputs import StepInputs
from spectral_monitor.engine.features.watch import FeatureWatch, WatchedForward
from spectral_monitor.engine.results.reasons import StepContext
from spectral_monitor.layers import Layer
from spectral_monitor.sharding import ProcessGroup


def observe(forward: WatchedForward, watch: FeatureWatch, facts: StepContext, processes: ProcessGroup | None) -> None:
    """Fill in this process's observation of each layer, and the hashes that other processes compare with theirs."""
    layers, features = len(forward.layers), watch.capture
    noise, outputs = watch.replays.subset.noise, forward.outputs
    hashed = range(0 if processes is None else layers)
    input_hashes = row_hashes({i: calls for layer in hashed for i, calls in features.inputs(layer).items()})
    for i in range(layers):
        recorded = features.calls.get(i, ())
        passed_over = i in features.passed_over and not recorded
        why_hidden = features.hidden.get(i, DROPPED if passed_over else 0)
        observation = LayerObservation(i in facts.stepped, i in facts.unused, bool(recorded), why_hidden)
        forward.layers[i] = observation
        if recorded:
            inputs = [x for call in recorded if (x := call.input()) is not None]
            observation.has_inputs = len(inputs) == len(recorded)
            observation.has_gradients = all(call.gradient() is not None for call in recorded)
            observation.has_outputs = i in outputs
            observation.eps = max(noise.get(i, 0.0), *(call.eps for call in recorded))
            observation.inputs, observation.outputs = sum(map(len, inputs)), sum(call.count for call in recorded)
            observation.input_hash = input_hashes[i][1] if i in input_hashes else math.nan
            observation.split_inputs = any(call.split_in for call in recorded)
            observation.split_outputs = any(call.split_out for call in recorded)
            observation.input_features = inputs[0].shape[1] if inputs else 0
            observation.output_features = recorded[0].features
    if features.traced:
        for i, state in watch.readouts.see(features, facts.unused).items():
            forward.layers[i].readout_state = state
    if processes is not None:
        forward.output_hashes = as_table(row_hashes(outputs), layers, processes.device)


def settle_facts(facts: StepContext, reports: RankReports, step_inputs: StepInputs) -> None:
    """Fill in the facts that follow from the reports of all processes."""
    facts.stepped, facts.unused = reports.anywhere("stepped"), reports.everywhere("unused")
    facts.accumulated, facts.loss_scale = step_inputs.accumulated, step_inputs.loss_scale * reports.batch_count
    facts.loss_parts = step_inputs.loss_parts
    facts.closures = int(max(step.closures for step in reports.steps))
    facts.called = reports.anywhere("called")
    codes = {i: int(max(row)) for i, row in enumerate(reports.layers("hidden"))}
    seen_elsewhere = {i for i, code in codes.items() if code == DROPPED and i in facts.called}
    facts.hidden = {i: WHY_HIDDEN[code] for i, code in codes.items() if code and i not in seen_elsewhere}
    facts.with_inputs = reports.wherever_called("has_inputs")
    facts.with_outputs = reports.wherever_called("has_outputs")
    facts.with_gradients = reports.wherever_called("has_gradients")
    facts.eps = {i: max(values) for i, values in enumerate(reports.layers("eps")) if i in facts.called}


def optimized_layers(layers: Sequence[Layer], optimizers: OptimizerCapture) -> dict[int, str]:
    """Return, for each layer that an optimizer trains, why its steps cannot be observed; empty if they can."""
    reasons = {
        id(p): COMPILED_STEP if optimizer in optimizers.compiled else ""
        for optimizer in optimizers.optimizers
        for p in parameters_of(optimizer)
    }
    return {i: reasons[id(p)] for i, layer in enumerate(layers) for p in layer.sources if id(p) in reasons}
