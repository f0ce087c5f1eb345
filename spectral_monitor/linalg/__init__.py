"""Norms of large matrices in a small, counted number of passes, wherever their entries lie."""

from spectral_monitor.linalg.blind import blind_estimate
from spectral_monitor.linalg.estimate import (
    DOUBT,
    MAX_STEPS,
    SpectralEstimate,
    compute_dtype,
    frobenius,
    in_cache,
    joined_estimates,
    shared_estimate,
    spectral_estimate,
    tame,
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
    "blind_estimate",
    "compute_dtype",
    "frobenius",
    "in_cache",
    "in_turn",
    "joined",
    "joined_estimates",
    "resumed",
    "shared_estimate",
    "shares",
    "spectral_estimate",
    "tame",
    "together",
    "totals",
]
