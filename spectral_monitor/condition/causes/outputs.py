"""Causes of outputs that are far too large or too small from the start, or alike for all samples."""

from __future__ import annotations

import math

from spectral_monitor.condition.causes.explanation import Explanation
from spectral_monitor.condition.findings import Finding
from spectral_monitor.condition.network import ALIKE, Network
from spectral_monitor.condition.trends.outputs import FEATURE_LIMIT
from spectral_monitor.condition.verdict import Remedy, short
from spectral_monitor.fitting.medians import geometric_median

USUAL_GAIN, HALVES = 0.6, 0.5
"""A usual gain; with a median gain above the second, weights are large enough to keep the size of features."""


def huge_at_start(network: Network, limit: float) -> str:
    """Return a sentence on outputs above a limit that come before any step; empty if there are none.

    Args:
        network: at a measurement; outputs are those of the forward pass before its step.
        limit: in root mean square.
    """
    sizes = {row.name: size for row in network.peers if (size := row.get("feature_rms")) > 0}
    if network.step > 1 or not sizes or not max(sizes.values()) > limit:
        return ""
    name = max(sizes, key=lambda layer: sizes[layer])
    seen = f"the outputs of {name} have RMS {short(sizes[name])} before the first step"
    if next(iter(sizes.values())) > FEATURE_LIMIT:
        return f"{seen}, and those of the first layer are large: normalize inputs, or begin with smaller weights"
    return (
        f"{seen}, for they grow from layer to layer: begin with smaller weights, scale residual branches down, or put "
        "norms between layers"
    )


def vanish(finding: Finding, network: Network) -> Explanation:
    """Explain by weights that are too small."""
    seen = f"the smallest outputs of a layer begin with RMS {short(finding.value)}"
    gain = geometric_median(row.gain for row in network.peers)
    if not gain < HALVES:  # most layers have healthy gains, or gains were not measured
        return Explanation("weights_too_small", f"{seen}: initial weights are too small", Remedy("check"))
    return Explanation(
        "weights_too_small",
        f"{seen}: weights multiply the size of features by {short(gain)} in each layer, so they vanish; multiply "
        f"initial weights by about {short(USUAL_GAIN / gain)}",
        Remedy("scale_weights", (), USUAL_GAIN / gain),
    )


def collapsed(finding: Finding, network: Network) -> Explanation:
    """Explain by what makes the inputs of layers alike."""
    limit = max(finding.value, ALIKE)
    alike = [name for name, spread in network.input_spreads.items() if spread <= limit]
    seen = f"the inputs of {len(alike)} of {len(network.input_spreads)} layers, from {alike[0]} on, differ"
    sentence = (
        f"{seen} between samples by less than {short(100 * math.sqrt(limit))} % of their size, so that the network "
        "gives nearly the same answer to all: look there for a residual connection or a norm that is missing, for "
        "activations that saturate, or for inputs that are all alike"
    )
    return Explanation("features_collapsed", sentence, Remedy("check"))
