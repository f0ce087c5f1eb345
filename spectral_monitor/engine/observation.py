"""From hooks and stages to what one process saw, and from what all saw to what is known of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from spectral_monitor.capture.hooks.optimizer import OptimizerCapture
from spectral_monitor.capture.hooks.recording import WHY_HIDDEN
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
    """Fill in this process's observation of each layer, and what other processes compare with theirs."""
    layers, features = len(forward.layers), watch.capture
    noise, outputs = watch.replays.subset.noise, forward.outputs
    apart = range(0 if processes is None else layers)
    prints = row_hashes({i: calls for some in apart for i, calls in features.inputs(some).items()})
    for i in range(layers):
        recorded = features.calls.get(i, ())
        observation = LayerObservation(i in facts.stepped, i in facts.unused, bool(recorded), features.hidden.get(i, 0))
        forward.layers[i] = observation
        if recorded:
            there = [x for call in recorded if (x := call.input()) is not None]
            observation.has_inputs = len(there) == len(recorded)
            observation.has_gradients = all(call.gradient() is not None for call in recorded)
            observation.has_outputs = i in outputs
            observation.eps = max(noise.get(i, 0.0), *(call.eps for call in recorded))
            observation.inputs, observation.outputs = sum(map(len, there)), sum(call.count for call in recorded)
            observation.input_hash = prints[i][1] if i in prints else math.nan
            observation.split_inputs = any(call.split_in for call in recorded)
            observation.split_outputs = any(call.split_out for call in recorded)
            observation.input_features = there[0].shape[1] if there else 0
            observation.output_features = recorded[0].features
    if features.traced:
        for i, said in watch.readouts.see(features, facts.unused).items():
            forward.layers[i].readout_state = said
    if processes is not None:
        forward.output_hashes = as_table(row_hashes(outputs), layers, processes.device)


def settle_facts(facts: StepContext, seen: RankReports, given: StepInputs) -> None:
    """Fill in what all processes know of the step."""
    facts.stepped, facts.unused = seen.anywhere("stepped"), seen.everywhere("unused")
    facts.accumulated, facts.loss_scale = given.accumulated, given.loss_scale * seen.batch_count
    facts.loss_parts, facts.unfit_loss_input = given.loss_parts, given.unfit_loss_input
    facts.closures = int(max(some.closures for some in seen.steps))
    facts.called = seen.anywhere("called")
    facts.hidden = {i: WHY_HIDDEN[int(max(why))] for i, why in enumerate(seen.layers("hidden")) if max(why)}
    facts.fed, facts.lasted, facts.graded = (
        seen.wherever_called(name) for name in ("has_inputs", "has_outputs", "has_gradients")
    )
    facts.eps = {i: max(values) for i, values in enumerate(seen.layers("eps")) if i in facts.called}


def held_by(layers: Sequence[Layer], optimizers: OptimizerCapture) -> dict[int, str]:
    """Return layer index -> why steps of the optimizer that has it cannot be seen, empty if they can; of layers that
    none has, nothing.
    """
    why = {
        id(p): COMPILED_STEP if optimizer in optimizers.compiled else ""
        for optimizer in optimizers.optimizers
        for p in parameters_of(optimizer)
    }
    return {i: why[id(p)] for i, layer in enumerate(layers) for p in layer.sources if id(p) in why}
