"""Norms of large matrices in a small, counted number of passes."""

from spectral_monitor.linalg.estimate import SpectralEstimate, compute_dtype, frobenius, spectral_estimate, tame

__all__ = ["SpectralEstimate", "compute_dtype", "frobenius", "spectral_estimate", "tame"]
