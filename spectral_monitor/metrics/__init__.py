"""The formulas as torchmetrics: accumulated over batches, reduced over processes."""

from spectral_monitor.metrics.features import Alignment, BackwardFeatureAngle, FeatureChange
from spectral_monitor.metrics.norms import SpectralNorm, StableRank

__all__ = ["Alignment", "BackwardFeatureAngle", "FeatureChange", "SpectralNorm", "StableRank"]
