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
"""Value of the network -> the quantity of a readout that it is, and the choice among several readouts."""
DEFAULT_REASONS = {
    "loss_change_predicted": "a contribution is not finite, or gradients were changed after the backward pass",
    "contribution_spread": "it divides by the smallest contribution of a block, and one block does not lower the loss",
    "readout_share": (
        "it is a share of the predicted decrease, and no decrease is predicted, or the output layers' share is not "
        "known"
    ),
    "worst_layer_ratio": "no two layers have updates to compare",
    "feature_error": "no layer has a standard error of feature_change: all its rows were measured, or it has no value",
    "equilibrium_steps": "no hidden weight has a learning rate and a decoupled weight decay",
    "property_sp": "the outputs of no hidden layer are known",
    "property_fl": "needs a single output layer whose inputs are known to have changed",
    "property_ld": "the change of the loss is not predicted",
    "property_bc": "it is computed from contribution_spread, which is not known",
    "property_rfl": "needs a single output layer whose inputs are known to have changed",
    "property_fs": "no layer before the output layer has a feature_change",
    "property_bs": "no layer has a backward_speed",
}
"""Why a value is NaN, where no other reason is known."""


def summarize(values: Mapping[str, Tensor], layers: Sequence[Layer], raw: Raw) -> dict[str, float]:
    """Return the values of the whole network that follow from those of its layers, NaN where they are not defined.

    ``loss_change_predicted`` counts every parameter with a gradient, measured or not, each once.
    ``contribution_spread`` is over the blocks of :func:`contribution_blocks`. If several readouts were called,
    ``final_layer_alignment`` is that of the smallest.
    """
    summary: dict[str, float] = {}
    operators = [i for i, layer in enumerate(layers) if layer.info.is_dense]
    if "contribution" in values:
        parts = [
            float(value[0])
            for scalars in raw.values()
            for name, value in scalars.items()
            if name.partition(".")[0] == "contribution"
        ]
        defined = bool(parts) and not bool(values["contribution"].isinf().any())
        summary["loss_change_predicted"] = -sum(parts) if defined else math.nan
        shares = block_contributions(values["contribution"].tolist(), layers)
        downhill = bool(shares) and min(shares) > 0
        readouts = _readout_contribution(values["contribution"].tolist(), layers)
        decrease = -summary["loss_change_predicted"]
        summary["readout_share"] = readouts / decrease if decrease > 0 else math.nan
        summary["contribution_spread"] = max(shares) / min(shares) if downhill else math.nan
    for name, (key, choose) in OF_READOUTS.items():
        if key in values:
            heads = [float(values[key][i]) for i, layer in enumerate(layers) if layer.info.role == "readout"]
            summary[name] = choose((head for head in heads if not math.isnan(head)), default=math.nan)
    if "update_natural" in values:
        ratios = balance_ratios(values["update_natural"][operators])
        ratios = torch.maximum(ratios, 1 / ratios)
        summary["worst_layer_ratio"] = max((x for x in ratios.tolist() if not math.isnan(x)), default=math.nan)
    return summary


def block_contributions(contributions: Sequence[float], layers: Sequence[Layer]) -> list[float]:
    """Return the contribution of each block, for blocks with a layer whose contribution is known."""
    blocks = (
        [x for i in block.members if not math.isnan(x := contributions[i])] for block in contribution_blocks(layers)
    )
    return [sum(block) for block in blocks if block]


def _readout_contribution(contributions: Sequence[float], layers: Sequence[Layer]) -> float:
    """Return what the readouts contribute, with their biases; NaN if a readout is an embedding, too."""
    readouts = [layer for layer in layers if layer.info.role == "readout"]
    names = {layer.info.name for layer in readouts}
    if any(layer.tied_to for layer in readouts) or any(layer.tied_to in names for layer in layers):
        return math.nan
    blocks = {layer.block for layer in readouts}
    parts = [x for x, layer in zip(contributions, layers, strict=True) if layer.block in blocks and not math.isnan(x)]
    return sum(parts) if parts else math.nan


def other_reasons(summary: Mapping[str, float], layers: Sequence[Layer], reasons: Mapping[str, str]) -> dict[str, str]:
    """Return reasons for NaN values of a summary that have none yet, under the keys of a measurement's reasons.

    ``reasons``: those that are known already.
    """
    added = {}
    for key in [key for key, value in summary.items() if math.isnan(value) and f"{key}/{SUMMARY}" not in reasons]:
        reason = DEFAULT_REASONS.get(key, "")
        if key in OF_READOUTS:
            heads = [f"{OF_READOUTS[key][0]}/{layer.info.name}" for layer in layers if layer.info.role == "readout"]
            reason = next((reasons[head] for head in heads if head in reasons), "no output layer is measured")
        added[f"{key}/{SUMMARY}"] = reason
    return added


def properties(
    values: Mapping[str, Tensor],
    summary: Mapping[str, float],
    layers: Sequence[Layer],
    raw: Raw,
    eps: Mapping[int, float],
) -> dict[str, float]:
    """Return the properties that "The Feature Speed Formula" asks of a scaling, NaN where one is not known.

    The last features are the readout's inputs. (SP), (FS) and (BS) are those of the layer whose outputs are furthest
    off. (FS) leaves readouts out, as the paper does (l < L): outputs of the network may be near 0 by design, and then
    their relative change has no bound.

    Args:
        values: quantities of each layer, tier "full".
        eps: layer index -> rounding of its outputs.
    """
    hidden = [i for i, layer in enumerate(layers) if layer.info.role == "operator"]
    readouts = [i for i, layer in enumerate(layers) if layer.info.role == "readout"]
    without_nodes = [i for i, layer in enumerate(layers) if layer.info.role != NODE]
    features = [i for i in without_nodes if i not in readouts]
    sizes = [size for i in hidden if math.isfinite(size := float(values["feature_rms"][i]))]
    network_values = {
        "property_sp": max(sizes, key=lambda size: abs(math.log(size)) if size > 0 else math.inf, default=math.nan),
        "property_fl": math.nan,
        "property_ld": -summary["loss_change_predicted"],
        "property_bc": summary["contribution_spread"],
        "property_rfl": math.nan,
        "property_fs": _largest(values["feature_change"][features]),
        "property_bs": _largest(values["backward_speed"][without_nodes]),
    }
    if len(readouts) == 1:
        scalars = raw.get(readouts[0], {})
        if "dx.norm" in scalars:
            (change,), (size,), (before,) = scalars["dx.norm"], scalars["dx.size"], scalars["x.norm"]
            if change == 0 or change >= CHANGE_MARGIN * eps[readouts[0]] * before:
                network_values["property_fl"] = change / math.sqrt(size)
                network_values["property_rfl"] = change / before if before else math.nan
    return network_values


def equilibrium_steps(layers: Sequence[Layer], facts: StepContext) -> float:
    """Return the number of steps in which decay makes hidden weights forget their size: the median of 1 / (2 lr wd)."""
    rates = [facts.lr[i] * facts.decay[i].factor for i in facts.decay if layers[i].info.role == "operator"]
    median = geometric_median(rate for rate in rates if rate > 0)
    return 1 / (2 * median) if median > 0 else math.nan


def _largest(values: Tensor) -> float:
    return max((value for value in values.tolist() if math.isfinite(value)), default=math.nan)
