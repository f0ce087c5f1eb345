"""The formulas: tensors in, tensors out. No state, no hooks, no randomness."""

from spectral_monitor.functional.feature_speed import (
    backward_feature_angle,
    backward_feature_cosine,
    backward_speed,
    contribution,
    sensitivity,
)
from spectral_monitor.functional.features import alignment, feature_rms, relative_change
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
