"""The formulas: tensors in, tensors out. No state, no hooks, no randomness."""

from spectral_monitor.functional.feature_speed import (
    backward_feature_angle,
    backward_feature_cosine,
    contribution,
    sensitivity,
)
from spectral_monitor.functional.features import (
    alignment,
    feature_rms,
    relative_change,
)
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
    "alignment",
    "backward_feature_angle",
    "backward_feature_cosine",
    "contribution",
    "drift_fro_ratio",
    "drift_ratio",
    "feature_rms",
    "frobenius_norm",
    "natural_norm",
    "relative_change",
    "sensitivity",
    "spectral_norm",
    "spectral_norm_bounds",
    "stable_rank",
    "update_ratio",
]
