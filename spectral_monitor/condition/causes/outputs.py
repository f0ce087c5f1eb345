"""Causes of outputs that are far too large or too small from the start, or that do not differ between samples."""

from __future__ import annotations

import math

from spectral_monitor.condition.causes.explanation import Explanation
from spectral_monitor.condition.findings import Finding
from spectral_monitor.condition.network import GAINS, MIN_SPREAD, Network
from spectral_monitor.condition.trends.outputs import FEATURE_LIMIT
from spectral_monitor.condition.verdict import Remedy, short
from spectral_monitor.fitting.medians import geometric_median

USUAL_GAIN, HALVES = 0.6, 0.5
"""A usual gain; with a median gain above the second, weights are large enough to keep the size of features."""


def huge_at_start(network: Network, limit: float) -> str:
    """Return a sentence on outputs whose RMS is above a limit before the first step; empty if there are none."""
    sizes = {row.name: size for row in network.peers if (size := row.get("feature_rms")) > 0}
    if network.step > 1 or not sizes or not max(sizes.values()) > limit:
        return ""
    name = max(sizes, key=lambda layer: sizes[layer])
    symptom = f"the outputs of {name} have RMS {short(sizes[name])} before the first step"
    if next(iter(sizes.values())) > FEATURE_LIMIT:
        return (
            f"{symptom}, and those of the first layer are already large: normalize inputs, or initialize smaller "
            "weights"
        )
    return (
        f"{symptom}, because they grow from layer to layer: initialize smaller weights, scale residual branches down, "
        "or add norms between layers"
    )


def vanish(finding: Finding, network: Network) -> Explanation:
    """Explain by weights that are too small."""
    symptom = f"the layer with the smallest outputs began with RMS {short(finding.value)}"
    gain = geometric_median(row.gain for row in network.peers)
    if not gain < HALVES:  # most layers have healthy gains, or gains were not measured
        return Explanation("weights_too_small", f"{symptom}: initial weights are too small", Remedy("check"))
    return Explanation(
        "weights_too_small",
        f"{symptom}: each layer multiplies the size of features by {short(gain)}, so they vanish; multiply initial "
        f"weights by about {short(USUAL_GAIN / gain)}",
        Remedy("scale_weights", (), USUAL_GAIN / gain),
    )


def too_small_to_differ(gain: float) -> Explanation:
    """Explain outputs that are alike for all samples by the median gain of the initial weights."""
    return Explanation(
        "weights_too_small",
        f"initial weights multiply features by only {short(gain)} in each layer, so outputs hardly differ between "
        f"samples: multiply initial weights by about {short(USUAL_GAIN / gain)}",
        Remedy("scale_weights", (), USUAL_GAIN / gain),
    )


def began_small(symptom: str, gain: float) -> Explanation | None:
    """Explain steps that are far from the size of the weights by a median gain below that of healthy networks."""
    return too_small(symptom, gain) if 0 < gain < GAINS[0] else None


def too_small(symptom: str, gain: float) -> Explanation:
    """Explain by initial weights with this gain, which is below that of healthy networks."""
    return Explanation(
        "weights_too_small",
        f"{symptom}; initial weights multiply features by only {short(gain)} in the median layer: multiply them by "
        f"about {short(USUAL_GAIN / gain)}, unless a factor in the forward pass makes up for it",
        Remedy("scale_weights", (), USUAL_GAIN / gain),
    )


def began_large(symptom: str, gain: float) -> Explanation:
    """Explain by initial weights with this gain, which is above that of healthy networks."""
    return Explanation(
        "weights_too_large",
        f"{symptom} so large that they multiply features by {short(gain)} or more: divide initial weights by about "
        f"{short(gain / USUAL_GAIN)}",
        Remedy("scale_weights", (), USUAL_GAIN / gain),
    )


def collapsed(finding: Finding, network: Network) -> Explanation:
    """Explain by inputs of layers that hardly differ between samples."""
    limit = max(finding.value, MIN_SPREAD)
    layers = [name for name, spread in network.input_spreads.items() if spread <= limit]
    return Explanation(
        "features_collapsed",
        f"the inputs of {len(layers)} of {len(network.input_spreads)} layers, from {layers[0]} on, differ between "
        f"samples by less than {short(100 * math.sqrt(limit))} % of their size, so the network gives nearly the same "
        "answer to all samples: look there for a missing residual connection or norm, saturated activations, or inputs "
        "that are all alike",
        Remedy("check"),
    )


def uncentered(finding: Finding, network: Network) -> Explanation:
    """Explain by data whose mean is much larger than the differences between samples."""
    return Explanation(
        "input_scale",
        f"the inputs of {network.peers[0].name} hardly differ between samples: their mean is about "
        f"{short(1 / math.sqrt(finding.value))} times as large as the differences, which hides them; if they are data, "
        "normalize each column to mean 0 and variance 1, else check what computes them",
        Remedy("check"),
    )
