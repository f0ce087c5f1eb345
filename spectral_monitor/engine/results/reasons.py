"""The row of one layer: the value of every quantity, or the reason why it is missing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from spectral_monitor.capture.replay.feature_change import PARTS
from spectral_monitor.condition.findings import DIVIDED, NO_STEP
from spectral_monitor.condition.optimizers.hyperparameters import WeightDecay
from spectral_monitor.engine.results.raw import NETWORK, Raw
from spectral_monitor.engine.settings import FEATURES
from spectral_monitor.layers import Layer
from spectral_monitor.measurement import (
    LOST,
    NODE,
    NOT_CALLED,
    NOT_FINITE,
    NOT_STEPPED,
    UNUSED,
    ZERO,
    LossFault,
)
from spectral_monitor.quantities import QUANTITIES, Readings, attention
from spectral_monitor.quantities.readings import sound

ROUNDED = "its change is too close to the rounding of its outputs"
HALF = f"{ROUNDED}, which are of half precision: replay_samples=None runs the forward in full precision"
UNCHOSEN = "none of the max_rows rows belongs to the samples that are run again: raise max_rows or replay_samples"
REPLACED = "its weight was replaced, pruned or parametrized after training began"
NOT_QUERIES = "attention blocks report it at the layer that makes the queries, which this layer is not"
ONE_HOT = "an embedding's inputs are one-hot"
NO_DECAY = WeightDecay(math.nan, math.nan)
SINGLE_ROW = "always 1 with a single row"
SHARED = "its output is shared by all samples, and only some were run eagerly: replay_samples=None runs all"
OUT_OF_RANGE = "too small or too large for a 32-bit number"
CLIPPED = "gradients were clipped entry by entry or replaced, so the original gradients are not known"
MOVED = "something moved the weights between the forward pass and the update, or before both"

CHANGE_MARGIN = 2.0
"""Least ratio of a change to its rounding. Its size is then off by half the square of rounding over change, and
roundings are spread over a third of their bound. Angles need more: see ``Quantity.margin``.
"""

SMALLEST, LARGEST = torch.finfo(torch.float32).smallest_normal, torch.finfo(torch.float32).max
"""Range of the sizes that a measurement can hold; smaller values lose digits or become 0."""
DRIFTS = ("feature_drift", "kernel_drift")
"""Changes since the start, relative to the start."""
OVER_OUTPUTS = PARTS | {"feature_change_local"}
"""Quantities that are computed from inputs, but relative to outputs."""
OF_READOUTS = frozenset({"log_z", "readout_row", "output_drift_features", "output_drift_readout", "output_drift_joint"})
"""Quantities of output layers alone."""
ATTENTION = frozenset(entry.key for entry in attention.ENTRIES)
"""Quantities of attention blocks."""


@dataclass
class StepContext:
    """Facts about one step: first those of this process, then those that all processes agree on."""

    lr: dict[int, float] = field(default_factory=dict)  # layer index -> learning rate, for optimized layers
    stepped: set[int] = field(default_factory=set)  # layers whose optimizer has stepped
    unused: set[int] = field(default_factory=set)  # layers without a gradient
    divided: set[int] = field(default_factory=set)  # layers whose parameters several optimizers step
    called: set[int] = field(default_factory=set)  # layers that were called in the forward
    hidden: Mapping[int, str] = field(default_factory=dict)  # layer index -> why its features cannot be observed
    with_inputs: set[int] = field(default_factory=set)  # layers whose inputs are available
    with_outputs: set[int] = field(default_factory=set)  # layers whose outputs are available
    with_gradients: set[int] = field(default_factory=set)  # layers whose every output received its gradient once
    eps: dict[int, float] = field(default_factory=dict)  # layer index -> rounding of its outputs
    replayed: set[int] = field(default_factory=set)  # layers whose outputs after the step are known
    unchosen: set[int] = field(default_factory=set)  # replayed layers without any of the rows that are compared
    # optimized layer's index -> why steps of its optimizer cannot be observed; empty if they can
    optimized: Mapping[int, str] = field(default_factory=dict)
    unobserved: str = ""  # why calls of layers were not observed, or are of no use; empty if they were
    sampled: bool = False  # whether features are of some samples only, which were run beside the step
    halved: bool = False  # whether features are those of autocast, though a replay could have full precision
    shared: set[int] = field(default_factory=set)  # layers with one output for all samples, of which some were run
    no_replay: str = ""  # why no layer was replayed; empty if layers should have been
    no_drift: str = ""  # why ``feature_drift`` is missing; empty if it should not be
    closures: int = 0  # the number of times the closure ran
    replaced: set[int] = field(default_factory=set)  # layers whose weight was replaced since training began
    rewritten: bool = False  # whether an optimizer overwrote gradients
    clipped: bool = False  # whether gradients were clipped otherwise than by a factor
    accumulated: int = 1  # the divisor of the loss before the backward pass
    loss_scale: float = 1.0  # the factor on the loss before the backward pass
    loss_parts: int = 1  # number of losses of the model whose sum is that of the step; 1 if it is their mean
    no_loss: str | None = None  # why the loss of the whole batch after the step is not known; ``None``: not requested
    loss_eps: float | None = None  # rounding of that loss, if it was requested
    multipliers: Mapping[int, float] = field(default_factory=dict)  # layer index -> factor of a correction on its rate
    decay: dict[int, WeightDecay] = field(default_factory=dict)  # of optimized layers whose weight is a parameter
    attention: Mapping[int, Mapping[str, str]] = field(default_factory=dict)  # layer index -> quantity -> remark
    loss_fault: LossFault | None = None  # ``None`` if the loss was not seen
    modes: Mapping[str, float] = field(default_factory=dict)  # values of the whole network about modules' modes
    # (quantity or need, layer index or NETWORK for all layers) -> why it is missing
    why_not: dict[tuple[str, int], str] = field(default_factory=dict)


def readings_of(i: int, layer: Layer, raw: Raw, facts: StepContext) -> Readings:
    """Return the raw scalars of one layer, and the settings of its optimizer."""
    decay = facts.decay.get(i, NO_DECAY)
    settings = {
        "lr": facts.lr.get(i, math.nan),
        "lr_multiplier": facts.multipliers.get(i, 1.0),
        "weight_decay": decay.factor,
        "beta1": decay.beta1,
    }
    return Readings(raw.get(i, {}), layer.info.role, layer.layout.fan_in, layer.layout.fan_outs, settings)


def layer_row(
    i: int, layer: Layer, keys: Sequence[str], readings: Readings, facts: StepContext
) -> tuple[dict[str, float], dict[str, str]]:
    """Return quantity -> value and, for every value that is NaN, quantity -> reason.

    Some other values have remarks there: a contribution of exactly 0 despite a gradient, and bounds.
    """
    row, reasons = {}, {}
    for key in keys:
        reason = _missing(key, i, layer, readings, facts)
        value = math.nan if reason else _value(key, readings, facts)
        if math.isnan(value):
            reasons[key] = reason or (ZERO if sound(readings.raw) else NOT_FINITE)
        elif math.isfinite(value) and value and not SMALLEST <= abs(value) <= LARGEST:
            value, reasons[key] = math.nan, OUT_OF_RANGE
        elif key in ATTENTION and (remark := facts.attention[i].get(key, "")):
            reasons[key] = remark
        elif key == "contribution" and value == 0 and readings.get("g.arrives") > 0:
            reasons[key] = LOST
        row[key] = value
    return row, reasons


def _value(key: str, readings: Readings, facts: StepContext) -> float:
    value = QUANTITIES[key].value(readings)
    # Gradients are those of the divided and scaled loss.
    if key == "backward_rms":
        return value * facts.accumulated / facts.loss_scale
    return value * facts.loss_scale / facts.accumulated if key == "sensitivity" else value


def layer_errors(values: Mapping[str, float], readings: Readings, facts: StepContext, exact: bool) -> dict[str, float]:
    """Return the standard errors of values that are computed from a sample of rows; 0 if all rows were used."""
    errors = {}
    for key in values:
        entry = QUANTITIES[key]
        if entry.error is None:
            continue
        scale = facts.loss_scale / facts.accumulated if key == "sensitivity" else 1.0
        if math.isnan(values[key]):
            errors[key] = math.nan
        else:
            errors[key] = 0.0 if exact and entry.of_inputs else abs(entry.error(readings) * scale)
    return errors


def _missing(key: str, i: int, layer: Layer, readings: Readings, facts: StepContext) -> str:
    """Return why a quantity is missing for a layer; empty if it is not."""
    role, needs = layer.info.role, QUANTITIES[key].needs
    if i in facts.replaced:
        return REPLACED
    if role == "vector" and not QUANTITIES[key].of_vectors:
        return "biases and gains have only RMS, update, drift and contribution"
    if role == NODE and (QUANTITIES[key].of_inputs or not needs & FEATURES):
        return "the output of a module has features but no weight"
    if key in ATTENTION and i not in facts.attention:
        return NOT_QUERIES
    if key in OF_READOUTS and role != "readout":
        return "it is not an output layer"
    updated = needs & {"dW", "g", "dqk", "state"}
    if (updated or key in ("lr", "lr_multiplier")) and i not in facts.lr:
        if i in facts.optimized:
            return facts.optimized[i] or (NOT_STEPPED if facts.lr else NO_STEP)
        return "no optimizer updates it" if facts.lr else NO_STEP
    if updated and i in facts.unused:
        return UNUSED
    if updated and i not in facts.stepped:
        return NOT_STEPPED
    if key in ATTENTION:
        return facts.why_not.get((key, i), "")
    if "state" in needs:
        return facts.why_not.get(("state", i), "")
    if i in facts.divided and (needs & {"dW", "g"} or key == "lr"):
        return DIVIDED
    if key == "lr" and math.isnan(facts.lr[i]):
        if layer.compute is None:
            return "its optimizer has no learning rate"
        return "the parameters it is computed from have different learning rates, or none"
    if key == "contribution":
        return f"counted at {layer.tied_to}, which has the same parameter" if layer.tied_to else _no_gradient(facts)
    if key == "gradient_natural":
        return ONE_HOT if role == "embedding" else facts.why_not.get(("|g|", i), "") or _no_gradient(facts)
    if key in ("decay_share", "equilibrium"):
        return _no_decay(key, i, layer, facts)
    if needs & {"h", "b", "dh", "probe"}:
        return _no_features(key, i, layer, readings, facts)
    return ""


def _no_gradient(facts: StepContext) -> str:
    if facts.closures > 1:
        return f"the closure ran {facts.closures} times: the gradient is not that of the weights before the step"
    if facts.rewritten:
        return "the optimizer overwrote the gradients"
    if facts.clipped:
        return CLIPPED
    return ""


def _no_decay(key: str, i: int, layer: Layer, facts: StepContext) -> str:
    decay = facts.decay.get(i, NO_DECAY)
    if layer.compute is not None:
        return "weight decay acts on the parameters that its weight is computed from"
    if math.isnan(decay.factor):
        return "its weight decay, if it has any, is part of the gradient"
    if not decay.factor:
        return "it has no weight decay"
    if key == "equilibrium" and math.isnan(decay.beta1):
        return "the angle in equilibrium is known only for AdamW and similar optimizers"
    return ""


def _no_features(key: str, i: int, layer: Layer, readings: Readings, facts: StepContext) -> str:
    entry = QUANTITIES[key]
    needs = entry.needs
    if layer.no_features:
        return layer.no_features
    if facts.unobserved:
        return facts.unobserved
    if layer.info.role == "embedding" and entry.of_inputs:
        return ONE_HOT
    if i in facts.hidden:
        return facts.hidden[i]
    if i not in facts.called:
        return NOT_CALLED
    if reason := facts.why_not.get((key, NETWORK), "") or facts.why_not.get((key, i), ""):
        return reason
    if entry.of_inputs and i not in facts.with_inputs:
        return "its inputs are not a floating-point tensor, or were overwritten in place"
    no_rows = UNCHOSEN if i in facts.unchosen else ""
    if "probe" in needs:
        rounded = key in DRIFTS and 0 < readings.get(key) < CHANGE_MARGIN * facts.eps[i]
        return facts.no_drift or no_rows or (ROUNDED if rounded else "")
    if key == "feature_change_local" and layer.layout.taps > 1:
        return "the taps of a convolution overlap, so one may cancel what another adds"
    if needs & {"h", "dh"} and (not entry.of_inputs or key in OVER_OUTPUTS) and i not in facts.with_outputs:
        return "its outputs were overwritten in place in this step; from the next measured step on, they are copied"
    if "b" in needs and i in facts.shared:
        return SHARED
    if "b" in needs and i not in facts.with_gradients:
        return "no gradient arrived at its output, or more than one, or it was overwritten"
    symbol = {"backward_speed": "b", "dual_bfa_cos": "b", "gradient_change": "g"}.get(key, "")
    if symbol and 0 < readings.get(f"d{symbol}.norm") < entry.margin * facts.eps[i] * readings.get(f"{symbol}.norm"):
        return "its change is too close to the rounding of its gradients"
    if entry.unit == "directions" and readings.get("h_in.rows" if entry.of_inputs else "b.rows") == 1:
        return SINGLE_ROW
    if "dh" not in needs:
        return ""
    if facts.no_replay:
        return facts.no_replay
    if i not in facts.replayed:
        return no_rows or "called differently when the forward was run again"
    if key in PARTS:
        return _no_part(readings, facts.eps[i])
    if key == "feature_cancellation":
        return ""  # a change below its rounding cancels nothing
    if 0 < readings.get("dh.norm") < entry.margin * facts.eps[i] * readings.get("h.compared"):
        return HALF if facts.halved else ROUNDED
    return ""


def _no_part(readings: Readings, eps: float) -> str:
    if math.isnan(readings.get("W.dh")) and sound(readings.raw):
        return "defined only for a single trained matrix whose inputs are known before and after the step"
    return ROUNDED if 0 < readings.get("dx.norm") < CHANGE_MARGIN * eps * readings.get("x.norm") else ""
