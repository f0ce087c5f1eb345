"""Norms of large matrices in a small, counted number of passes, wherever their entries lie."""

from spectral_monitor.linalg.estimate import (
    DOUBT,
    MAX_STEPS,
    SpectralEstimate,
    spectral_estimate,
    spectral_estimates,
)
from spectral_monitor.linalg.pieces import Part, Pieces
from spectral_monitor.linalg.rounds import (
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
from spectral_monitor.linalg.scale import compute_dtype, frobenius, tame

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
