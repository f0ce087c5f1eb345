"""PyTorch Lightning callbacks."""

from spectral_monitor.callbacks.monitor import SpectralMonitor

__all__ = ["SpectralMonitor"]
