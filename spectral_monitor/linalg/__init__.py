"""Norms of large matrices in a small, counted number of passes, wherever their entries lie."""

from spectral_monitor.linalg.collectives import (
    Exchange,
    Routine,
    abreast,
    alone,
    in_turn,
    joined,
    resumed,
    shares,
    together,
    totals,
)
from spectral_monitor.linalg.scaling import compute_dtype, frobenius, tame
from spectral_monitor.linalg.sharded_stack import Part, Pieces
from spectral_monitor.linalg.spectral_norms import (
    DOUBT,
    MAX_STEPS,
    SpectralEstimate,
    spectral_estimate,
    spectral_estimates,
)

__all__ = [
    "DOUBT",
    "MAX_STEPS",
    "Exchange",
    "Part",
    "Pieces",
    "Routine",
    "SpectralEstimate",
    "abreast",
    "alone",
    "compute_dtype",
    "frobenius",
    "in_turn",
    "joined",
    "resumed",
    "shares",
    "spectral_estimate",
    "spectral_estimates",
    "tame",
    "together",
    "totals",
]
