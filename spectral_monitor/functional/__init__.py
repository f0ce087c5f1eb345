"""The formulas: tensors in, tensors out. No state, no hooks, no randomness."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spectral_monitor.suggestions import lazy

if TYPE_CHECKING:
    from spectral_monitor.functional.feature_speed import (
        backward_feature_angle,
        backward_feature_cosine,
        backward_speed,
        contribution,
        sensitivity,
    )
    from spectral_monitor.functional.features import (
        alignment,
        feature_rms,
        relative_change,
    )
    from spectral_monitor.functional.kernels import (
        activation_ratio,
        bfk_extremes,
        bfk_moments,
        bfk_ratio,
        dual_bfk_moments,
        feature_cancellation,
        sample_share,
        weight_cancellation,
    )
    from spectral_monitor.functional.laziness import kernel_alignment, kernel_change, linearity, output_parts
    from spectral_monitor.functional.norms import (
        drift_fro_ratio,
        drift_ratio,
        frobenius_norm,
        natural_norm,
        spectral_norm,
        spectral_norm_bounds,
        stable_rank,
        update_ratio,
    )

__all__ = [
    "activation_ratio",
    "alignment",
    "backward_feature_angle",
    "backward_feature_cosine",
    "backward_speed",
    "bfk_extremes",
    "bfk_moments",
    "bfk_ratio",
    "contribution",
    "drift_fro_ratio",
    "drift_ratio",
    "dual_bfk_moments",
    "feature_cancellation",
    "feature_rms",
    "frobenius_norm",
    "kernel_alignment",
    "kernel_change",
    "linearity",
    "natural_norm",
    "output_parts",
    "relative_change",
    "sample_share",
    "sensitivity",
    "spectral_norm",
    "spectral_norm_bounds",
    "stable_rank",
    "update_ratio",
    "weight_cancellation",
]

_WHERE = {
    "activation_ratio": "kernels",
    "alignment": "features",
    "backward_feature_angle": "feature_speed",
    "backward_feature_cosine": "feature_speed",
    "backward_speed": "feature_speed",
    "bfk_extremes": "kernels",
    "bfk_moments": "kernels",
    "bfk_ratio": "kernels",
    "contribution": "feature_speed",
    "drift_fro_ratio": "norms",
    "drift_ratio": "norms",
    "dual_bfk_moments": "kernels",
    "feature_cancellation": "kernels",
    "feature_rms": "features",
    "frobenius_norm": "norms",
    "kernel_alignment": "laziness",
    "kernel_change": "laziness",
    "linearity": "laziness",
    "natural_norm": "norms",
    "output_parts": "laziness",
    "relative_change": "features",
    "sample_share": "kernels",
    "sensitivity": "feature_speed",
    "spectral_norm": "norms",
    "spectral_norm_bounds": "norms",
    "stable_rank": "norms",
    "update_ratio": "norms",
    "weight_cancellation": "kernels",
}

if not TYPE_CHECKING:  # medians need no torch
    __getattr__ = lazy(__name__, _WHERE)
