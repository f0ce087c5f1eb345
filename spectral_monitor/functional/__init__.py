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

_NAMES = {
    "feature_speed": (
        *("backward_feature_angle", "backward_feature_cosine", "backward_speed"),
        *("contribution", "sensitivity"),
    ),
    "features": ("alignment", "feature_rms", "relative_change"),
    "kernels": (
        *("activation_ratio", "bfk_extremes", "bfk_moments", "bfk_ratio"),
        *("dual_bfk_moments", "feature_cancellation", "sample_share", "weight_cancellation"),
    ),
    "laziness": ("kernel_alignment", "kernel_change", "linearity", "output_parts"),
    "norms": (
        *("drift_fro_ratio", "drift_ratio", "frobenius_norm", "natural_norm"),
        *("spectral_norm", "spectral_norm_bounds", "stable_rank", "update_ratio"),
    ),
}
"""Module -> what is public of it."""

if not TYPE_CHECKING:  # medians need no torch
    __getattr__ = lazy(__name__, {name: module for module, names in _NAMES.items() for name in names})
