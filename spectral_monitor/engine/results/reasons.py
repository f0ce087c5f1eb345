"""The row of one layer: every quantity, and for each that cannot be had the reason why."""

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
from spectral_monitor.measurement import LOST, NODE, NOT_CALLED, NOT_FINITE, NOT_STEPPED, UNUSED, ZERO
from spectral_monitor.quantities import QUANTITIES, Readings, attention
from spectral_monitor.quantities.readings import sound

ROUNDED = "its change is too close to the rounding of its outputs"
HALF = f"{ROUNDED}, which are of half precision: replay_samples=None runs the forward in full precision"
UNCHOSEN = "no row of max_rows is of the samples that are run again: raise max_rows or replay_samples"
REPLACED = "since training began its weight was replaced, pruned or parametrized"
NOT_QUERIES = "it does not make the queries of an attention block, where those of a block are reported"
ONE_HOT = "an embedding's inputs are one-hot"
NO_DECAY = WeightDecay(math.nan, math.nan)
SINGLE_ROW = "of a single row it is always 1"
SHARED = "all samples have its output in common, and only some were run eagerly: replay_samples=None runs all"
OUT_OF_RANGE = "it is too small or too large for a 32-bit number"
CLIPPED = "gradients were clipped entry by entry, or are other gradients now: what they were before is not known"
MOVED = "something moved the weights between the forward pass and the update, or before both"

CHANGE_MARGIN = 2.0
"""Times its rounding that a change must be. Its size is then off by half the square of rounding over change, and
roundings are spread over a third of their bound. Angles need more: see ``Quantity.margin``.
"""

SMALLEST, LARGEST = torch.finfo(torch.float32).smallest_normal, torch.finfo(torch.float32).max
"""Size of what a measurement can hold; below, digits are lost and then all of it."""
DRIFTS = ("feature_drift", "kernel_drift")
"""Changes since the start, relative to what was there."""
OVER_OUTPUTS = PARTS | {"feature_change_local"}
"""Quantities that are read off inputs, but relative to outputs."""
OF_READOUTS = frozenset({"log_z", "readout_row", "output_drift_features", "output_drift_readout", "output_drift_joint"})
"""Quantities of output layers alone."""
ATTENTION = frozenset(entry.key for entry in attention.ENTRIES)
"""Quantities of attention blocks."""


@dataclass
class StepContext:
    """Facts about one step on the host, filled in as they become known: those of this process, then those of all."""

    lr: dict[int, float] = field(default_factory=dict)  # layer index -> learning rate, for layers some optimizer owns
    stepped: set[int] = field(default_factory=set)  # layers whose optimizer made its step
    unused: set[int] = field(default_factory=set)  # layers without a gradient
    divided: set[int] = field(default_factory=set)  # layers whose parameters are stepped by several optimizers
    called: set[int] = field(default_factory=set)  # layers that were called in the forward
    hidden: Mapping[int, str] = field(default_factory=dict)  # layer index -> why features of its calls cannot be seen
    fed: set[int] = field(default_factory=set)  # layers whose inputs are available
    lasted: set[int] = field(default_factory=set)  # layers whose outputs are available
    graded: set[int] = field(default_factory=set)  # layers whose every output received its gradient once
    eps: dict[int, float] = field(default_factory=dict)  # layer index -> rounding of its outputs
    replayed: set[int] = field(default_factory=set)  # layers whose outputs after the step are known
    # layers whose outputs were computed again, but none of the rows that are compared
    unchosen: set[int] = field(default_factory=set)
    # layer index -> why steps of the optimizer that has it cannot be seen; empty if they can
    held: Mapping[int, str] = field(default_factory=dict)
    unseen: str = ""  # why calls of layers were not, or of no use; empty if they were
    sampled: bool = False  # whether features are of some samples only, which were run beside the step
    # whether features are those of autocast, though a forward beside the step could be in full precision
    halved: bool = False
    # layers whose outputs all samples have in common, where only some samples were run
    shared: set[int] = field(default_factory=set)
    no_replay: str = ""  # why none are; empty if they should be
    no_drift: str = ""  # why ``feature_drift`` is missing; empty if it should not be
    closures: int = 0  # how often the closure ran, if more than once
    replaced: set[int] = field(default_factory=set)  # layers whose weight has become another one since training began
    rewritten: bool = False  # whether an optimizer overwrote gradients
    clipped: bool = False  # whether gradients were clipped otherwise than by a factor
    accumulated: int = 1  # what the loss was divided by before the backward pass
    loss_scale: float = 1.0  # what it was multiplied by
    loss_parts: int = 1  # of how many losses like the model's that of the step is the sum; 1 if it is their mean
    # why the loss after the step is not known, where it was asked for by itself, which is that of all micro-batches;
    # ``None`` if it was not
    no_loss: str | None = None
    loss_eps: float | None = None  # rounding of that loss, if it was
    # layer index -> what a correction multiplied the learning rate with
    multipliers: Mapping[int, float] = field(default_factory=dict)
    # layer index -> weight decay, for layers some optimizer owns and whose weight is a parameter
    decay: dict[int, WeightDecay] = field(default_factory=dict)
    # layer index -> what must be known of the values of the attention block reported there, by quantity
    attention: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    # whether the loss is given what is no input for it; ``None`` where it was not seen
    unfit_loss_input: bool | None = None
    modes: Mapping[str, float] = field(default_factory=dict)  # values of the whole network that modules' modes have
    # (quantity or what it needs, layer index or NETWORK for all of them) -> why it is missing
    why_not: dict[tuple[str, int], str] = field(default_factory=dict)


