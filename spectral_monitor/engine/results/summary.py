"""Values of the whole network that follow from those of layers, and why one of them is not known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from spectral_monitor.engine.results.raw import Raw
from spectral_monitor.engine.results.reasons import CHANGE_MARGIN, StepContext
from spectral_monitor.fitting.medians import geometric_median
from spectral_monitor.functional.norms import balance_ratios
from spectral_monitor.layers import Layer
from spectral_monitor.measurement import NODE, SUMMARY
from spectral_monitor.parametrization.tying import contribution_blocks

OF_READOUTS = {"final_layer_alignment": ("alignment", min), "linearity": ("linearity", max)}
"""Values that are those of a readout: of which quantity, and of several readouts the smallest or the largest."""
WITHOUT = {
    "loss_change_predicted": "a contribution is not finite, or gradients were changed after the backward pass",
    "contribution_spread": "it divides by the least contribution of a block, and one does not lower the loss",
    "readout_share": "it is a part of the predicted decrease, and there is none, or readouts have no part of their own",
    "worst_layer_ratio": "no two layers have updates to compare",
    "feature_error": "no layer has a standard error of feature_change: all its rows were measured, or it has no value",
    "equilibrium_steps": "no hidden weight has a learning rate and a decoupled weight decay",
    "property_sp": "the outputs of no hidden layer are known",
    "property_fl": "it takes a single readout whose inputs are known to have changed",
    "property_ld": "the change of the loss is not predicted",
    "property_bc": "it is contribution_spread, which is not known",
    "property_rfl": "it takes a single readout whose inputs are known to have changed",
    "property_fs": "no layer before the readout has a feature_change",
    "property_bs": "no layer has a backward_speed",
}
"""Why a value is NaN, where nothing else was found to be the reason."""


def summarize(values: Mapping[str, Tensor], layers: Sequence[Layer], raw: Raw) -> dict[str, float]:
    """Return the values of the whole network that follow from what was measured, NaN where they are not defined.

    ``loss_change_predicted`` counts every parameter with a gradient, measured or not, each once.
    ``contribution_spread`` is of the blocks of :func:`contribution_blocks`. Of several readouts
    ``final_layer_alignment`` is the smallest, of those that were called.
    """
    summary: dict[str, float] = {}
    operators = [i for i, layer in enumerate(layers) if layer.info.is_dense]
    if "contribution" in values:
        parts = [
            float(v[0]) for some in raw.values() for name, v in some.items() if name.partition(".")[0] == "contribution"
        ]
        known = bool(parts) and not bool(values["contribution"].isinf().any())
        summary["loss_change_predicted"] = -sum(parts) if known else math.nan
        shares = block_contributions(values["contribution"].tolist(), layers)
        downhill = bool(shares) and min(shares) > 0
        taken = _of_readouts(values["contribution"].tolist(), layers)
        decrease = -summary["loss_change_predicted"]
        summary["readout_share"] = taken / decrease if decrease > 0 else math.nan
        summary["contribution_spread"] = max(shares) / min(shares) if downhill else math.nan
    for name, (key, end) in OF_READOUTS.items():
        if key in values:
            heads = [float(values[key][i]) for i, layer in enumerate(layers) if layer.info.role == "readout"]
            summary[name] = end((head for head in heads if not math.isnan(head)), default=math.nan)
    if "update_natural" in values:
        off = balance_ratios(values["update_natural"][operators])
        off = torch.maximum(off, 1 / off)
        summary["worst_layer_ratio"] = max((x for x in off.tolist() if not math.isnan(x)), default=math.nan)
    return summary


def block_contributions(contributions: Sequence[float], layers: Sequence[Layer]) -> list[float]:
    """Return what the blocks contribute of which something is known, from what their layers do."""
    found = []
    for block in contribution_blocks(layers):
        known = [x for i in block.members if not math.isnan(x := contributions[i])]
        found += [sum(known)] if known else []
    return found


def _of_readouts(contributions: Sequence[float], layers: Sequence[Layer]) -> float:
    """Return what the readouts contribute, their biases included; NaN where a readout is an embedding too."""
    readouts = [layer for layer in layers if layer.info.role == "readout"]
    names = {layer.info.name for layer in readouts}
    if any(layer.tied_to for layer in readouts) or any(layer.tied_to in names for layer in layers):
        return math.nan
    blocks = {layer.block for layer in readouts}
    known = [x for x, layer in zip(contributions, layers, strict=True) if layer.block in blocks and not math.isnan(x)]
    return sum(known) if known else math.nan


def other_reasons(summary: Mapping[str, float], layers: Sequence[Layer], known: Mapping[str, str]) -> dict[str, str]:
    """Return reasons for what is NaN in a summary and has none yet, under the keys of a measurement's reasons.

    Args:
        summary: values of the whole network.
        layers: those of the measurement.
        known: the reasons that there are already.
    """
    found = {}
    for key in [key for key, value in summary.items() if math.isnan(value) and f"{key}/{SUMMARY}" not in known]:
        why = WITHOUT.get(key, "")
        if key in OF_READOUTS:
            heads = [layer.info.name for layer in layers if layer.info.role == "readout"]
            reasons = [known[own] for head in heads if (own := f"{OF_READOUTS[key][0]}/{head}") in known]
            why = reasons[0] if reasons else "no readout is measured"
        found[f"{key}/{SUMMARY}"] = why
    return found


def properties(
    values: Mapping[str, Tensor],
    summary: Mapping[str, float],
    layers: Sequence[Layer],
    raw: Raw,
    eps: Mapping[int, float],
) -> dict[str, float]:
    """Return the properties that "The Feature Speed Formula" asks of a scaling, NaN where one is not known.

    The last features are the readout's inputs. (SP), (FS) and (BS) go by the outputs of the layers: of those that are
    known, the one furthest off. (FS) is of features alone. The paper takes it over l < L, since the outputs of the
    network begin near 0 where they are small by design, and their relative change has no bound.

    Args:
        values: quantities of each layer, tier "full".
        summary: values of the whole network that there are already.
        layers: those of the values.
        raw: what they were read off.
        eps: layer index -> rounding of its outputs.
    """
    hidden = [i for i, layer in enumerate(layers) if layer.info.role == "operator"]
    readouts = [i for i, layer in enumerate(layers) if layer.info.role == "readout"]
    own = [i for i, layer in enumerate(layers) if layer.info.role != NODE]
    features = [i for i in own if i not in readouts]
    sizes = [size for i in hidden if math.isfinite(size := float(values["feature_rms"][i]))]
    found = {
        "property_sp": max(sizes, key=lambda size: abs(math.log(size)) if size > 0 else math.inf, default=math.nan),
        "property_fl": math.nan,
        "property_ld": -summary["loss_change_predicted"],
        "property_bc": summary["contribution_spread"],
        "property_rfl": math.nan,
        "property_fs": _largest(values["feature_change"][features]),
        "property_bs": _largest(values["backward_speed"][own]),
    }
    if len(readouts) == 1:
        seen = raw.get(readouts[0], {})
        if "dx.norm" in seen:
            (change,), (size,), (before,) = seen["dx.norm"], seen["dx.size"], seen["x.norm"]
            if change == 0 or change >= CHANGE_MARGIN * eps[readouts[0]] * before:
                found["property_fl"] = change / math.sqrt(size)
                found["property_rfl"] = change / before if before else math.nan
    return found


def equilibrium_steps(layers: Sequence[Layer], facts: StepContext) -> float:
    """Return in how many steps decay makes hidden weights forget their size: the median of 1 / (2 lr wd)."""
    rates = [facts.lr[i] * facts.decay[i].factor for i in facts.decay if layers[i].info.role == "operator"]
    middle = geometric_median(rate for rate in rates if rate > 0)
    return 1 / (2 * middle) if middle > 0 else math.nan


def _largest(values: Tensor) -> float:
    return max((value for value in values.tolist() if math.isfinite(value)), default=math.nan)