def readings_of(i: int, layer: Layer, raw: Raw, facts: StepContext) -> Readings:
    """Return the numbers of one layer, and the settings of its optimizer."""
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
    """Return quantity -> value and, for every value that is NaN, quantity -> reason; also for a contribution of exactly
    0 that is not for want of a gradient, and for what is a bound.
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
    # b was the gradient of the divided and scaled loss.
    if key == "backward_rms":
        return value * facts.accumulated / facts.loss_scale
    return value * facts.loss_scale / facts.accumulated if key == "sensitivity" else value


def layer_errors(values: Mapping[str, float], readings: Readings, facts: StepContext, exact: bool) -> dict[str, float]:
    """Return the standard errors of those of the values that are known of some rows; 0 if all rows were used."""
    errors = {}
    for key in values:
        entry = QUANTITIES[key]
        if entry.error is None:
            continue
        scale = facts.loss_scale / facts.accumulated if key == "sensitivity" else 1.0
        known = math.nan if math.isnan(values[key]) else 0.0
        errors[key] = known if math.isnan(known) or (exact and entry.of_inputs) else abs(entry.error(readings) * scale)
    return errors


def _missing(key: str, i: int, layer: Layer, readings: Readings, facts: StepContext) -> str:
    """Return why a quantity is missing for a layer; empty if it is not."""
    role, needs = layer.info.role, QUANTITIES[key].needs
    if i in facts.replaced:
        return REPLACED
    if role == "vector" and not QUANTITIES[key].of_vectors:
        return "a bias or gain has its RMS, update, drift and contribution only"
    if role == NODE and (QUANTITIES[key].of_inputs or not needs & FEATURES):
        return "the output of a module has features only, and no weight"
    if key in ATTENTION and i not in facts.attention:
        return NOT_QUERIES
    if key in OF_READOUTS and role != "readout":
        return "it is no output layer"
    updated = needs & {"dW", "g", "dqk", "state"}
    if (updated or key in ("lr", "lr_multiplier")) and i not in facts.lr:
        if i in facts.held:
            return facts.held[i] or (NOT_STEPPED if facts.lr else NO_STEP)
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
        return f"counted at {layer.tied_to}, whose parameter it is" if layer.tied_to else _no_gradient(facts)
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
        return "the angle in equilibrium is known of AdamW and its kin only"
    return ""


def _no_features(key: str, i: int, layer: Layer, readings: Readings, facts: StepContext) -> str:
    entry = QUANTITIES[key]
    needs = entry.needs
    if layer.no_features:
        return layer.no_features
    if facts.unseen:
        return facts.unseen
    if layer.info.role == "embedding" and entry.of_inputs:
        return ONE_HOT
    if i in facts.hidden:
        return facts.hidden[i]
    if i not in facts.called:
        return NOT_CALLED
    known = facts.why_not.get((key, NETWORK), "") or facts.why_not.get((key, i), "")
    if known:
        return known
    if entry.of_inputs and i not in facts.fed:
        return "its inputs are not a tensor of numbers, or were overwritten"
    missed = UNCHOSEN if i in facts.unchosen else ""
    if "probe" in needs:
        rounded = key in DRIFTS and 0 < readings.get(key) < CHANGE_MARGIN * facts.eps[i]
        return facts.no_drift or missed or (ROUNDED if rounded else "")
    if key == "feature_change_local" and layer.layout.taps > 1:
        return "the taps of a convolution overlap: what one adds, another may take away"
    if needs & {"h", "dh"} and (not entry.of_inputs or key in OVER_OUTPUTS) and i not in facts.lasted:
        return "its outputs were overwritten in this step; from the next measured one on they are copied"
    if "b" in needs and i in facts.shared:
        return SHARED
    if "b" in needs and i not in facts.graded:
        return "no gradient arrived at its output, or more than one, or it was overwritten"
    changed = {"backward_speed": "b", "dual_bfa_cos": "b", "gradient_change": "g"}.get(key, "")
    if changed and 0 < readings.get(f"d{changed}.norm") < entry.margin * facts.eps[i] * readings.get(f"{changed}.norm"):
        return "its change is too close to the rounding of its gradients"
    if entry.unit == "directions" and readings.get("h_in.rows" if entry.of_inputs else "b.rows") == 1:
        return SINGLE_ROW
    if "dh" not in needs:
        return ""
    if facts.no_replay:
        return facts.no_replay
    if i not in facts.replayed:
        return missed or "called differently when the forward was run again"
    if key in PARTS:
        return _no_part(readings, facts.eps[i])
    if key == "feature_cancellation":
        return ""  # a change that is rounded away cancels nothing
    if 0 < readings.get("dh.norm") < entry.margin * facts.eps[i] * readings.get("h.compared"):
        return HALF if facts.halved else ROUNDED
    return ""


def _no_part(readings: Readings, eps: float) -> str:
    if math.isnan(readings.get("W.dh")) and sound(readings.raw):
        return "defined for a single trained matrix only, whose inputs are known before and after the step"
    return ROUNDED if 0 < readings.get("dx.norm") < CHANGE_MARGIN * eps * readings.get("x.norm") else ""
